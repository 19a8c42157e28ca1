"""Bytes of every collective of written, scored and compared text: none has the vocabulary."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_distill.models.generation import Sampling, ScoreRow, Stops, WriteRow
from tests.distributed.megatron_world import megatron_groups, small_architecture, writer_of
from tests.distributed.pool import Pool
from tests.reference.tracing import Watch

if TYPE_CHECKING:
    from megatron_distill.models.generation.model import CachedGPT

VOCABULARY = 2**16
HIDDEN = 4 * 32  # bytes of a hidden state
LENGTHS = (5, 9, 3)
ANSWERS = ((4,), (70, 60_000), (9, 8, 7))
NEW = 4
# Python objects, which are bytes: results by row, and short answers of every rank.
OBJECT = 2**12
CUT = {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}


class Moved(NamedTuple):
    name: str
    bytes: int
    is_object: bool


class Collectives(Watch):
    """Records each collective, with the bytes that a rank contributes."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: list[Moved] = []

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            given = args[1] if "allgather" in name else args[0]
            for value in tree_leaves(given):
                if isinstance(value, Tensor):
                    is_object = value.dtype is torch.uint8
                    self.moved.append(Moved(name, value.nbytes, is_object))


def _prompts() -> list[tuple[int, ...]]:
    return [tuple(range(9 * length, 10 * length)) for length in LENGTHS]  # that share nothing


def _by_one_model(model: CachedGPT, sampling: dict[str, Any]) -> tuple[list[Moved], list[Moved]]:
    """Write text and score answers; returns what each moved."""
    with Collectives() as writing:
        model.write(
            [WriteRow(ids, row, NEW) for row, ids in enumerate(_prompts())],
            sampling=Sampling(**sampling),
            stops=Stops(),
        )
    with Collectives() as scoring:
        model.score([ScoreRow(ids, ANSWERS) for ids in _prompts()])
    return writing.moved, scoring.moved


def _moved(rank: int, world: int, layout: dict[str, int], sampling: dict[str, Any]) -> Any:
    with megatron_groups(**layout) as groups:
        model = writer_of(small_architecture(vocab_size=VOCABULARY), groups)
        return _by_one_model(model, sampling)


def _sizes(moved: list[Moved], name: str) -> set[int]:
    for one in moved:
        if one.is_object:
            assert one.bytes <= OBJECT
    return {one.bytes for one in moved if not one.is_object and name in one.name} - {8}


GIVEN = sum(LENGTHS)
ROWS = len(LENGTHS)
PAIRS = sum(map(len, ANSWERS)) * ROWS
CONTINUED = sum(len(answer) - 1 for answer in ANSWERS) * ROWS


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({}, marks=pytest.mark.slow),
        CUT,
    ],
    ids=str,
)
def test_tensor_ranks_exchange_hidden_states_and_numbers_of_rows(
    pool: Pool, sampling: dict[str, Any]
) -> None:
    for writing, scoring in pool.run(2, _moved, {"tensor": 2}, sampling):
        sums = {HIDDEN * GIVEN, HIDDEN * ROWS}
        gathers = {32 * ROWS}
        if sampling:  # sums by digit, of masses; peaks, and weights at the limit
            sums |= {2**14 * ROWS, 8 * ROWS}
            gathers |= {4 * ROWS, 8 * ROWS}
        assert _sizes(writing, "allreduce") == sums
        assert _sizes(writing, "allgather") == gathers
        passes = {HIDDEN * GIVEN, HIDDEN * CONTINUED}
        first = len(ANSWERS) * ROWS  # tokens after a context
        assert _sizes(scoring, "allreduce") == passes | {8 * first, 8 * (PAIRS - first)}
        assert _sizes(scoring, "allgather") == {12 * ROWS, 12 * CONTINUED}
        assert not _sizes(writing + scoring, "broadcast")
        assert max(one.bytes for one in scoring) < VOCABULARY


def test_stages_send_hidden_states_on_and_numbers_of_rows_back(pool: Pool) -> None:
    for writing, scoring in pool.run(2, _moved, {"pipeline": 2}, {}):
        # Rows in flight, the longest first: two of them together, and one.
        groups = (LENGTHS[1] + LENGTHS[2], LENGTHS[0], 2, 1)
        for name in ("send", "recv"):
            assert _sizes(writing, name) <= {HIDDEN * positions for positions in groups}
        assert _sizes(writing, "broadcast") <= {16 * 2, 16}
        assert _sizes(scoring, "broadcast") == {16 * PAIRS}
        assert not _sizes(writing + scoring, "allreduce")
        assert max(one.bytes for one in writing + scoring) < VOCABULARY


