"""A teacher's digest: equal for equal weights in any location, different for any other teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.generation.test_generation_collectives import Collectives
from tests.distributed.hugging_face_models import save_model
from tests.distributed.megatron_world import megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow
from tests.reference.tracing import HostWaits

if TYPE_CHECKING:
    from megatron_distill.train.model_source import ModelSource

FAMILIES = ("llama3.1", "qwen2", "gemma3", "gpt2", "mixtral")


def imported(rank: int, world: int, source: Path, output: Path) -> None:
    small_architecture()
    from megatron_distill.train.convert.convert import import_checkpoint

    import_checkpoint(source, output, dtype=None, overwrite=False)


def digest(rank: int, world: int, folder: Path, changes: dict[str, Any]) -> str:
    """The digest of the model in a folder of either kind."""
    small_architecture()
    from megatron_distill.train.model_source import teacher_digest

    assert dist.group.WORLD is not None
    return teacher_digest(source_of(folder, changes), seed=1, group=dist.group.WORLD)


def source_of(folder: Path, changes: dict[str, Any]) -> ModelSource:
    """The model in a folder of either kind."""
    from megatron_distill.models.hugging_face.description import describe
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.train.checkpoint.description import Description, saved_architecture
    from megatron_distill.train.checkpoint.reader import CheckpointWeights
    from megatron_distill.train.model_source import ModelSource

    if (folder / "config.json").is_file():
        described = describe(folder)
        architecture = replace(described.architecture, **changes)
        return ModelSource(architecture, lambda: HuggingFaceWeights(folder, described))
    saved = saved_architecture(Description.read(folder), folder)
    return ModelSource(replace(saved, **changes), lambda: CheckpointWeights(folder, saved))


def live(rank: int, world: int, folder: Path, layout: dict[str, Any], narrow: bool) -> str:
    """The digest of the model in a folder as the ranks of a layout hold it.

    The ranks exchange one number per tensor, and the host waits for none of them before.
    """
    with megatron_groups(**layout) as groups:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.parameters import placed
        from megatron_distill.train.model_source import live_digest

        source = source_of(folder, {})
        dtype = torch.bfloat16 if narrow else torch.float32
        execution = Execution(dtype, torch.device("cpu"))
        chunks = source.build(execution, groups=groups, seed=1)
        with Collectives() as moved, HostWaits() as waits:
            found = live_digest(chunks, source.architecture, groups=groups)
        tensors = len(list(placed(source.architecture)))
        assert moved.moved == [("allreduce_", 8 * tensors, False)]
        assert waits.count == 0, "the sums alone are read, at the end"
        return found


def one_digest(pool: Pool, folder: Path, world: int = 1, **changes: Any) -> str:
    (text,) = set(pool.run(world, digest, folder, changes))
    return str(text)


@pytest.mark.parametrize(
    "family",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[:-1]), FAMILIES[-1]],
)
def test_a_folder_and_its_import_are_one_teacher_on_any_number_of_ranks(
    pool: Pool, tmp_path: Path, family: str
) -> None:
    folder = save_model(tmp_path / "hf", family)
    pool.run(2, imported, folder, tmp_path / "checkpoint")
    found = one_digest(pool, folder)
    assert found.startswith("v2:")
    for world in (1, 2, 4):
        assert one_digest(pool, tmp_path / "checkpoint", world) == found
        assert one_digest(pool, folder, world) == found


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "TP2xPP2, one embedding": ("qwen2", 4, {"tensor": 2, "pipeline": 2}),
    "learned positions, DP2": ("gpt2", 2, {}),
    "TP2xEP2": ("mixtral", 4, {"tensor": 2, "sequence": True, "expert": 2}),
    "layers of other tensors, EP2xPP2": ("glm4_moe", 4, {"expert": 2, "pipeline": 2}),
    "more ranks than key heads, TP4": ("qwen3", 4, {"tensor": 4}),
    "CP2": ("gemma3", 2, {"context": 2}),
    "PP2, virtual stages": ("llama3.1", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    "dense and shared layers, TP2": ("glm4_moe", 2, {"tensor": 2, "sequence": True}),
}


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, list(LAYOUTS)[:3]))
def test_weights_that_ranks_hold_have_the_digest_of_their_file(
    pool: Pool, tmp_path: Path, case: str
) -> None:
    """Hashed and read in blocks of a few rows, as large tensors are."""
    family, world, layout = LAYOUTS[case]
    layers = {"num_hidden_layers": 4} if "virtual_pipeline" in layout else {}
    folder = save_model(tmp_path, family, **layers)
    (expected,) = set(pool.run(1, in_small_blocks, digest, folder, {}))
    assert set(pool.run(world, in_small_blocks, live, folder, layout, False)) == {expected}


def in_small_blocks(rank: int, world: int, function: Callable[..., str], *given: Any) -> str:
    small_architecture()
    from megatron_distill.models import weight_sums
    from megatron_distill.train import model_source

    with (
        patch.object(model_source, "_BLOCK_NUMBERS", 500),
        patch.object(weight_sums, "_AT_ONCE", 170),
    ):
        return function(rank, world, *given)


def test_weights_in_bf16_have_the_digest_of_their_values(pool: Pool, tmp_path: Path) -> None:
    wide, narrow = (save_model(tmp_path / name, "llama2") for name in ("wide", "narrow"))
    from safetensors.torch import load_file, save_file

    file = narrow / "model.safetensors"
    values = {name: one.bfloat16().float() for name, one in load_file(file).items()}
    save_file(values, file, metadata={"format": "pt"})
    found = pool.run(2, live, wide, {"tensor": 2}, True)
    assert set(found) == {one_digest(pool, narrow)}
    assert one_digest(pool, wide) not in found


def test_weights_of_another_dtype_are_the_same_values(pool: Pool, tmp_path: Path) -> None:
    narrow = save_model(tmp_path / "bf16", "llama2", dtype=torch.bfloat16)
    assert one_digest(pool, narrow) != one_digest(pool, save_model(tmp_path / "fp32", "llama2"))
    widen(narrow, tmp_path / "wide")
    assert one_digest(pool, tmp_path / "wide") == one_digest(pool, narrow)


def widen(narrow: Path, wide: Path, **changes: float) -> None:
    """The same values in fp32, but for the tensors named, whose first number is changed."""
    from safetensors.torch import load_file, save_file

    wide.mkdir()
    (wide / "config.json").write_text((narrow / "config.json").read_text())
    tensors = {
        name: tensor.float() for name, tensor in load_file(narrow / "model.safetensors").items()
    }
    for name, change in changes.items():
        tensors[name].view(-1)[-1] += change
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})


def test_one_number_that_differs_makes_another_teacher(pool: Pool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "llama2")
    changed = {"model.layers.2.mlp.down_proj.weight": 1e-6}
    widen(folder, tmp_path / "changed", **changed)
    widen(folder, tmp_path / "same")
    found = one_digest(pool, folder)
    assert one_digest(pool, tmp_path / "same") == found
    assert one_digest(pool, tmp_path / "changed") != found


def test_weights_count_and_their_padding_does_not(pool: Pool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "llama2")
    found = one_digest(pool, folder)
    for field, value in (
        ("rope_base", 5e5),
        ("norm_epsilon", 1e-3),
        ("logit_softcap", 30.0),
        ("sliding_window", 5),
    ):
        assert one_digest(pool, folder, **{field: value}) != found, field
    for field, value in (
        ("vocab_divisible_by", 64),
        ("init_std", 0.5),
        ("hidden_dropout", 0.1),
        ("max_position_embeddings", 4096),
        ("sliding_layers", (0, 1, 2)),
    ):
        assert one_digest(pool, folder, **{field: value}) == found, field


def random_digest(rank: int, world: int, seed: int, changes: dict[str, Any]) -> str:
    architecture = small_architecture(**changes)
    from megatron_distill.train.model_source import ModelSource, teacher_digest

    assert dist.group.WORLD is not None
    return teacher_digest(ModelSource(architecture), seed=seed, group=dist.group.WORLD)


def test_random_weights_are_their_seed_and_their_shape(pool: Pool) -> None:
    (found,) = pool.run(1, random_digest, 1, {})
    assert pool.run(2, random_digest, 1, {"vocab_divisible_by": 128}) == [found, found]
    others = [
        pool.run(1, random_digest, 2, {})[0],
        pool.run(1, random_digest, 1, {"init_std": 0.1})[0],
        pool.run(1, random_digest, 1, {"num_layers": 3})[0],
    ]
    assert len({found, *others}) == 4
