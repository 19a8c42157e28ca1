"""Indexed corpora: windows of whole epochs, held-out part, resume, and every damaged file."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.samples import Sample
from megatron_distill.data.sources import DataOptions, held_out_samples, open_training
from megatron_distill.data.text.indexed import IndexedSource
from megatron_distill.errors import DataError
from tests.support.data_fixtures import ByteTokenizer, story, write_jsonl
from tests.support.indexed_corpus import EOD, numbered, write_indexed

LENGTH = 16
DOCUMENTS = numbered(40)
VOCABULARY = 1000


def source_of(prefix: str, **changes: object) -> IndexedSource:
    settings: dict[str, object] = {
        "sequence_length": LENGTH,
        "vocab_size": VOCABULARY,
        "eos_id": EOD,
        "seed": 1,
        "held_out_fraction": 0.0,
        "is_held_out": False,
        "cache": None,
    }
    return IndexedSource(prefix, **{**settings, **changes})  # type: ignore[arg-type]


def draw(source: IndexedSource, count: int) -> list[Sample]:
    return [source.next_sample() for _ in range(count)]


def per_epoch(source: IndexedSource) -> int:
    return int(source.state_dict()["samples_per_epoch"])


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_indexed(tmp_path / "corpus", DOCUMENTS)


def test_every_token_of_an_epoch_is_a_label_once_but_for_the_remainder(prefix: str) -> None:
    source = source_of(prefix)
    tokens = [*chain.from_iterable(DOCUMENTS), *[EOD] * len(DOCUMENTS)]
    assert per_epoch(source) == (len(tokens) - 1) // LENGTH
    orders = []
    for _ in range(3):
        samples = draw(source, per_epoch(source))
        labels = Counter(chain.from_iterable(s.tokens_S1[1:].tolist() for s in samples))
        assert all(labels[token] <= 1 for token in labels if token != EOD)
        assert not Counter(labels) - Counter(tokens)
        missing = Counter(tokens) - labels
        assert sum(missing.values()) == len(tokens) - per_epoch(source) * LENGTH
        orders.append([sample.tokens_S1.tolist() for sample in samples])
    assert orders[0] != orders[1] != orders[2]
    again = source_of(prefix)
    assert [s.tokens_S1.tolist() for s in draw(again, per_epoch(again))] == orders[0]
    other = source_of(prefix, seed=2)
    assert [s.tokens_S1.tolist() for s in draw(other, per_epoch(other))] != orders[0]


def test_documents_are_distinguished_by_the_end_token(prefix: str) -> None:
    owner = {token: i for i, document in enumerate(DOCUMENTS) for token in document}
    for sample in draw(source_of(prefix), 20):
        tokens, ids = sample.tokens_S1.tolist(), sample.document_ids_S1.tolist()
        assert ids[0] == 0
        for i in range(1, len(tokens)):
            assert ids[i] - ids[i - 1] == (tokens[i - 1] == EOD)
        for document in set(ids):
            owners = {owner[t] for t, i in zip(tokens, ids, strict=True) if i == document and t}
            assert len(owners) <= 1


def test_resuming_at_every_position_equals_the_uninterrupted_stream(prefix: str) -> None:
    source = source_of(prefix)
    count = 2 * per_epoch(source) + 3
    states, samples = [], []
    for _ in range(count):
        states.append(source.state_dict())
        samples.append(source.next_sample())
    resumed = source_of(prefix)
    for position in [*range(0, count - 2, 3), 1]:
        resumed.load_state_dict(states[position])
        for expected in samples[position : position + 2]:
            found = resumed.next_sample()
            assert found.tokens_S1.tolist() == expected.tokens_S1.tolist()
            assert found.sample_id == expected.sample_id


@pytest.mark.parametrize("parts", [1, 3])
def test_the_held_out_part_is_the_last_documents_and_disjoint(tmp_path: Path, parts: int) -> None:
    prefix = write_indexed(tmp_path / "corpus", DOCUMENTS, parts=parts)
    training = source_of(prefix, held_out_fraction=0.25)
    held_out = source_of(prefix, held_out_fraction=0.25, is_held_out=True, seed=0)
    seen = tokens_of(draw(training, 2 * per_epoch(training)))
    kept = []
    while (sample := held_out.next_or_none()) is not None:
        kept.append(sample)
    others = tokens_of(kept)
    assert not seen & others
    assert seen <= set(chain.from_iterable(DOCUMENTS[:30]))
    assert others <= set(chain.from_iterable(DOCUMENTS[30:]))
    assert len(kept) == per_epoch(held_out) > 3
    whole = source_of(prefix, held_out_fraction=1.0, is_held_out=True)
    assert per_epoch(whole) == per_epoch(source_of(prefix))


def tokens_of(samples: list[Sample]) -> set[int]:
    return {token for sample in samples for token in sample.tokens_S1.tolist()} - {EOD}


def test_indices_are_read_whole_and_follow_the_file(prefix: str, tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "cache"
    first = [sample.tokens_S1.tolist() for sample in draw(source_of(prefix, cache=cache), 5)]
    (folder,) = cache.iterdir()
    stamp = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = [sample.tokens_S1.tolist() for sample in draw(source_of(prefix, cache=cache), 5)]
    assert again == first == [s.tokens_S1.tolist() for s in draw(source_of(prefix), 5)]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == stamp
    write_indexed(Path(prefix), numbered(40, first=500))
    changed = draw(source_of(prefix, cache=cache, vocab_size=2000), 5)
    assert tokens_of(changed) <= set(chain.from_iterable(numbered(40, first=500)))
    assert len(list(cache.iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_named(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way of a folder")
    with pytest.raises(DataError, match=r"set data\.cache to a folder"):
        source_of(prefix, cache=tmp_path / "file").next_sample()


def change(path: Path, start: int, content: bytes) -> None:
    before = path.read_bytes()
    path.write_bytes(before[:start] + content + before[start + len(content) :])


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


# Of the index and the data -> the message.
DAMAGES: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "no index": (lambda index, data: index.unlink(), "corpus.idx: no such file"),
    "no data": (lambda index, data: data.unlink(), "corpus.bin: no such file"),
    "other content": (
        lambda index, data: index.write_bytes(b"x" * 500), "corpus.idx: not a Megatron-Core index"
    ),
    "empty index": (
        lambda index, data: index.write_bytes(b""), "corpus.idx: not a Megatron-Core index"
    ),
    "index cut off": (lambda index, data: cut(index, 8), "corpus.idx: cut off at"),
    "data cut off": (lambda index, data: cut(data, 4), "corpus.bin: cut off at"),
    "other version": (
        lambda index, data: change(index, 9, b"\x07"),
        "corpus.idx: unknown version 7 or data type 4",
    ),
    "other type": (
        lambda index, data: change(index, 17, b"\x63"),
        "corpus.idx: unknown version 1 or data type 99",
    ),
    "folder": (lambda index, data: (data.unlink(), data.mkdir()), "corpus.bin: no such file"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named(prefix: str, damage: str) -> None:
    make, message = DAMAGES[damage]
    make(Path(f"{prefix}.idx"), Path(f"{prefix}.bin"))
    with pytest.raises(DataError) as caught:
        source_of(prefix)
    assert message in str(caught.value)


def test_a_token_outside_of_the_vocabulary_is_named(prefix: str) -> None:
    highest = max(chain.from_iterable(DOCUMENTS))
    source = source_of(prefix, vocab_size=highest + 1)
    draw(source, per_epoch(source))
    low = source_of(prefix, vocab_size=100)
    with pytest.raises(DataError, match=r"corpus\.bin: contains token id \d+, but .* has 100 ids"):
        draw(low, per_epoch(low))


def test_documents_without_the_end_token_are_refused(tmp_path: Path) -> None:
    prefix = write_indexed(tmp_path / "corpus", DOCUMENTS, end=None)
    with pytest.raises(DataError, match=r"do not end with token 0.*--append-eod"):
        source_of(prefix)


def test_too_few_tokens_for_one_sequence_are_refused(prefix: str) -> None:
    with pytest.raises(DataError, match="not enough tokens to train on one sequence of 5000"):
        source_of(prefix, sequence_length=5000)
    with pytest.raises(DataError, match="not enough tokens"):
        source_of(prefix, held_out_fraction=1.0)


def test_a_corpus_of_another_size_is_refused_on_resuming(prefix: str) -> None:
    state = source_of(prefix).state_dict()
    with pytest.raises(
        DataError, match=r"samples_per_epoch differs from the checkpoint \(\d+, was \d+\)"
    ):
        source_of(prefix, sequence_length=8).load_state_dict(state)
    with pytest.raises(DataError, match=r"seed differs from the checkpoint \(2, was 1\)"):
        source_of(prefix, seed=2).load_state_dict(state)


def test_prefixes_and_texts_blend_by_weight_and_too_few_held_out_are_refused(
    tmp_path: Path,
) -> None:
    low = [[token % 200 + 1 for token in document] for document in DOCUMENTS]
    prefixes = tuple(write_indexed(tmp_path / name, low) for name in ("a", "b"))
    text = write_jsonl(tmp_path / "c.jsonl", map(story, range(50)))
    specs = [
        SourceSpec("megatron", prefixes, weight=1.0),
        SourceSpec("jsonl", (str(text),), weight=3.0),
    ]
    options = DataOptions(sequence_length=LENGTH, validation_fraction=0.2)
    tokenizer = ByteTokenizer()
    source = open_training(specs, tokenizer=tokenizer, options=options, seed=1)
    ids = [source.next_sample().sample_id for _ in range(80)]
    assert ids == list(range(80))
    assert source.state_dict()["taken"] == [10, 10, 60]
    held_out = held_out_samples(specs, tokenizer=tokenizer, options=options, samples=8)
    assert len(held_out.samples) == 8
    with pytest.raises(DataError, match=r"validation\.samples is 999, but .* fill only \d+"):
        held_out_samples(specs, tokenizer=tokenizer, options=options, samples=999)