def _moved_by_all(rank: int, world: int, layout: dict[str, Any]) -> dict[str, list[Moved]]:
    """Write, score, draft with one model and verify with another, and score by passes."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.evaluation.requests import Request
        from megatron_distill.models.gpt import vocab_shard
        from megatron_distill.train.evaluation.pass_scoring import PassScorer
        from megatron_distill.train.evaluation.speculative import RULES, speculate
        from megatron_distill.train.evaluation.teacher_text import Text, compare_texts

        device, moe = torch.device("cpu"), MOE if groups.layout.expert > 1 else None
        teacher, student = (
            writer_of(small_architecture(vocab_size=VOCABULARY, num_layers=layers, moe=moe), groups)
            for layers in (8, 4)
        )
        found = dict(zip(("writing", "scoring"), _by_one_model(student, CUT), strict=True))
        with Collectives() as drafting:
            for rule in RULES:
                speculate(teacher, student, _prompts(), draft=2, tokens=NEW, rule=rule)
        texts = [Text(ids, answer) for ids, answer in zip(_prompts(), ANSWERS, strict=True)]
        with Collectives() as comparing:
            compare_texts(teacher, student, texts)
        found |= {"drafting": drafting.moved, "comparing": comparing.moved}
        if len(student.chunks) == 1:
            shape, chunk = student.architecture, student.chunks[0].eval()
            scorer = PassScorer(chunk, shape, vocab_shard(shape, groups), groups, device, 32, 64)
            requests = [
                Request(np.array(text.prompt, np.int32), np.array(text.written, np.int32))
                for text in texts
            ]
            with Collectives() as passing:
                scorer.score(requests)
            found["passing"] = passing.moved
        return found


STAGES = {"pipeline": 2, "virtual_pipeline": 2}


# Ranks, layout, and a collective that everything needs there.
@pytest.mark.parametrize(
    ("world", "layout", "name"),
    [
        (2, {"tensor": 2}, "allgather"),
        pytest.param(2, {"pipeline": 2}, "broadcast", marks=pytest.mark.slow),
        pytest.param(2, STAGES, "broadcast", marks=pytest.mark.slow),
        pytest.param(2, {"expert": 2}, "allreduce", marks=pytest.mark.slow),
        pytest.param(2, {"tensor": 2, "sequence": True}, "allgather", marks=pytest.mark.slow),
        pytest.param(4, {"tensor": 2, "pipeline": 2}, "allreduce", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_row_of_the_vocabulary_is_exchanged(
    pool: Pool, world: int, layout: dict[str, Any], name: str
) -> None:
    for found in pool.run(world, _moved_by_all, layout):
        for part, moved in found.items():
            assert any(name in one.name for one in moved), (part, {one.name for one in moved})
            assert max((one.bytes for one in moved if one.is_object), default=0) <= OBJECT
            assert max(one.bytes for one in moved) < VOCABULARY, part


def _groups_by_direction(rank: int, world: int, layout: dict[str, int]) -> dict[str, set[str]]:
    """Write a few rows; return the groups of messages to a later stage, and of those back."""
    with megatron_groups(**layout) as groups:
        shape = small_architecture()
        model = writer_of(shape, groups)
        found: dict[str, set[str]] = {"on": set(), "back": set()}

        def noted(name: str, original: Any) -> Any:
            def call(tensor: Tensor, *, group: dist.ProcessGroup, **given: Any) -> Any:
                target = given.get("group_dst", given.get("group_src", 0))
                is_on = {"isend": target > group.rank(), "recv": target < group.rank()}
                found["on" if is_on.get(name) else "back"].add(group.group_name)
                return original(tensor, group=group, **given)

            return patch.object(dist, name, call)

        with (
            noted("isend", dist.isend),
            noted("recv", dist.recv),
            noted("broadcast", dist.broadcast),
        ):
            rows = [WriteRow(tuple(range(length)), length, NEW) for length in LENGTHS]
            model.write(rows, sampling=Sampling(), stops=Stops())
        return found


@pytest.mark.parametrize("stages", [{"pipeline": 2}, STAGES])
def test_messages_back_have_a_group_of_their_own(pool: Pool, stages: dict[str, int]) -> None:
    # In one group NCCL runs a large send to a stage before the ids that this stage sends back.
    for found in pool.run(2, _groups_by_direction, stages):
        assert len(found["on"]) == 1
        assert len(found["back"]) == 1
        assert not found["on"] & found["back"]


def _on_their_way(rank: int, world: int) -> int:
    """Score many batches where the last stage is slow; returns the most sends on their way."""
    from megatron_distill.models.generation.stage import Stage

    most, hold = 0, Stage._hold

    def counted(stage: Stage, *sent: Any) -> None:
        nonlocal most
        hold(stage, *sent)
        most = max(most, len(stage._sends))

    run = Stage.run

    def slow(stage: Stage, *given: Any) -> Tensor | None:
        time.sleep(0.05 * rank)
        return run(stage, *given)

    with (
        megatron_groups(pipeline=2) as groups,
        patch.object(Stage, "_hold", counted),
        patch.object(Stage, "run", slow),
    ):
        model = writer_of(small_architecture(), groups)
        rows = [ScoreRow((row, row + 1), ((row,),)) for row in range(12)]
        model.score(rows, batch_positions=2)
    return most


def test_a_stage_waits_for_a_slow_one_before_its_sends_fill_the_memory(pool: Pool) -> None:
    assert pool.run(2, _on_their_way)[0] == 4


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"context": 2}], ids=str)
def test_data_and_context_ranks_exchange_results_alone(pool: Pool, layout: dict[str, int]) -> None:
    for writing, scoring in pool.run(2, _moved, layout, {}):
        assert not {one for one in writing + scoring if not one.is_object and one.bytes > 8}
        assert max(one.bytes for one in writing + scoring) <= OBJECT
