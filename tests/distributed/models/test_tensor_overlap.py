"""The user buffers of tensor-parallel messages: their shapes, whose are in place, and refusals.

Transformer Engine needs CUDA. In place of its layers stand Megatron-Core's, which look for their
buffers where Transformer Engine 2.9 does: by the name of the product, in a variable of its module,
forward with gradients or for a reduce-scatter, backward always. A buffer of another size is an
error there too.

Regimes: two hidden sizes; a teacher's pass between a student's two; a micro-batch of another size;
recomputed layers; a third shape, a second tensor-parallel size, GPUs that cannot.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.models.user_buffers import BufferShape, TensorOverlap, UserBuffers
from tests.distributed.megatron_world import megatron_groups, rows_of, small_architecture
from tests.distributed.models.test_parameters import (
    transformer_engine_layers,
    transformer_engine_provider,
)
from tests.distributed.pool import Pool

PRODUCTS = ("qkv", "proj", "fc1", "fc2")


@dataclass
class Engine:
    """The part of Transformer Engine that has the buffers; `calls` of them by hidden size."""

    base: ModuleType
    made: list[tuple[Any, ...]] = field(default_factory=list)
    calls: Counter[tuple[int, str]] = field(default_factory=Counter)

    def look(self, name: str, sent: Tensor, *, ranks: int) -> None:
        """Look for the buffer of a product, which must have room for what all ranks send."""
        hidden = sent.shape[-1]
        (positions, width) = self.base._ub_communicators[name, "NONE"]
        assert (math.prod(sent.shape[:-1]) * ranks, hidden) == (positions, width), (
            name,
            sent.shape,
        )
        self.calls[hidden, name] += 1


@contextmanager
def engine(*, multicast: bool = True) -> Iterator[Engine]:
    """Let Transformer Engine's module with the buffers be one that only notes shapes."""
    base = ModuleType("transformer_engine.pytorch.module.base")
    found = Engine(base)
    modes = Enum("UserBufferQuantizationMode", {"NONE": "none", "FP8": "fp8"})

    def initialize_ub(
        *,
        shape: Sequence[int],
        tp_size: int,
        quantization_modes: list[Enum],
        dtype: torch.dtype,
        bootstrap_backend: str,
    ) -> None:
        assert vars(base)["_ub_communicators"] is None, "UB communicators are already initialized."
        assert (dtype, bootstrap_backend) == (torch.bfloat16, "nccl")
        (mode,) = quantization_modes
        found.made.append((*shape, tp_size, mode.name))
        base._ub_communicators = {  # type: ignore[attr-defined]
            (f"{product}_{part}", mode.name): tuple(shape)
            for product in PRODUCTS
            for part in ("fprop", "dgrad", "wgrad")
        }

    def destroy_ub() -> None:
        base._ub_communicators = None  # type: ignore[attr-defined]

    destroy_ub()
    for name, value in (
        ("UserBufferQuantizationMode", modes),
        ("initialize_ub", initialize_ub),
        ("destroy_ub", destroy_ub),
    ):
        setattr(base, name, value)
    library = ModuleType("transformer_engine_torch")
    library.device_supports_multicast = lambda: multicast  # type: ignore[attr-defined]
    modules = {base.__name__: base, library.__name__: library}
    with patch.dict(sys.modules, modules):
        yield found


