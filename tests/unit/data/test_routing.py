"""The teacher of each sample: by source, by a field of its rows, drawn; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.routing import Routing, routed_parts
from megatron_distill.data.sources import DataOptions, open_training, samples_per_epoch
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer

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
    assert parts[1].spec.kind.reader is not None
    stream = open_training(
        [spec], tokenizer=ByteTokenizer(), options=options(Routing(NAMES)), seed=3
    )
    for _ in range(20):
        sample = stream.next_sample()
        other = ord("c" if sample.teacher_number == 0 else "m") + 1
        assert other not in sample.tokens_S1.tolist()
