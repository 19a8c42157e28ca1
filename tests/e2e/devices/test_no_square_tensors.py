"""No tensor has two dimensions of a sequence's length: not in training, validation, capture, or in
a prompt's pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.distributed.megatron_world import build, megatron_groups, small_architecture
from tests.distributed.pool import Pool
from tests.e2e.captures import capture_here, write_capture
from tests.e2e.runs import CONTEXT, SECONDS, STUDENT, TEACHER, Inputs, quick_and_slow, train_here
from tests.reference.tracing import Watch

# Longer on one of two context ranks than every other size of these models.
LENGTH, LOCAL = 1024, 512
LONG = (f"data.sequence_length={LENGTH}", f"student.architecture.max_position_embeddings={LENGTH}",
        f"teacher.architecture.max_position_embeddings={LENGTH}")  # fmt: skip
RUN = ("train.steps=1", "schedule.warmup_steps=0", "train.global_batch_size=2",
       "train.micro_batch_size=2", "validation.interval=1", "validation.samples=2")  # fmt: skip
WINDOWS = ("student.architecture.sliding_window=40", "student.architecture.sliding_layers=[0, 2]")
WHOLE = "data.isolate_documents=false"
CAPS = "student.architecture.attention_softcap=2.0"

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "documents, windows, CP2": (2, (CONTEXT, *WINDOWS)),
    "one document, windows, CP2": (2, (CONTEXT, WHOLE, *WINDOWS)),
    "one document, recomputed": (1, (WHOLE, "train.recompute=full")),
    "soft caps, windows, CP2": (2, (CONTEXT, WHOLE, CAPS, *WINDOWS)),
}


class NoSquares(Watch):
    """Fails at an operation with a result of two dimensions of at least `limit`."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.long_tensors = 0

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                long = sum(size >= self.limit for size in value.shape)
                assert long < 2, f"{func} makes {tuple(value.shape)}"
                self.long_tensors += long


def test_a_square_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"makes \(2, 512, 600\)"), NoSquares(LOCAL):
        torch.ones(2, LOCAL, 1) * torch.ones(600)


def _trained(rank: int, world: int, path: Path, overrides: Sequence[str]) -> int:
    with NoSquares(LENGTH // world) as mode:
        assert train_here(rank, world, path, overrides)
    return mode.long_tensors


@pytest.mark.parametrize("case", quick_and_slow(CASES, ["documents, windows, CP2"]))
def test_training_and_validation_make_none(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    world, overrides = CASES[case]
    path = inputs.write("squares", STUDENT, TEACHER)
    overrides = (f"output={tmp_path / 'run'}", *LONG, *RUN, *overrides)
    assert min(pool.run(world, _trained, path, overrides, timeout=SECONDS)) > 1000


def _captured(rank: int, world: int, path: Path, overrides: Sequence[str]) -> int:
    with NoSquares(LENGTH // world) as mode:
        assert capture_here(rank, world, path, overrides) is True
    return mode.long_tensors


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [True, False])
def test_capture_makes_none(pool: Pool, inputs: Inputs, tmp_path: Path, isolate: bool) -> None:
    path = write_capture(inputs, "squares_capture", samples=4)
    overrides = [
        f"store.path={tmp_path / 'store'}",
        f"data.sequence_length={LENGTH}",
        f"teacher.architecture.max_position_embeddings={LENGTH}",
        f"data.isolate_documents={str(isolate).lower()}",
        CONTEXT,
    ]
    assert min(pool.run(2, _captured, path, overrides, timeout=SECONDS)) > 100


def _prompted(rank: int, world: int) -> int:
    with megatron_groups() as groups:
        from megatron_distill.models.generation import Sampling, Stops, WriteRow
        from megatron_distill.models.generation.model import CachedGPT

        shape = small_architecture(max_position_embeddings=LENGTH + 2)
        writer = CachedGPT(build(shape, groups, seed=1), shape, groups, torch.device("cpu"))
        with NoSquares(LENGTH) as mode:
            writer.write([WriteRow((0,) * LENGTH, 0, 2)], sampling=Sampling(), stops=Stops())
        return mode.long_tensors


def test_the_pass_of_a_prompt_makes_none(pool: Pool) -> None:
    assert pool.run(1, _prompted)[0] > 100