def overlapped_provider(found: Engine) -> type:
    """Return a provider of linear layers of Megatron-Core with Transformer Engine's switches."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    class Overlapped:
        """A linear layer that looks for its buffers."""

        def __init__(
            self, *sizes: int, config: Any, tp_comm_buffer_name: str, **named: Any
        ) -> None:
            super().__init__(*sizes, config=config, **named)  # type: ignore[call-arg]
            self.name, self.ranks = tp_comm_buffer_name, config.tensor_model_parallel_size
            is_on = config.tp_comm_overlap and config.sequence_parallel
            self.is_column = isinstance(self, ColumnParallelLinear)
            self.ub_overlap_ag_fprop = self.ub_bulk_dgrad = is_on and self.is_column
            self.ub_overlap_rs_fprop = self.ub_overlap_ag_dgrad = is_on and not self.is_column

        def forward(self, rows: Tensor, *others: Any, **named: Any) -> Any:
            """Multiply; a column layer gathers its input, a row layer scatters its output."""
            if self.is_column:
                gain = self.layer_norm_weight  # type: ignore[attr-defined]
                rows = F.rms_norm(rows, gain.shape, gain, 1e-5)
            output, bias = super().forward(rows, *others, **named)  # type: ignore[misc]
            sent = rows if self.is_column else output
            gathers = self.ub_overlap_ag_fprop and torch.is_grad_enabled()
            if gathers or self.ub_overlap_rs_fprop:
                found.look(f"{self.name}_fprop", sent, ranks=self.ranks)
            if output.requires_grad and (self.ub_bulk_dgrad or self.ub_overlap_ag_dgrad):
                name = f"{self.name}_dgrad"
                output.register_hook(lambda _: found.look(name, sent, ranks=self.ranks))
            return output, bias

    class Column(Overlapped, ColumnParallelLinear):
        def __init__(self, input_size: int, *others: Any, **named: Any) -> None:
            super().__init__(input_size, *others, **named)
            gain = torch.ones(input_size)
            self.layer_norm_weight = torch.nn.Parameter(gain)
            self.layer_norm_weight.sequence_parallel = True  # type: ignore[attr-defined]

    class Row(Overlapped, RowParallelLinear):
        pass

    methods: dict[str, Any] = {
        "column_parallel_layer_norm_linear": lambda _: Column,
        "row_parallel_linear": lambda _: Row,
    }
    return type("Provider", (transformer_engine_provider(),), methods)


@contextmanager
def overlapping_layers() -> Iterator[Engine]:
    """Let models be built with layers that look for user buffers."""
    with engine() as found, transformer_engine_layers():
        from megatron.core.models.gpt import gpt_layer_specs

        from megatron_distill.models import gpt, layers

        with (
            patch.object(gpt, "transformer_engine_runs", lambda device: True),
            patch.object(gpt_layer_specs, "TESpecProvider", overlapped_provider(found)),
            patch.object(layers, "engine_attends", lambda *_: False),
        ):
            yield found


def stepped(rank: int, world: int, recompute: str) -> tuple[list[Any], dict[Any, int], bool]:
    """Shapes of the buffers, uses of them in two steps and an evaluation, and whether all go."""
    from tests.distributed.models.test_models import LENGTH, packed_batch

    with megatron_groups(tensor=2, sequence=True) as groups, overlapping_layers() as found:
        from megatron_distill.models.execution import Execution, Recompute
        from megatron_distill.models.gpt import build_gpt, run_model

        buffers = UserBuffers()
        execution = Execution(
            torch.float32,
            torch.device("cpu"),
            Recompute.of(recompute),
            tensor_overlap=TensorOverlap(buffers, 2, LENGTH),
        )
        (student,), (teacher,) = (
            build_gpt(small_architecture(**shape), groups=groups, execution=execution, seed=3)
            for shape in ({"hidden_size": 16, "num_layers": 2}, {})
        )
        student.train()
        teacher.requires_grad_(False)
        batch = packed_batch(isolate=True)
        for _ in range(2):
            with torch.no_grad():
                run_model(teacher, batch, context_size=1)
            hidden = run_model(student, batch, context_size=1)
            with torch.no_grad():
                run_model(teacher, batch, context_size=1)
            hidden.sum().backward()
        steps = dict(found.calls)
        with torch.no_grad():
            run_model(student, rows_of(batch, [1]), context_size=1)  # no buffer has its size
            assert dict(found.calls) == steps
            run_model(student, batch, context_size=1)
        made = found.made
        buffers.close()
        return made, dict(found.calls), vars(found.base)["_ub_communicators"] is None


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_model_s_buffers_are_in_place_in_both_passes(pool: Pool, recompute: str) -> None:
    for made, calls, is_gone in pool.run(2, stepped, recompute):
        assert made == [(64, 16, 2, "NONE"), (64, 32, 2, "NONE")]
        again = 2 if recompute == "full" else 1
        # Two layers in two steps; the reduce-scatters also in the evaluation, and where a
        # recomputed layer runs without gradients.
        student = {(16, f"{name}_{part}"): 4 for name in PRODUCTS for part in ("fprop", "dgrad")}
        student[16, "proj_fprop"] = student[16, "fc2_fprop"] = 4 * again + 2
        # Four layers in four passes, which have no gradients.
        teacher = {(32, "proj_fprop"): 16, (32, "fc2_fprop"): 16}
        assert calls == student | teacher
        assert is_gone


def test_one_shape_has_one_set() -> None:
    with engine() as found:
        buffers = UserBuffers()
        shape = BufferShape(64, 16, 2, is_fp8=False)
        assert buffers.of(shape) is buffers.of(shape._replace())
        assert buffers.of(shape._replace(is_fp8=True)) is not buffers.of(shape)
        assert found.made == [(64, 16, 2, "NONE"), (64, 16, 2, "FP8")]


REFUSED: dict[str, tuple[list[BufferShape], str]] = {
    "a third shape": (
        [BufferShape(64, width, 2, is_fp8=False) for width in (16, 32, 48)],
        "room for 2 shapes of buffers, and the models' positions x hidden sizes are "
        "64 x 16, 64 x 32, 64 x 48. Set runtime.tp_comm_overlap=false",
    ),
    "a second size": (
        [BufferShape(64, 16, ranks, is_fp8=False) for ranks in (2, 4)],
        "for one tensor-parallel size in a process, and the models have 2 and 4",
    ),
    "no multicast": ([BufferShape(64, 16, 2, is_fp8=False)], "have no multicast; set UB_SKIPMC=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_buffers_that_transformer_engine_cannot_make_are_refused(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UB_SKIPMC", raising=False)
    shapes, text = REFUSED[case]
    with engine(multicast=case != "no multicast") as found:
        buffers = UserBuffers()
        for shape in shapes[:-1]:
            buffers.of(shape)
        with pytest.raises(ConfigError) as error:
            buffers.of(shapes[-1])
        assert text in str(error.value)
        assert len(found.made) == len(shapes) - 1
        monkeypatch.setenv("UB_SKIPMC", "1")
        if case == "no multicast":
            buffers.of(shapes[-1])
