"""Changes where Transformer Engine is installed: its Adam, extra state, buffers, absence."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.runtime import mcore_patches
from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.models.test_tensor_overlap import overlapping_layers
from tests.distributed.pool import Pool
from tests.e2e.runs import (
    PIPELINE,
    SECONDS,
    assembled,
    assert_same_course,
    course,
    failure_here,
    run,
    step_records,
    train_here,
    train_parts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the conventions of Transformer Engine: the step in the group, none per weight."""

    STATES = ("exp_avg", "exp_avg_sq")

    def __init__(self, params: Any, *, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                for name in self.STATES:
                    state.setdefault(name, torch.zeros_like(weight))
                state["exp_avg"].lerp_(weight.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(weight.grad**2, 1 - beta2)
                mean = state["exp_avg"] / (1 - beta1 ** group["step"])
                square = state["exp_avg_sq"] / (1 - beta2 ** group["step"])
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; an entry that is no moment is a KeyError."""
        for state in state_dict["state"].values():
            for name in state:
                if name not in self.STATES:
                    raise KeyError(name)
        super().load_state_dict(state_dict)


@contextmanager
def fused() -> Iterator[None]:
    """`fused_adam` in a worker of the pool."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    with fused_adam():
        yield


@contextmanager
def fused_adam() -> Iterator[None]:
    """Let Megatron-Core build the fused Adam, as it does with Transformer Engine."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with (
        patch.object(optimizer, "Adam", FusedAdam),
        patch.object(distrib_optimizer, "Adam", FusedAdam),
        patch.object(optimizer, "USING_PYTORCH_OPTIMIZER", False),
        patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
        patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
    ):
        yield


def train_fused(rank: int, world: int, config: Path, overrides: Sequence[str]) -> bool:
    """Train with the fused Adam."""
    with fused():
        return train_here(rank, world, config, overrides)


def trained(pool: Pool, config: Path, output: Path, *overrides: str) -> list[dict[str, Any]]:
    """Train on two ranks with the fused Adam."""
    given = [f"output={output}", *overrides]
    assert pool.run(2, train_fused, config, given, timeout=SECONDS) == [True, True]
    return step_records(output)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", ["false", "true"])
def test_a_fused_adam_is_saved_and_resumed(
    pool: Pool, dense: Path, tmp_path: Path, distributed: str
) -> None:
    changes = (f"optimizer.distributed={distributed}", "checkpoint.save=true")
    whole = trained(pool, dense, tmp_path / "whole", *changes, "train.steps=6")
    schedule = "schedule.decay_steps=6"  # that of the whole run
    trained(pool, dense, tmp_path / "parts", *changes, schedule, "train.steps=3")
    parts = trained(pool, dense, tmp_path / "parts", *changes, schedule, "train.steps=6")
    assert course(parts) == course(whole)


@pytest.mark.slow
@pytest.mark.parametrize("distributed", ["false", "true"])
def test_either_adam_resumes_a_checkpoint_of_the_other(
    pool: Pool, dense: Path, tmp_path: Path, distributed: str
) -> None:
    changes = (f"optimizer.distributed={distributed}", "checkpoint.save=true")
    changes = (*changes, "schedule.decay_steps=6", "train.steps=6")
    whole = run(pool, 2, dense, tmp_path / "torch", *changes)
    run(pool, 2, dense, tmp_path / "torch first", *changes, "train.steps=3")
    trained(pool, dense, tmp_path / "fused first", *changes, "train.steps=3")
    crossed = (
        trained(pool, dense, tmp_path / "torch first", *changes),
        run(pool, 2, dense, tmp_path / "fused first", *changes),
    )
    for records in crossed:
        assert len(records) == len(whole) == 6
        assert_same_course(records, whole)


def untouched_moments(rank: int, world: int, distributed: bool) -> set[str]:
    """The states in the checkpoint of an optimizer that has not taken a step."""
    with fused(), megatron_groups() as groups:
        from megatron_distill.config import OptimizerConfig, ScheduleConfig
        from megatron_distill.train.checkpoint.state import optimizer_shards
        from megatron_distill.train.optimizer import build_optimizer, wrap_data_parallel

        chunks = build(small_architecture(), groups, seed=1)
        settings = OptimizerConfig(distributed=distributed)
        wrapped = wrap_data_parallel(chunks, settings, groups=groups)
        optimizer = build_optimizer(wrapped, settings, ScheduleConfig(), dtype=torch.float32)
        return {shard.key.split(".")[2] for shard in optimizer_shards(optimizer, chunks, groups)}


@pytest.mark.parametrize("distributed", [False, True])
def test_a_fused_adam_that_took_no_step_can_be_saved(pool: Pool, distributed: bool) -> None:
    assert pool.run(2, untouched_moments, distributed) == [{"exp_avg", "exp_avg_sq"}] * 2


def _with_extra_state(norm: torch.nn.Module) -> None:
    """Give a module the extra state that those of Transformer Engine have."""

    class Extra(type(norm)):  # type: ignore[misc]
        def get_extra_state(self) -> Tensor:
            """As without FP8: no bytes."""
            return torch.empty(0, dtype=torch.uint8)

        def set_extra_state(self, state: Any) -> None:
            """Accept the state."""

    norm.__class__ = Extra


def saved_names(rank: int, world: int, has_extra: bool) -> list[str]:
    """The names in a checkpoint of a model, with an extra state in one of its modules."""
    with megatron_groups() as groups:
        from megatron_distill.train.checkpoint.state import model_shards

        chunks = build(small_architecture(), groups, seed=1)
        if has_extra:
            _with_extra_state(chunks[0].decoder.final_layernorm)
            assert any("_extra_state" in key for key in chunks[0].state_dict())
        return [shard.key for shard in model_shards(chunks, groups)]


def test_checkpoints_hold_no_extra_state(pool: Pool) -> None:
    (plain,), (extra,) = (pool.run(1, saved_names, has_extra) for has_extra in (False, True))
    assert extra == plain
    assert "decoder.final_layernorm.weight" in extra


def refusal(rank: int, world: int, on_cuda: bool) -> str:
    """The error of a run that asks for Transformer Engine where it is missing."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    try:
        mcore_patches.prepare_megatron_core(on_cuda=on_cuda, transformer_engine="on")
    except ConfigError as error:
        return str(error)
    return "none"


def test_transformer_engine_that_is_missing_is_an_error_with_a_remedy(pool: Pool) -> None:
    (on_cpu,) = pool.run(1, refusal, False)
    assert "runtime.transformer_engine is on, which needs CUDA" in on_cpu
    (on_cuda,) = pool.run(1, refusal, True)
    assert "runtime.transformer_engine is on, but it cannot be used: " in on_cuda
    assert "install megatron-distill[gpu]" in on_cuda


def unused(rank: int, world: int) -> tuple[list[str], bool]:
    """The warnings about a release without a module that Megatron-Core imports."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    from importlib.machinery import ModuleSpec

    other = ModuleType("transformer_engine")
    other.__spec__ = ModuleSpec("transformer_engine", None)
    reported: list[str] = []
    warn: Callable[..., None] = lambda text, *parts: reported.append(text % parts)  # noqa: E731
    with (
        patch.dict(sys.modules, {"transformer_engine": other}),
        patch.object(mcore_patches._LOGGER, "warning", warn),
    ):
        mcore_patches.prepare_megatron_core(on_cuda=True)
        return reported, mcore_patches.has_transformer_engine()


def test_a_release_that_does_not_fit_is_named_and_not_used(pool: Pool) -> None:
    ((text, is_used),) = pool.run(1, unused)
    assert not is_used
    assert len(text) == 1
    assert "the layers are torch's: Transformer Engine cannot be used: No module named" in text[0]


def hidden(rank: int, world: int, folder: Path, setting: str) -> str:
    """Results of an import of an installed release once Megatron-Core was prepared."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    with (
        patch.dict(sys.modules),
        patch.object(sys, "path", [str(folder), *sys.path]),
        patch.object(mcore_patches._LOGGER, "warning", lambda *_: None),
    ):
        del sys.modules["transformer_engine"]  # a run on a CPU hides it
        assert find_spec("transformer_engine") is not None
        mcore_patches.prepare_megatron_core(on_cuda=True, transformer_engine=setting)
        try:
            return str(import_module("transformer_engine").__file__)
        except ImportError:
            return "nothing"


def test_a_key_turns_an_installed_release_off(pool: Pool, tmp_path: Path) -> None:
    package = tmp_path / "transformer_engine" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    assert pool.run(1, hidden, tmp_path, "auto") == [str(package)]
    assert pool.run(1, hidden, tmp_path, "off") == ["nothing"]


def formats(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[str | None, str | None]:
    """The number formats of the student and of the teacher of an assembled run."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    from megatron_distill.models import gpt

    with (
        patch.object(gpt, "check_fp8", lambda *_, **__: None),  # there is no GPU
        assembled(rank, world, config, overrides) as (_, parts),
    ):
        (student,), teacher = parts.state.student.chunks, vars(parts.teacher)["model"]
        return student.config.fp8, teacher.config.fp8


@pytest.mark.parametrize("own", [(None, "e4m3"), ("hybrid", None), ("e4m3", "hybrid")])
def test_each_model_has_the_number_format_of_its_own_key(
    pool: Pool, dense: Path, tmp_path: Path, own: tuple[str | None, str | None]
) -> None:
    named = zip(("train.fp8", "teacher.fp8"), own, strict=True)
    overrides = [f"output={tmp_path}", "train.precision=bf16"]
    overrides += [f"{key}={value}" for key, value in named if value is not None]
    assert pool.run(1, formats, dense, overrides) == [own]


def _note_copies(model: Any) -> list[bool]:
    """Let a layer's product note each FP8 copy of its weight as Transformer Engine's makes it."""
    copies: list[bool] = []
    product = model.decoder.layers[0].mlp.linear_fc1
    product.is_first_microbatch = True

    def note(*_: Any) -> None:
        if product.is_first_microbatch:
            copies.append(True)
        product.is_first_microbatch = False

    product.register_forward_hook(note)
    return copies


def copies_of_steps(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[int, int, list[int]]:
    """Steps, micro-batches of a step, and the copies of the student and of the teacher."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    from megatron_distill.models import gpt

    with (
        patch.object(gpt, "check_fp8", lambda *_, **__: None),  # there is no GPU
        assembled(rank, world, config, overrides) as (settings, parts),
    ):
        (student,), teacher = parts.state.student.chunks, vars(parts.teacher)["model"]
        copies = [_note_copies(model) for model in (student, teacher)]
        assert train_parts(settings, parts) == ""
        train = settings.train
        batches = train.global_batch_size // train.micro_batch_size
        return train.steps, batches, [len(found) for found in copies]


@pytest.mark.parametrize("layout", [(), (PIPELINE, "teacher.parallel={pipeline: 1}")])
def test_a_frozen_model_makes_its_copies_once(
    pool: Pool, dense: Path, tmp_path: Path, layout: Sequence[str]
) -> None:
    """In the student's step, and in a layout of its own before it."""
    overrides = [f"output={tmp_path}", "train.precision=bf16", "train.fp8=e4m3", "teacher.fp8=e4m3"]
    overrides += ["train.steps=2", "schedule.warmup_steps=1", *layout]
    for found in pool.run(2 if layout else 1, copies_of_steps, dense, overrides, timeout=SECONDS):
        steps, batches, (of_student, of_teacher) = found
        assert batches > 1
        assert of_student == steps  # its weights have changed
        assert of_teacher == 1


def overlapped(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[list[Any], set[int]]:
    """Shapes of the user buffers of a run, and the hidden sizes of the layers that used them."""
    mcore_patches.prepare_megatron_core(on_cuda=False)
    with overlapping_layers() as found:
        assert train_here(rank, world, config, overrides)
        assert vars(found.base)["_ub_communicators"] is None
        return found.made, {hidden for hidden, _ in found.calls}


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_a_run_overlaps_the_messages_of_both_models(
    pool: Pool, dense: Path, tmp_path: Path, context: int
) -> None:
    overrides = [
        f"output={tmp_path}",
        "train.steps=2",
        "train.precision=bf16",
        f"parallel={{tensor: 2, sequence: true, context: {context}}}",
        "runtime.tp_comm_overlap=true",
    ]
    for made, used in pool.run(2 * context, overlapped, dense, overrides, timeout=SECONDS):
        positions, tensor = {shape[0] for shape in made}, {shape[2] for shape in made}
        assert positions == {2 * 32 // context}  # samples, length
        assert tensor == {2}
        assert {shape[1] for shape in made} == used
        assert len(used) == len(made) == 2
    assert all(math.isfinite(record["total_loss"]) for record in step_records(tmp_path))


def test_overlap_without_transformer_engine_is_refused(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    overrides = [
        f"output={tmp_path / 'run'}",
        "train.precision=bf16",
        "parallel={tensor: 2, sequence: true}",
        "runtime.tp_comm_overlap=true",
    ]
    for text in pool.run(2, failure_here, dense, overrides, timeout=SECONDS):
        assert text.startswith("ConfigError: runtime.tp_comm_overlap = true: needs Transformer")
        assert "set runtime.tp_comm_overlap=false" in text
