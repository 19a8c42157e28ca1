"""train.epochs: the steps that it means, for every kind of source, resumed, on one rank and two."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron_distill.data import sources as data_sources
from megatron_distill.data.formats import SourceSpec
from megatron_distill.data.sources import DataOptions, open_training, samples_per_epoch
from megatron_distill.data.text.documents import content_digest, is_held_out
from megatron_distill.data.tokenizers.open import Tokenizer, load_tokenizer
from megatron_distill.errors import DataError
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.failing import call
from tests.e2e.runs import Inputs, course, failure, run, step_records
from tests.e2e.training.test_conversations import SECTIONS, write_chat
from tests.support.indexed_corpus import write_indexed

BATCH, LENGTH, HELD_OUT = 16, 32, 0.1
COMMON = (
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=8",
    "objective.chunk_tokens=512",
    "schedule.warmup_steps=2",
)


@pytest.fixture(scope="module")
def tokenizer(inputs: Inputs) -> Tokenizer:
    return load_tokenizer(inputs.tokenizer)


@pytest.fixture(scope="module")
def corpus(inputs: Inputs) -> Path:
    """A twentieth of the session's, so that two epochs are few steps."""
    lines = inputs.corpus.read_text().splitlines(keepends=True)
    path = inputs.folder / "few.jsonl"
    path.write_text("".join(lines[::20]))
    return path


@pytest.fixture(scope="module")
def samples(corpus: Path, tokenizer: Tokenizer) -> int:
    """Packed samples of the corpus, from its own tokens: every one but the first is a label."""
    texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
    trained = [t for t in texts if not is_held_out(content_digest(t.encode()), HELD_OUT)]
    tokens = sum(len(row) + 1 for row in tokenizer.encode_batch(trained))
    return math.ceil((tokens - 1) / LENGTH)


@pytest.mark.slow
def test_epochs_are_the_steps_of_that_many_passes(
    pool: Pool, dense: Path, tmp_path: Path, corpus: Path, samples: int
) -> None:
    of = (*COMMON, f"data.sources.0.paths={corpus}")
    steps = math.ceil(2 * samples / BATCH)
    assert steps > 4
    counted = run(pool, 2, dense, tmp_path / "epochs", *of, "train.epochs=2")
    given = run(pool, 2, dense, tmp_path / "steps", *of, f"train.steps={steps}")
    assert course(counted) == course(given)
    assert counted[-1]["step"] == steps
    halves = (*of, "train.epochs=2", "checkpoint.save=true")
    run(pool, 2, dense, tmp_path / "halves", *halves, stop_after=3)
    assert course(run(pool, 2, dense, tmp_path / "halves", *halves)) == course(counted)
    kept = (tmp_path / "halves" / "config.yaml").read_text()
    assert f"steps: {steps}" in kept
    assert "epochs: null" in kept


def options(tmp_path: Path) -> DataOptions:
    from megatron_distill.data.chat.source import ConversationOptions

    return DataOptions(
        sequence_length=LENGTH,
        validation_fraction=HELD_OUT,
        index_cache=tmp_path / "index",
        conversations=ConversationOptions(
            cache=tmp_path / "cache",
            packing_buffer=16,
            workers=0,
        ),
    )


def test_the_samples_of_an_indexed_corpus_are_those_of_its_index(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    documents = [[5 + n % 7] * (20 + n) for n in range(40)]
    prefix = write_indexed(tmp_path / "corpus", documents, end=tokenizer.eos_id)
    spec = SourceSpec("megatron", (prefix,))
    found = samples_per_epoch(spec, tokenizer=tokenizer, options=options(tmp_path), seed=3)
    stream = open_training([spec], tokenizer=tokenizer, options=options(tmp_path), seed=3)
    state = [stream.next_sample() for _ in range(found)] and stream.state_dict()
    assert state["sources"][0]["position"] == found == state["sources"][0]["samples_per_epoch"]


@pytest.mark.slow
def test_the_samples_of_conversations_are_one_pass_of_their_windows(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    chat = SECTIONS.format(corpus=write_chat(tmp_path / "chat.jsonl", weights=False))
    found = run(
        pool, 1, dense, tmp_path / "run", chat, "train.epochs=3",
        "train.global_batch_size=8", "schedule.warmup_steps=1", "checkpoint.save=true",
    )  # fmt: skip
    (newest,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert found[-1]["step"] == int(newest.name.removeprefix("step_"))
    # The tokens of 60 conversations in windows of 33, filled to more than half.
    assert 3 * 60 / 8 / 4 < found[-1]["step"] < 3 * 60 / 8


@pytest.mark.slow
def test_a_stores_own_samples_are_counted_without_the_held_out(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    config = write_capture(inputs, "epochs", samples=24)
    assert run_in(pool, 1, config, tmp_path / "store") is True
    store = (
        f"teacher={{architecture: null, store: {tmp_path / 'store'}}}",
        "objective.terms=[{top_k: 12}]",
        "train.epochs=2",
        "train.global_batch_size=8",
        "schedule.warmup_steps=1",
    )
    dense = inputs.folder / "dense.yaml"
    own = run(pool, 2, dense, tmp_path / "own", *store, "data.sources=[]", "validation.samples=4")
    assert own[-1]["step"] == math.ceil(2 * (24 - 4) / 8)
    text = failure(pool, 2, dense, tmp_path / "joined", *store)
    assert text.startswith("StoreError: teacher.store: contains 24 samples, but train.steps = ")


def test_a_large_corpus_of_documents_is_refused_by_name(
    inputs: Inputs, tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_sources, "_COUNTED_BYTES", 1000)
    spec = SourceSpec("jsonl", (str(inputs.corpus),))
    with pytest.raises(DataError, match=r"train\.epochs: data source .*corpus.* Set train\.steps"):
        samples_per_epoch(spec, tokenizer=tokenizer, options=options(tmp_path), seed=3)


def test_settings_without_effect_are_logged_once_and_the_run_goes_on(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    changes = ("parallel.sequence=true", "checkpoint.save=false", "checkpoint.interval=10")
    short = ("train.steps=2", "schedule.warmup_steps=1")
    first, second = call(pool, dense, tmp_path, *short, *changes)
    warned = [line.split(": ", 1)[1] for line in first.stderr.splitlines() if "WARNING" in line]
    assert warned == [
        "parallel.sequence = true has no effect with parallel.tensor = 1",
        "checkpoint.interval = 10 has no effect with checkpoint.save = false",
    ]
    assert "WARNING" not in second.stderr
    assert [record["step"] for record in step_records(tmp_path)] == [1, 2]
