"""One store in the teacher's own tokens serves students of other tokenizers and lengths."""

from __future__ import annotations

import json
import shutil
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_distill.data.tokenizers.open import load_tokenizer
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.runs import (
    SECOND_SIZES,
    Inputs,
    KnownRuns,
    assert_same_course,
    course,
    failure,
    layout,
    quick_and_slow,
    resumed,
    run,
)
from tests.e2e.store import test_aligned_among_teachers as among
from tests.e2e.store.test_aligned_offline import (
    FIGURES,
    OWN,
    SHORT,
    TERMS,
    K,
    Run,
    assert_same,
    of_store,
)

LENGTH, OF_TEACHER = 32, 64  # of the student's samples, in the tokens of both models
DOCUMENTS = 40


@pytest.fixture(scope="module")
def corpus(inputs: Inputs) -> Path:
    return write_whole_samples(inputs)


def write_whole_samples(inputs: Inputs) -> Path:
    """Documents that each fill one sample of the student: there is no cut inside of one."""

    tokenizer = load_tokenizer(inputs.tokenizer)
    pieces, found = tokenizer.token_bytes(), dict[str, None]()
    for line in inputs.corpus.read_text().splitlines():
        ids = tokenizer.encode_batch([json.loads(line)["text"]])[0][:LENGTH].tolist()
        text = b"".join(pieces[one] or b"" for one in ids).decode("utf-8", "replace")
        if len(tokenizer.encode_batch([text])[0]) == LENGTH:
            found[text] = None
    texts = list(found)[:DOCUMENTS]
    assert len(texts) == DOCUMENTS
    path = inputs.folder / "one-document-per-sample.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def store(pool: Pool, inputs: Inputs, corpus: Path) -> Path:
    """Several epochs in the teacher's tokens, cut at other places in each."""
    config = write_capture(inputs, "by-document", samples=40)
    folder = inputs.folder / "store-by-document"
    taken = run_in(
        pool, 2, config, folder,
        f"store.k={K}", f"data.sources=[{{format: jsonl, paths: {corpus}}}]",
        f"data.tokenizer.path={inputs.second_tokenizer(max(SECOND_SIZES))}",
        "data.sequence_length=384", "data.validation_fraction=0", "data.shuffle_samples=20",
    )  # fmt: skip
    assert taken is True
    return folder


@pytest.fixture(scope="module")
def train(pool: Pool, inputs: Inputs, corpus: Path) -> Run:
    """Train a student on the corpus."""
    return partial(KnownRuns(pool, inputs, "by-document", *settings_of(corpus)), "aligned")


def settings_of(corpus: Path) -> tuple[str, ...]:
    return (
        *SHORT, TERMS, f"data.sources=[{{format: jsonl, paths: {corpus}}}]",
        "data.validation_fraction=0", f"data.sequence_length={LENGTH}",
        f"teacher.sequence_length={OF_TEACHER}",
    )  # fmt: skip


def test_the_store_has_each_document_with_its_whole_context(
    store: Path, corpus: Path, inputs: Inputs
) -> None:
    from megatron_distill.data.text.documents import content_digest
    from megatron_distill.store import DocumentIndex, StoreSet

    tokenizer = load_tokenizer(inputs.second_tokenizer(max(SECOND_SIZES)))
    stores = StoreSet.open([str(store)])
    index = DocumentIndex(stores)
    for line in corpus.read_text().splitlines():
        text = json.loads(line)["text"]
        ids = [*tokenizer.encode_batch([text])[0].tolist(), tokenizer.eos_id]
        assert len(ids) <= OF_TEACHER + 1
        places = index.places(content_digest(text.encode()), len(ids))
        assert places is not None
        for label, (number, position) in enumerate(places.tolist()):
            if label:
                _, tokens = stores.packed_with_tokens(number)
                whole = slice(position - label + 1, position + 2)
                assert tokens.tokens_S1[whole].tolist() == ids[: label + 1]
                assert len(set(tokens.document_ids_S1[whole].tolist())) == 1
    stores.close()


@pytest.mark.parametrize("reader", quick_and_slow(["one rank", "DP2", "CP2", "PP2"], ["one rank"]))
def test_where_contexts_are_the_same_losses_are_those_of_the_live_teacher(
    store: Path, train: Run, reader: str
) -> None:
    world, overrides = layout(reader)
    assert_same(train(world, *of_store(store), *overrides), train(1), first=5e-6)


