"""Bytes of every collective of written, scored and compared text: none has the vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple
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

VOCABULARY = 2**16
HIDDEN = 4 * 32  # bytes of a hidden state
LENGTHS = (5, 9, 3)
ANSWERS = ((4,), (70, 60_000), (9, 8, 7))
NEW = 4
# Python objects, which are bytes: results by row, and short answers of every rank.
OBJECT = 2**12


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


def _moved(rank: int, world: int, layout: dict[str, int], sampling: dict[str, Any]) -> Any:
    with megatron_groups(**layout) as groups:
        shape = small_architecture(vocab_size=VOCABULARY)
        model = writer_of(shape, groups)
        rows = [tuple(range(9 * length, 10 * length)) for length in LENGTHS]  # that share nothing
        with Collectives() as writing:
            model.write(
                [WriteRow(ids, row, NEW) for row, ids in enumerate(rows)],
                sampling=Sampling(**sampling),
                stops=Stops(),
            )
        with Collectives() as scoring:
            model.score([ScoreRow(ids, ANSWERS) for ids in rows])
        return writing.moved, scoring.moved


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
        {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
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


def _moved_by_two_models(rank: int, world: int, layout: dict[str, int]) -> dict[str, list[Moved]]:
    """Draft with one model and verify with another, compare them on texts, and score by passes."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.evaluation.requests import Request
        from megatron_distill.models.gpt import vocab_shard
        from megatron_distill.train.evaluation.pass_scoring import PassScorer
        from megatron_distill.train.evaluation.speculative import RULES, speculate
        from megatron_distill.train.evaluation.teacher_text import Text, compare_texts

        device, models = torch.device("cpu"), []
        for layers in (4, 2):
            shape = small_architecture(vocab_size=VOCABULARY, num_layers=layers)
            models.append(writer_of(shape, groups))
        teacher, student = models
        rows = [tuple(range(9 * length, 10 * length)) for length in LENGTHS]
        with Collectives() as drafting:
            for rule in RULES:
                speculate(teacher, student, rows, draft=2, tokens=NEW, rule=rule)
        texts = [Text(ids, answer) for ids, answer in zip(rows, ANSWERS, strict=True)]
        with Collectives() as comparing:
            compare_texts(teacher, student, texts)
        shape, chunk = student.architecture, student.chunks[0].eval()
        scorer = PassScorer(chunk, shape, vocab_shard(shape, groups), groups, device, 32, 64)
        requests = [
            Request(np.array(text.prompt, np.int32), np.array(text.written, np.int32))
            for text in texts
        ]
        with Collectives() as passing:
            scorer.score(requests)
        return {
            "drafting": drafting.moved,
            "comparing": comparing.moved,
            "passing": passing.moved,
        }


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        ({"tensor": 2}, "allgather"),
        pytest.param({"pipeline": 2}, "broadcast", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_models_and_passes_exchange_no_row_of_the_vocabulary(
    pool: Pool, layout: dict[str, int], name: str
) -> None:
    for found in pool.run(2, _moved_by_two_models, layout):
        for moved in found.values():
            assert any(name in one.name for one in moved)
            assert max((one.bytes for one in moved if one.is_object), default=0) <= OBJECT
            assert max(one.bytes for one in moved) < VOCABULARY


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


@pytest.mark.parametrize("stages", [{"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}])
def test_messages_back_have_a_group_of_their_own(pool: Pool, stages: dict[str, int]) -> None:
    # In one group NCCL runs a large send to a stage before the ids that this stage sends back.
    for found in pool.run(2, _groups_by_direction, stages):
        assert len(found["on"]) == 1
        assert len(found["back"]) == 1
        assert not found["on"] & found["back"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"context": 2}], ids=str)
def test_data_and_context_ranks_exchange_results_alone(pool: Pool, layout: dict[str, int]) -> None:
    for writing, scoring in pool.run(2, _moved, layout, {}):
        assert not {one for one in writing + scoring if not one.is_object and one.bytes > 8}
        assert max(one.bytes for one in writing + scoring) <= OBJECT
