"""Rows of scored answers, and made-up tasks of the next line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megatron_distill.evaluation.next_line import TASK, write_task
from megatron_distill.evaluation.requests import Request, model_input
from megatron_distill.evaluation.score_batches import scored_rows, waves_of
from megatron_distill.evaluation.tasks.record import load_task


def _request(context: list[int], answer: list[int]) -> Request:
    return Request(np.array(context, np.int32), np.array(answer, np.int32))


def test_the_input_is_cut_on_the_left_and_never_the_answer() -> None:
    inputs, count = model_input(_request([1, 2, 3, 4], [5, 6]), 3)
    assert (inputs.tolist(), count) == ([3, 4, 5], 2)
    inputs, count = model_input(_request([1], [5, 6, 7, 8]), 3)
    assert (inputs.tolist(), count) == ([5, 6, 7], 3)


def test_choices_of_one_token_share_a_row_and_empty_answers_have_none() -> None:
    requests = [
        _request([1, 2], [7]),
        _request([1, 2], [8]),
        _request([1, 2], [8, 9]),
        _request([1, 2], []),
    ]
    long, short = scored_rows(requests, 10)
    assert long.tokens.tolist() == [1, 2, 8]
    assert (long.positions.tolist(), long.ids.tolist()) == ([1, 2], [8, 9])
    assert short.positions.tolist() == [1, 1]
    assert (short.ids.tolist(), short.requests.tolist()) == ([7, 8], [0, 1])


@pytest.mark.parametrize(("ranks", "micro_batches", "tokens"), [(1, 1, 1), (3, 2, 40), (5, 1, 999)])
def test_every_row_is_in_one_wave_and_all_ranks_have_the_same_shapes(
    ranks: int, micro_batches: int, tokens: int
) -> None:
    rng = np.random.default_rng(0)
    requests = [
        _request(rng.integers(0, 9, length).tolist(), [1]) for length in rng.integers(1, 30, 23)
    ]
    rows = scored_rows(requests, 64)
    assert [len(row.tokens) for row in rows] == sorted(
        (len(row.tokens) for row in rows), reverse=True
    )
    seen: list[int] = []
    for wave in waves_of(rows, ranks=ranks, micro_batches=micro_batches, tokens=tokens, multiple=4):
        assert wave.length % 4 == 0
        assert wave.sequences == 1 or wave.sequences * wave.length <= tokens
        shapes = set()
        for rank in range(ranks):
            batches = wave.of_rank(rank)
            assert len(batches) == micro_batches
            shapes |= {batch.tokens_bs.shape for batch in batches}
            for batch in batches:
                seen += batch.requests.tolist()
                # Each scored position is the last token of its row.
                flat = batch.tokens_bs.reshape(-1)
                for place, number in zip(batch.flat, batch.requests, strict=True):
                    assert flat[place] == requests[number].context[-1]
        assert len(shapes) == 1
    assert sorted(seen) == list(range(len(requests)))


def test_an_item_has_the_right_line_once_among_other_orders_of_its_words(tmp_path: Path) -> None:
    text = Path(json.__file__).read_text(encoding="utf-8")
    task = write_task(tmp_path, [text, "too short"])
    assert task is not None
    items = [json.loads(line) for line in (tmp_path / f"{TASK}.jsonl").read_text().splitlines()]
    assert 20 < len(items) <= 200
    for item in items:
        right = item["lines"][item["right"]]
        assert f"{item['before']}\n{right}" in text
        assert len(item["before"]) <= 120
        assert len({option.strip() for option in item["lines"]}) == 4
        words = {tuple(sorted(re.findall(r"\w+", option))) for option in item["lines"]}
        assert len(words) == 1
        assert len({re.sub(r"\w+", "", option) for option in item["lines"]}) == 1
        assert len({len(option) for option in item["lines"]}) == 1
    places = {item["right"] for item in items}
    assert places == {0, 1, 2, 3}
    assert load_task(str(task), {}).name == TASK


def test_the_same_documents_give_the_same_items(tmp_path: Path) -> None:
    text = Path(pytest.__file__).read_text(encoding="utf-8")
    files = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert write_task(tmp_path / name, [text]) is not None
        files.append((tmp_path / name / f"{TASK}.jsonl").read_bytes())
    assert files[0] == files[1]
    assert write_task(tmp_path, ["one line"]) is None
    assert write_task(tmp_path, ["a first line\n    return False\n"]) is None, "too few words"