OTHERS = {
    "shorter samples": ("data.sequence_length=20", "teacher.sequence_length=24"),
    "longer samples": ("data.sequence_length=84", "teacher.sequence_length=96"),
    # Each token of this student is one of the teacher's: `common` would need their whole mass.
    "another student": (
        "data.tokenizer.path={smaller}", "data.sequence_length=40", "data.shuffle_buffer=7",
        "objective.terms=[{alignment: likelihood, divergence: js_divergence, temperature: 6.0}]",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_the_same_store_serves_other_lengths_and_another_tokenizer(
    store: Path, train: Run, inputs: Inputs, other: str
) -> None:
    smaller = inputs.second_tokenizer(min(SECOND_SIZES))
    given = tuple(one.replace("{smaller}", str(smaller)) for one in OTHERS[other])
    alone = train(1, *of_store(store), *given)
    live = train(1, *given)
    for ours, beside in zip(alone, live, strict=True):
        # No chunk is missing, and other contexts of the teacher change its distributions a bit.
        for name in ("chunks", "aligned_labels"):
            assert ours[name] == beside[name]
        assert ours["kd_loss"] == pytest.approx(beside["kd_loss"], rel=0.5)
    names = [name for name in FIGURES if name in alone[0]]
    assert len(names) >= 5
    for world, overrides in map(layout, ("TP2", "DP2")):
        found = train(world, *of_store(store), *given, *overrides)
        assert_same_course(found, alone, names, first=5e-6)


@pytest.mark.slow
def test_among_several_teachers_the_store_has_the_texts_of_its_own_samples(
    pool: Pool, inputs: Inputs, store: Path, corpus: Path, tmp_path: Path
) -> None:
    """A teacher of the student's tokenizer trains a source of further texts."""
    config = among.write_config(inputs)
    sources = ", ".join(
        f"{{format: jsonl, paths: {path}, teacher: {name}}}"
        for path, name in ((inputs.corpus, "near"), (corpus, "far"))
    )
    given = (
        f"objective.terms=[{', '.join(among.ROUTED)}]", "objective.routing_weights=null",
        f"data.sources=[{sources}]", "data.validation_fraction=0", "schedule.warmup_steps=1",
        f"data.sequence_length={LENGTH}", f"teachers.far.sequence_length={OF_TEACHER}",
    )  # fmt: skip
    stored = among.of_store(store)
    live = run(pool, 1, config, tmp_path / "live", *given)
    among.assert_same(
        run(pool, 1, config, tmp_path / "stored", *given, *stored), live, among.OF_ROUTED
    )
    # A term of all samples needs records of the further texts too.
    every = "objective.terms=[{teacher: near}, {alignment: likelihood, teacher: far}]"
    unrouted = f"data.sources=[{{format: jsonl, paths: [{inputs.corpus}, {corpus}]}}]"
    text = failure(pool, 1, config, tmp_path / "all", *given, *stored, every, unrouted)
    assert "teachers.far.store does not have" in text
    assert str(inputs.corpus) in text


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_bits(
    pool: Pool, inputs: Inputs, store: Path, corpus: Path, tmp_path: Path
) -> None:
    given = [
        *settings_of(corpus), *of_store(store), "train.steps=6",
        "data.sequence_length=28", "data.validation_fraction=0.2",
        "validation={samples: 4, interval: 3}",
    ]  # fmt: skip
    config = inputs.folder / "aligned.yaml"
    parts, whole = resumed(pool, 2, config, tmp_path, *given, stop_after=2)
    assert course(parts) == course(whole)
    assert all(record["chunks"] > 0 for record in whole)
    assert all(one["kd_loss"] != other["kd_loss"] for one, other in pairwise(whole))


@pytest.mark.slow
def test_a_whole_epoch_or_more_is_read_from_a_store_of_fewer_samples(
    train: Run, store: Path
) -> None:
    # 96 samples are read, and the store has 40: a sample is not joined by its number.
    found = train(1, *of_store(store), "train.steps=12", "data.sequence_length=16")
    assert len(found) == 12
    assert all(record["aligned_labels"] > 0.8 for record in found)


# overrides -> what the message must hold
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "another corpus": (
        ("data.sources=[{format: jsonl, paths: {other}}]",),
        ("teacher.store does not have 2 of", "{other}:", "Use the corpus of the capture"),
    ),
    "no corpus": (
        (OWN,),
        ("captured with the teacher's tokenizer alone", "name the corpus in data.sources"),
    ),
    "conversations": (
        ("data.sources=[{format: jsonl, paths: {other}, conversation: {}}]",),
        ("data.sources.0.conversation is set", "capture.aligned=true"),
    ),
    "no list of documents": (
        ("teacher.store={unlisted}",),
        ("{unlisted}: has no lists of documents", "Start the same capture again"),
    ),
    "a damaged list": (
        ("teacher.store={damaged}",),
        ("documents-000002.json: damaged", "start the capture of {damaged} again"),
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(WRONG, ["no list of documents"]))
def test_a_store_that_does_not_fit_is_refused(
    pool: Pool, inputs: Inputs, store: Path, corpus: Path, tmp_path: Path, case: str
) -> None:
    unlisted, damaged = (shutil.copytree(store, tmp_path / name) for name in ("a", "b"))
    for path in (unlisted / "shards").glob("documents-*"):
        path.unlink()
    path = damaged / "shards" / "documents-000002.json"
    path.write_text(path.read_text().replace('"shard": 2', '"shard": 3'))
    names = {
        "{other}": str(inputs.corpus),
        "{unlisted}": str(unlisted),
        "{damaged}": str(damaged),
    }

    def named(text: str) -> str:
        for name, value in names.items():
            text = text.replace(name, value)
        return text

    overrides, parts = WRONG[case]
    text = failure(
        pool, 2, inputs.folder / "aligned.yaml", tmp_path / "run",
        *settings_of(corpus), *of_store(store), *map(named, overrides),
    )  # fmt: skip
    for part in parts:
        assert named(part) in text, text
