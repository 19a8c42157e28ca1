"""The task made of held-out code."""

import json
import re
from pathlib import Path

import pytest

from megatron_distill.evaluation.next_line import TASK, write_task
from megatron_distill.evaluation.tasks.record import load_task


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
