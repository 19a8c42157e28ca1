"""A store among several teachers whose records are found by text: its samples, and who packs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.store import DocumentIndex
from megatron_distill.train.assemble import several
from megatron_distill.train.assemble.routing import members
from tests.support.sample_configs import ARCHITECTURE, MINIMAL, load_tree

TREE = MINIMAL | {
    "teachers": {"near": {"architecture": ARCHITECTURE}, "far": {"store": "x"}},
    "objective": {"terms": [{"teacher": "near"}, {"alignment": "likelihood", "teacher": "far"}]},
}


@pytest.mark.parametrize(("is_by_document", "ranks"), [(True, 1), (True, None), (False, 1)])
def test_ranks_that_lack_the_store_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_by_document: bool, ranks: int | None
) -> None:
    config = load_tree(tmp_path, TREE, *([] if ranks is None else [f"teachers.near.ranks={ranks}"]))
    opened = SimpleNamespace(is_by_document=is_by_document, close=lambda: None)
    monkeypatch.setattr(several, "open_stored", lambda *_, **__: opened)
    execution, vocabulary = SimpleNamespace(device=None), SimpleNamespace(identity="s")
    fit: Any = SimpleNamespace(terms=(), student=None, vocabulary=vocabulary)
    site: Any = SimpleNamespace(groups=None, execution=execution, resources=ExitStack())
    tokens: Any = SimpleNamespace(vocabulary=vocabulary)
    known = members(config)
    # Records of the student's tokens change no sample, so that ranks may lack such a store.
    assert several._stored(config, known["teachers.near"], fit, site, None) is opened
    far = known["teachers.far"]
    if not is_by_document or ranks is None:
        assert several._stored(config, far, fit, site, tokens) is opened
        return
    message = "teachers.far.store: its records are found by text, and the ranks of teachers.near"
    with pytest.raises(ConfigError, match=message):
        several._stored(config, far, fit, site, tokens)


@pytest.mark.parametrize(("weights", "is_drawn"), [("{near: 1}", False), ("{far: 1}", True)])
def test_samples_of_a_source_without_a_teacher_are_those_of_the_teachers_that_are_drawn(
    tmp_path: Path, weights: str, is_drawn: bool
) -> None:
    config = load_tree(
        tmp_path, TREE, "objective.terms=[{}, {alignment: likelihood}]",
        f"objective.routing_weights={weights}", "teachers.far.sequence_length=64",
        "data.sources=[{format: python_stdlib}, {format: text, paths: [a], teacher: far}, "
        "{format: text, paths: [b], teacher: near}]",
    )  # fmt: skip
    join = members(config)["teachers.far"].joined(cast(DocumentIndex, None))
    assert (join.name, join.takes_all, join.is_drawn) == ("far", False, is_drawn)
    assert not join.is_of_student
