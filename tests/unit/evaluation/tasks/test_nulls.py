"""Nulls in the rows of a task: none is written as a text, in whatever way a template says it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.errors import DataError
from megatron_distill.evaluation.tasks.prompts import read_task
from megatron_distill.evaluation.tasks.record import load_task
from tests.unit.evaluation.tasks.test_prompts import lines, own_task

CHOICE = {"kind": "multiple_choice", "question": "{{ q }}", "choices": "c", "answer": "right"}
NULLS = [
    ({"kind": "perplexity", "text": "{{ q }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ q | trim }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ q | join(' ') }}"}, {"q": ["a", None]}, "of a column"),
    ({"kind": "perplexity", "text": "{{ q.a }}"}, {"q": {"a": None}}, "inside of a column"),
    ({"kind": "perplexity", "text": "{{ 'a' ~ q }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ 'a%s' % q }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ '%s%s' % (1, q) }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ '%(a)s' % q }}"}, {"q": {"a": None}}, "inside of a column"),
    ({"kind": "perplexity", "text": "{{ '%s' | format(q) }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ '{}'.format(q) }}"}, {"q": None}, "null columns: q"),
    ({"kind": "perplexity", "text": "{{ 'a' | replace('a', q) }}"}, {"q": None}, "columns: q"),
    ({**CHOICE, "answer": "'a' ~ q"}, {"q": None, "c": ["a", "b"], "right": 0}, "writes a null"),
    (
        {**CHOICE, "group": "g"},
        {"q": "1?", "c": ["a", "b"], "right": 0, "g": None},
        "'g' writes a null .null columns: g.; correct or remove the row",
    ),
    ({"kind": "perplexity", "text": "{{ 'a' + q }}"}, {"q": None}, "null columns: q.; correct or"),
    (
        {"kind": "perplexity", "text": "{{ p }}", "columns": {"p": "nope"}},
        {"q": "a"},
        "'p' is undefined; columns.p: 'nope' is none of this row's columns",
    ),
    (CHOICE, {"q": None, "c": ["a", "b"], "right": 0}, "writes a null .null columns: q.; correct"),
    (CHOICE, {"q": "1?", "c": ["a", None], "right": 0}, r"choices = 'c' gives a null .*reject"),
    (
        {**CHOICE, "choices": ["{{ q }}", "{{ c }}"]},
        {"q": "1?", "c": None, "right": 0},
        "'{{ c }}' writes a null .null columns: c.; correct or remove the row",
    ),
]


@pytest.mark.parametrize(("task", "row", "message"), NULLS, ids=lambda one: str(one)[:20])
def test_a_null_is_never_written_as_text(
    tmp_path: Path, task: dict[str, Any], row: dict[str, Any], message: str
) -> None:
    lines(tmp_path / "a.jsonl", [row])
    (tmp_path / "mine.yaml").write_text(
        json.dumps({**task, "files": ["a.jsonl"], "folder": str(tmp_path)})
    )
    with pytest.raises(DataError, match=rf"task mine: \S+a\.jsonl:1: .*{message}"):
        read_task(load_task(str(tmp_path / "mine.yaml")))


def test_operators_and_filters_that_take_no_null_write_as_before(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"q": "1?", "n": 7, "m": {"x": "y", "z": None}, "c": ["a", "b"],
                                  "right": 0}])  # fmt: skip
    question = "{{ q ~ n ~ (n % 4) ~ '%02d' % n ~ '%s%s' % (q, n) ~ '%(x)s' % m ~ '{}'.format(n) }}"
    question += "{{ 'abab' | replace('a', 'c', none) ~ 'abab' | replace('a', 'c', count=1) }}"
    (found,) = read_task(own_task(tmp_path, question=question, choices="c"))
    assert found.prompt.text == "1?73071?7y7cbcbcbab"


def test_a_null_that_a_template_tests_or_replaces_is_no_error(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"q": "1?", "hint": None, "c": ["no", "yes", None], "right": 0}])
    question = "{% if hint %}{{ hint }} {% endif %}{{ q }}{{ hint or '' }}"
    choices = "c | reject('none') | list"
    (found,) = read_task(own_task(tmp_path, question=question, choices=choices))
    assert (found.prompt.text, found.choices) == ("1?", ("no", "yes"))
