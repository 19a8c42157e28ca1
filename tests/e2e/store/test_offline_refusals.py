"""A store that cannot be trusted, or is not this run's, stops every rank with the same sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.runs import SECONDS, TENSOR, Inputs, failure, logged, run, step_records

STEPS, ROWS, K = 8, 8, 12
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=2")
ONE_TERM = f"objective.terms=[{{divergence: forward_kl, top_k: {K}}}]"


@pytest.fixture(scope="module")
def store(pool: Pool, inputs: Inputs) -> Path:
    config = write_capture(inputs, "refused", samples=STEPS * ROWS)
    folder = inputs.folder / "store-refused"
    assert run_in(pool, 1, config, folder) is True
    return folder


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "copy"))


# overrides -> what the message must hold
WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "another teacher": (
        ("teacher.architecture.init_std=0.1",),
        ("teacher.store was captured from a teacher with weights v2:", "set the same teacher"),
    ),
    "another order": (
        ("teacher.architecture=null", "data.shuffle_samples=41"),
        ("captured on another stream", "data.shuffle_samples is 40 in the store, not 41"),
    ),
    "documents mixed": (
        ("data.isolate_documents=false",),
        ("captured with data.isolate_documents=true", "set the same value"),
    ),
    "another length": (
        ("data.sequence_length=64",),
        ("its sequence_length is 32, this run's 64", "capture a store"),
    ),
    "too many ids": (
        (f"objective.terms=[{{divergence: forward_kl, top_k: {K + 1}}}]",),
        ("contains 12 top-k ids per position, not a top-13", "a larger k"),
    ),
    "too few samples": (
        ("train.steps=9",),
        ("contains 64 samples", "reads 72", "remove data.sources"),
    ),
    "nothing to learn": (
        ("objective.terms=[]",),
        ("objective.terms = []: a store serves distillation terms only",),
    ),
    "all held out": (
        ("data.sources=[]", "validation.samples=64"),
        ("validation.samples is 64, but the stores contain only 64 samples",),
    ),
    "a student in a store": (
        ("student.store=somewhere",),
        ("student.store: a store has no weights to train",),
    ),
    "two stores beside a corpus": (
        ("teacher.store=[a, b]",),
        ("teacher.store has 2 entries, but only one store can be joined",),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mismatched_parts_are_named(
    case: str, pool: Pool, dense: Path, store: Path, tmp_path: Path
) -> None:
    overrides, parts = WRONG[case]
    text = failure(
        pool, 2, dense, tmp_path,
        *SHORT, ONE_TERM, TENSOR, f"teacher.store={store}", *overrides,
    )  # fmt: skip
    for part in parts:
        assert part in text


def log_with_an_earlier_digest(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> str:
    """The log of a run whose store has a digest of the first form."""
    from megatron_distill.train.assemble.stores import teacher
    from megatron_distill.train.model_source import is_comparable

    with patch.object(teacher, "is_comparable", lambda found: is_comparable(f"sha256:{found}")):
        return logged(rank, world, config, overrides)


def test_a_digest_of_an_earlier_form_is_a_warning(
    pool: Pool, dense: Path, store: Path, tmp_path: Path
) -> None:
    overrides = [f"output={tmp_path / 'run'}", *SHORT, ONE_TERM, f"teacher.store={store}"]
    overrides += WRONG["another teacher"][0]
    (log,) = pool.run(1, log_with_an_earlier_digest, dense, overrides, timeout=SECONDS)
    assert "teacher.store has a digest of an earlier version" in log
    assert len(step_records(tmp_path / "run")) == STEPS


def _unfinished(store: Path) -> None:
    (store / "manifest.json").unlink()


def _flipped(store: Path) -> None:
    path = store / "shards" / "logits-000003.array_record"
    content = bytearray(path.read_bytes())
    content[2000] ^= 16
    path.write_bytes(content)


# Every kind of damage is told by tests/unit/store/test_damage.py: one that opening the store finds,
# and one that reading a sample does.
REPAIR = "run `megatron-distill store repair "
DAMAGED: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "unfinished": (_unfinished, ("incomplete, 13 of 13 shards and no manifest.json",)),
    "flipped": (_flipped, ("logits-000003.array_record: sample", "damaged", REPAIR)),
}


@pytest.mark.parametrize(
    "own_corpus", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["joined", "own"]
)
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_store_stops_all_ranks_before_the_step(
    case: str, own_corpus: bool, pool: Pool, dense: Path, copy: Path, tmp_path: Path
) -> None:
    damage, parts = DAMAGED[case]
    damage(copy)
    text = failure(
        pool, 2, dense, tmp_path / "run",
        *SHORT, ONE_TERM, TENSOR, f"teacher.store={copy}",
        *(("data.sources=[]",) if own_corpus else ()),
    )  # fmt: skip
    assert text.startswith("StoreError: ")
    for part in parts:
        assert part in text
    # Samples 15 to 19 are of shard 3: the second step reads them, one or two steps ahead.
    metrics = tmp_path / "run" / "metrics.jsonl"
    assert not metrics.exists() or len(step_records(tmp_path / "run")) < STEPS


@pytest.mark.slow
@pytest.mark.parametrize("keeps_files", [True, False], ids=["with files", "by digest"])
def test_another_tokenizer_is_refused(
    keeps_files: bool, pool: Pool, dense: Path, copy: Path, tmp_path: Path
) -> None:
    if not keeps_files:
        shutil.rmtree(copy / "tokenizer")
    text = failure(
        pool, 1, dense, tmp_path / "run",
        *SHORT, ONE_TERM, f"teacher.store={copy}", "teacher.architecture=null",
        "data.tokenizer.path=null", "data.tokenizer.train_vocab_size=301",
        "data.tokenizer.train_bytes=5000",
    )  # fmt: skip
    if keeps_files:
        assert "use one tokenizer for data and models" in text
    else:
        assert "its tokenizer is" in text
        assert "Remove data.tokenizer to use that of the store" in text


@pytest.mark.slow
def test_a_run_does_not_go_on_from_a_store_of_another_teacher(
    pool: Pool, inputs: Inputs, copy: Path, tmp_path: Path
) -> None:
    """Captured anew under the same name, of the same samples; nothing else names the teacher."""
    config, output = inputs.folder / "dense.yaml", tmp_path / "run"
    asked = (*SHORT, ONE_TERM, f"teacher.store={copy}", "teacher.architecture=null")
    saved = (*asked, "checkpoint.save=true")
    run(pool, 2, config, output, *saved, TENSOR, stop_after=3)
    shutil.rmtree(copy)
    capture = inputs.folder / "refused.yaml"
    assert run_in(pool, 1, capture, copy, "teacher.architecture.init_std=0.1") is True
    text = failure(pool, 2, config, output, *saved, TENSOR)
    assert "teacher.store: differs from the stores in the checkpoint" in text
