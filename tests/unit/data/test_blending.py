"""Several sources: shares of a blend, and the teacher of each sample."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_distill.data.blending import BlendedSource, blend_finite
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.routing import Routing, routed_parts
from megatron_distill.data.samples import FULLY_TRAINED, Sample, State
from megatron_distill.data.sources import DataOptions, open_training, samples_per_epoch
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer


def sample_of(source: int, number: int) -> Sample:
    tokens = np.array([source, number, 0], np.int32)
    return Sample(tokens, np.zeros(3, np.int32), np.full(3, FULLY_TRAINED, np.uint8), number)


class Counter:
    """A source whose samples hold its name and the number of its reads."""

    def __init__(self, source: int) -> None:
        self.source = source
        self.count = 0

    def next_sample(self) -> Sample:
        self.count += 1
        return sample_of(self.source, self.count - 1)

    def state_dict(self) -> State:
        return {"count": self.count}

    def load_state_dict(self, state: State) -> None:
        self.count = state["count"]


def blend(weights: list[float]) -> BlendedSource:
    return BlendedSource([Counter(i) for i in range(len(weights))], weights=weights)


def drawn(source: BlendedSource, count: int) -> list[tuple[int, int, int]]:
    samples = [source.next_sample() for _ in range(count)]
    # The second token is the number in the source, by which a store of one source is joined.
    assert all(sample.number_in_source == sample.tokens_S1[1] for sample in samples)
    return [(*sample.tokens_S1[:2].tolist(), sample.sample_id) for sample in samples]


weights_of = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


@settings(deadline=None)
@given(weights=weights_of)
def test_every_source_has_its_share_at_every_moment(weights: list[float]) -> None:
    order = [source for source, _, _ in drawn(blend(weights), 150)]
    shares = np.array(weights) / sum(weights)
    for count in range(1, 151):
        taken = np.bincount(order[:count], minlength=len(weights))
        assert (np.abs(taken - shares * count) < 1).all()


def test_shares_hold_where_the_source_that_lags_most_would_not_keep_them() -> None:
    weights = np.array([1.0, 1.0, 1.0, 1.0, 5.0, 5.0, 41.0, 41.0])
    exact = np.arange(1, 251)[:, None] * weights / weights.sum()
    taken, worst = np.zeros(8), 0.0
    for shares in exact:
        taken[(shares - taken).argmax()] += 1
        worst = max(worst, float(np.abs(shares - taken).max()))
    assert worst > 1.1
    order = [source for source, _, _ in drawn(blend(weights.tolist()), 250)]
    counts = np.cumsum(np.eye(8)[order], axis=0)
    assert np.abs(counts - exact).max() <= 1 - 1 / 14 + 1e-9


@settings(deadline=None)
@given(weights=weights_of, position=st.integers(0, 60))
def test_resuming_continues_every_source_where_it_was(weights: list[float], position: int) -> None:
    source = blend(weights)
    before = drawn(source, position)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = blend(weights)
    drawn(resumed, 7)
    resumed.load_state_dict(state)
    after = drawn(source, 40)
    assert drawn(resumed, 40) == after
    assert [number for _, _, number in before + after] == list(range(position + 40))


def test_other_weights_on_resume_tell_how_long_a_source_is_not_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_distill"), "propagate", True)
    source = blend([2.0, 1.0, 1.0])
    drawn(source, 400)
    state = source.state_dict()
    blend([2.0, 1.0, 1.0]).load_state_dict(state)
    assert caplog.messages == []
    changed = blend([1.0, 1.0, 2.0])
    changed.load_state_dict(state)
    (text,) = set(caplog.messages)  # a test before may have left a handler that passes them on
    assert text.startswith("data.sources.0: none of the next 400 samples are of this source. It ")
    assert "It gave 200 of the first 400" in text
    assert "is now a share of 0.25" in text
    order = [which for which, _, _ in drawn(changed, 420)]
    assert 398 <= order.index(0) <= 402


def test_another_number_of_sources_is_refused() -> None:
    state = blend([1.0, 1.0]).state_dict()
    with pytest.raises(DataError, match=r"3 sources, but 2 in the checkpoint"):
        blend([1.0, 1.0, 1.0]).load_state_dict(state)


def limited(source: int, count: int) -> Callable[[], Sample | None]:
    numbers = iter(range(count))

    def take() -> Sample | None:
        number = next(numbers, None)
        return None if number is None else sample_of(source, number)

    return take


def test_sources_that_end_leave_the_rest_to_the_others() -> None:
    samples = blend_finite([limited(0, 3), limited(1, 50)], weights=[1.0, 1.0], count=20)
    owners = [int(sample.tokens_S1[0]) for sample in samples]
    assert owners.count(0) == 3
    assert owners.count(1) == 17
    assert [sample.sample_id for sample in samples] == list(range(20))
    assert len(blend_finite([limited(0, 3), limited(1, 4)], weights=[1.0, 9.0], count=20)) == 7


def test_samples_name_their_owner_whatever_part_of_it_they_come_from() -> None:
    parts, owners = [Counter(i) for i in range(3)], [0, 0, 1]
    source = BlendedSource(parts, weights=[1.0, 1.0, 2.0], owners=owners)
    samples = [source.next_sample() for _ in range(40)]
    assert [sample.source for sample in samples] == [
        owners[int(sample.tokens_S1[0])] for sample in samples
    ]
    finite = blend_finite(
        [limited(0, 3), limited(1, 9), limited(2, 9)],
        weights=[1.0, 1.0, 1.0],
        count=20,
        owners=owners,
    )
    assert [sample.source for sample in finite] == [
        owners[int(sample.tokens_S1[0])] for sample in finite
    ]
    assert sum(sample.source == 0 for sample in finite) == 3 + 9
    plain = blend([1.0, 3.0])
    assert {sample.source for sample in (plain.next_sample() for _ in range(8))} == {0, 1}


NAMES = ("math", "code")


def write(path: Path, rows: list[dict[str, str]]) -> SourceSpec:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceSpec("jsonl", (str(path),), teacher_field="domain")


def rows_of_two() -> list[dict[str, str]]:
    """Three times as many characters of code; letters show the domain of a token."""
    return [
        {"text": ("m" if n % 2 else "c" * 3) * 10, "domain": "math" if n % 2 else "code"}
        for n in range(60)
    ]


def options(routing: Routing) -> DataOptions:
    return DataOptions(16, shuffle_buffer=4, shuffle_samples=4, routing=routing)


def test_a_sample_has_rows_of_one_teacher(tmp_path: Path) -> None:
    spec = write(tmp_path / "rows.jsonl", rows_of_two())
    routing = Routing(NAMES)
    stream = open_training([spec], tokenizer=ByteTokenizer(), options=options(routing), seed=3)
    samples = [stream.next_sample() for _ in range(80)]
    for sample in samples:
        letters = {chr(token - 1) for token in sample.tokens_S1.tolist() if token} & {"m", "c"}
        assert letters == {NAMES[sample.teacher_number][0]}
        assert sample.source == 0
    counts = [sum(sample.teacher_number == number for sample in samples) for number in (0, 1)]
    assert counts == [20, 60]
    resumed = open_training([spec], tokenizer=ByteTokenizer(), options=options(routing), seed=3)
    again = open_training([spec], tokenizer=ByteTokenizer(), options=options(routing), seed=3)
    for _ in range(30):
        resumed.next_sample()
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    for sample in samples[30:]:
        found = again.next_sample()
        assert found.tokens_S1.tolist() == sample.tokens_S1.tolist()
        assert found.teacher_number == sample.teacher_number
        assert found.number_in_source == sample.number_in_source
    per_epoch = samples_per_epoch(spec, tokenizer=ByteTokenizer(), options=options(routing), seed=3)
    assert per_epoch == -(-30 * 11 // 16) + -(-30 * 31 // 16)


def test_a_drawn_teacher_depends_on_seed_and_sample() -> None:
    routing = Routing(NAMES, (3.0, 1.0), seed=5)
    drawn = [routing.drawn(number) for number in range(4000)]
    assert drawn == [Routing(NAMES, (3.0, 1.0), seed=5).drawn(number) for number in range(4000)]
    assert drawn != [Routing(NAMES, (3.0, 1.0), seed=6).drawn(number) for number in range(4000)]
    assert 900 < sum(drawn) < 1100
    assert {Routing(NAMES, (0.0, 2.0)).drawn(number) for number in range(50)} == {1}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "x"}, ":2 has no 'domain'"),
        ({"text": "x", "domain": "law"}, ":2 has domain = 'law', and the teachers are math, code"),
    ],
)
def test_a_row_without_a_known_teacher_is_named(
    tmp_path: Path, row: dict[str, str], expected: str
) -> None:
    spec = write(tmp_path / "rows.jsonl", [{"text": "x", "domain": "math"}, row])
    with pytest.raises(DataError) as caught:
        routed_parts(spec, Routing(NAMES))
    assert f"{tmp_path / 'rows.jsonl'}{expected}" in str(caught.value)


def test_columns_of_a_table_route_as_fields_do(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows_of_two()), tmp_path / "rows.parquet")
    spec = SourceSpec("parquet", (str(tmp_path / "rows.parquet"),), teacher_field="domain")
    parts = routed_parts(spec, Routing(NAMES))
    assert [(part.teacher, part.share) for part in parts] == [(0, 0.25), (1, 0.75)]
    stream = open_training(
        [spec], tokenizer=ByteTokenizer(), options=options(Routing(NAMES)), seed=3
    )
    for _ in range(20):
        sample = stream.next_sample()
        other = ord("c" if sample.teacher_number == 0 else "m") + 1
        assert other not in sample.tokens_S1.tolist()
