"""A step whose loss or gradient is not finite is not applied, on any rank."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool
from tests.e2e.failing import call, message
from tests.e2e.runs import (
    PIPELINE,
    SAVE,
    TENSOR,
    Inputs,
    assembled,
    checkpoints,
    quick_and_slow,
    step_records,
    train_parts,
)

if TYPE_CHECKING:
    from megatron_distill.train.loop import LoopInputs
    from megatron_distill.train.run_state import RunState


def _as_bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


def poisoned_step(
    rank: int, world: int, config: Path, overrides: list[str], poison: str
) -> tuple[str, bool, bool]:
    """Train with something that is not finite; the error, and what stayed as it was."""
    with assembled(rank, world, config, overrides) as (found, parts):
        state = parts.state
        if poison == "one token":
            _poison_embedding(state, token=_token_of_one_sample(parts))
        weights = [p for chunk in state.student.chunks for p in chunk.parameters()]
        before = _as_bits(weights)
        moments = _as_bits(_moments(state))
        text = train_parts(found, parts)
        return text, _as_bits(weights) == before, _as_bits(_moments(state)) == moments


def _token_of_one_sample(parts: LoopInputs) -> int:
    """A token that a single sample of the first step holds, so that one rank alone sees it."""
    beginning = parts.loader.state_dict()
    batches = parts.loader.take(1).micro_batches
    parts.loader.load_state_dict(beginning)
    own = {
        int(number): set(row.tolist())
        for batch in batches
        for number, row in zip(batch.sample_ids_b, batch.tokens_bs, strict=True)
    }
    everyones: list[dict[int, set[int]]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    rows = {number: row for rank in everyones for number, row in rank.items()}
    counts = Counter(token for row in rows.values() for token in row)
    return min(token for token, count in counts.items() if count == 1)


def _poison_embedding(state: RunState, *, token: int) -> None:
    from megatron_distill.models.gpt import vocab_shard

    shard = vocab_shard(state.architecture, state.student.groups)
    for chunk in state.student.chunks:
        if chunk.pre_process and shard.start <= token < shard.stop:
            weight = chunk.embedding.word_embeddings.weight
            weight.data[token - shard.start] = torch.nan


def _moments(state: RunState) -> list[torch.Tensor]:
    return [
        tensor
        for part in state.optimizer.chained_optimizers
        for values in part.optimizer.state.values()
        for tensor in values.values()
    ]


POISONED: dict[str, tuple[str, ...]] = {
    "DP2": (),
    "TP2": (TENSOR,),
    "PP2": (PIPELINE,),
    "whole optimizer": ("optimizer.distributed=false",),
    "bf16": ("train.precision=bf16",),
}
# Each layout and each poison once; what a gradient does in PP2 and bf16 differs from a loss.
POISONS = (
    "DP2, one token", "TP2, one token", "PP2, gradient", "whole optimizer, gradient",
    "bf16, gradient",
)  # fmt: skip
QUICK = ("DP2, one token", "PP2, gradient", "bf16, gradient")


@pytest.mark.parametrize("case", quick_and_slow(POISONS, QUICK))
def test_a_step_that_is_not_finite_is_not_applied(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, poison = case.split(", ")
    layout = POISONED[name]
    # A weight of 1e30 leaves the loss finite and the square of the gradient not.
    weight = ("objective.ce_weight=1e30",) if poison == "gradient" else ()
    overrides = [f"output={tmp_path}", SAVE, *weight, *layout]
    found = pool.run(2, poisoned_step, inputs.folder / "dense.yaml", overrides, poison)
    text, weights_stay, moments_stay = found[0]
    assert found[1] == found[0]
    assert text.startswith("step 1: the loss is ")
    assert ("nan" if poison == "one token" else "inf") in text
    assert "samples 0, 1, 2, 3, 4, 5, 6, 7 of the stream" in text
    assert "train.max_bad_steps=0" in text
    assert "optimizer.learning_rate" in text
    assert weights_stay
    assert moments_stay
    assert checkpoints(tmp_path) == []


@pytest.mark.slow
def test_a_learning_rate_that_explodes_stops_after_the_tolerated_steps(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    exploding = (
        TENSOR, SAVE, "checkpoint.interval=1", "optimizer.learning_rate=1e30",
        "optimizer.clip_grad_norm=0", "train.max_bad_steps=2", "schedule.warmup_steps=0",
        "schedule.decay=constant",
    )  # fmt: skip
    endings = call(pool, inputs.folder / "dense.yaml", tmp_path, *exploding)
    text = message(endings)
    assert text.startswith("step 4: ")
    assert "samples 24, 25, 26, 27, 28, 29, 30, 31 of the stream" in text
    assert "The run had 3 such steps, train.max_bad_steps=2" in text
    for step in (2, 3):
        assert f"step {step}: the loss is" in endings[0].stderr
    found = step_records(tmp_path)
    assert [record.get("skipped", False) for record in found] == [False, True, True]
    assert found[1]["grad_norm"] is None
    assert found[1]["not_finite"]["grad_norm"] in ("NaN", "Infinity")
    # The steps that were saved are those before the end; they can be resumed and fail again.
    assert checkpoints(tmp_path) == ["step_0000002", "step_0000003"]
    again = message(call(pool, inputs.folder / "dense.yaml", tmp_path, *exploding))
    assert again.startswith("step 4: ")
