"""Teacher and student of one tokenizer with unequal numbers of rows, from start to export."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_distill.errors import StoreError
from megatron_distill.store import UNKNOWN, StoreReader
from tests.distributed.hugging_face_models import reference, save_model, stored_tensors
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.conversion.test_hugging_face import export, give_tokenizer
from tests.e2e.runs import STUDENT, TEACHER, Inputs, assert_same_course, run
from tests.support.store_samples import IDENTITY, settings, write_store

SHORT = ("train.steps=4", "schedule.warmup_steps=1")
# Rows of 32 and 48 numbers, so that a random model's first rows do not depend on their number.
ROWS = ("student.architecture.vocab_size={}", "teacher.architecture.vocab_size={}")
WIDE = "teacher.architecture.hidden_size=48"


@pytest.fixture(scope="module")
def plain(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run of two models with a row for each token and no more."""
    path = inputs.write("padding", STUDENT, TEACHER)
    return path, run(pool, 1, path, tmp_path_factory.mktemp("plain"), *SHORT, WIDE)


@pytest.mark.slow
@pytest.mark.parametrize(  # four ranks share two KV heads
    ("tensor", "student", "teacher"), [(1, 304, 400), (2, 600, 301), (4, 320, 1100)]
)
def test_the_padding_of_either_model_changes_nothing(
    pool: Pool, plain: Any, tmp_path: Path, tensor: int, student: int, teacher: int
) -> None:
    path, expected = plain
    rows = (ROWS[0].format(student), ROWS[1].format(teacher))
    found = run(
        pool, tensor, path, tmp_path / "run", *SHORT, WIDE, *rows, f"parallel.tensor={tensor}"
    )
    names = ("ce_loss", "kd_loss", "student_entropy", "teacher_entropy", "grad_norm")
    assert_same_course(found, expected, names)


@pytest.fixture(scope="module")
def models(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student of 304 rows and a teacher of 320, with the session's tokenizer of 301 ids."""
    folder = tmp_path_factory.mktemp("models")
    for name, rows in (("student", 304), ("teacher", 320)):
        save_model(
            folder / name, "qwen2", num_hidden_layers=2, vocab_size=rows,
            tie_word_embeddings=False,
        )  # fmt: skip
        pool.run(1, give_tokenizer, inputs.tokenizer, folder / name)
    return folder


def verified(rank: int, world: int, hugging_face: Path, checkpoint: Path) -> bool:
    from megatron_distill.runtime.mcore_patches import prepare_megatron_core

    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.convert.verify import Probe, compare_with_checkpoint

    probe = Probe(sequences=2, length=16)
    return compare_with_checkpoint(hugging_face, str(checkpoint), probe).is_same


@pytest.mark.slow
def test_a_student_leaves_with_its_own_rows(
    pool: Pool, inputs: Inputs, models: Path, tmp_path: Path
) -> None:
    path = inputs.write(
        "padded_pair",
        f"student:\n  hf: {models / 'student'}\n",
        f"teacher:\n  hf: {models / 'teacher'}\n",
    )
    records = run(
        pool, 2, path, tmp_path / "run", *SHORT, "parallel.tensor=2", "checkpoint.save=true",
        "optimizer.weight_decay=0",
    )  # fmt: skip
    assert all(record["kd_loss"] > 0 for record in records)
    pool.run(1, export, tmp_path / "run", tmp_path / "out")
    assert reference(tmp_path / "out").config.vocab_size == 304
    assert pool.run(1, verified, tmp_path / "out", tmp_path / "run") == [True]
    before, after = stored_tensors(models / "student"), stored_tensors(tmp_path / "out")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert after[name].shape == before[name].shape == (304, 32)
        assert torch.equal(after[name][301:], before[name][301:])
        assert not torch.equal(after[name][:301], before[name][:301])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_never_written_by_transformers(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    from safetensors.torch import load_file, save_file

    from megatron_distill.data.tokenizers.hugging_face import HuggingFaceTokenizer
    from megatron_distill.evaluation.generate import write_text
    from megatron_distill.models.generation import Sampling

    folder = Path(shutil.copytree(models / "student", tmp_path / "student"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][301] *= 1e3  # one of the two has the largest logit of all
    tensors["lm_head.weight"][302] = -tensors["lm_head.weight"][301]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    largest = reference(folder)(torch.arange(9)[None]).logits.argmax(-1)
    assert bool((largest >= 301).all()), "else this test shows nothing"
    seen: list[int] = []
    monkeypatch.setattr(
        HuggingFaceTokenizer, "decode", lambda _, ids: "" if seen.extend(ids) else "text"
    )
    write_text(folder, "def ", Sampling(temperature=temperature), tokens=20)
    assert len(seen) > 10
    assert max(seen) < 301


@pytest.mark.slow
def test_a_store_serves_a_student_of_another_padding(
    pool: Pool, inputs: Inputs, models: Path, tmp_path: Path
) -> None:
    """The store has the tokenizer's ids; its losses are those of the live teacher."""
    capture = write_capture(inputs, "padded_capture", samples=16, per_shard=8)
    given = ("teacher.architecture=null", f"teacher.hf={models / 'teacher'}")
    assert run_in(pool, 2, capture, tmp_path / "store", *given, "store.codec=f32") is True
    student = f"student:\n  hf: {models / 'student'}\n"
    path = inputs.write("padded_store", student, f"teacher:\n  hf: {models / 'teacher'}\n")
    term = "objective.terms=[{divergence: forward_kl, top_k: 12}]"
    two = ("train.steps=2", "schedule.warmup_steps=1", term)
    live = run(pool, 1, path, tmp_path / "live", *two)
    stored = run(
        pool, 2, path, tmp_path / "stored", *two, "parallel.tensor=2", "teacher.hf=null",
        f"teacher.store={tmp_path / 'store'}",
    )  # fmt: skip
    names = ("ce_loss", "kd_loss", "teacher_entropy", "topk_mass")
    assert_same_course(stored, live, names, first=1e-4)


def checked(rank: int, world: int, folder: Path, tokenizer: str, tokens: int, rows: int) -> str:
    from megatron_distill.data.tokenizers.open import Vocabulary
    from megatron_distill.train.assemble.stores.tokens import TokensOfRun
    from tests.distributed.megatron_world import small_architecture

    with StoreReader.open(folder) as reader:
        run = TokensOfRun(
            Vocabulary(tokens, tokenizer),
            small_architecture(vocab_size=rows),
            length=reader.settings.sequence_length,
            student_tokenizer=None,
            student_length=None,
        )
        try:
            run.check(reader)
        except StoreError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("tokens", "rows", "is_known", "accepted"),
    [
        (1000, 1000, True, True),
        (997, 1000, True, True),  # an older store of a teacher with the student's rows
        (997, 1024, True, True),  # of a teacher with other rows
        (997, 1000, False, True),
        (997, 1024, False, False),  # without a tokenizer to compare, it may be another vocabulary
        (1001, 1024, True, False),
    ],
)
def test_a_store_whose_vocabulary_counts_padding_is_read(
    pool: Pool, tmp_path: Path, tokens: int, rows: int, is_known: bool, accepted: bool
) -> None:
    tokenizer = IDENTITY.tokenizer if is_known else UNKNOWN
    write_store(tmp_path / "s", settings(vocab_size=1000), samples=2, tokenizer=tokenizer)
    (text,) = pool.run(1, checked, tmp_path / "s", IDENTITY.tokenizer, tokens, rows)
    assert (text == "") is accepted, text
    if not accepted:
        assert f"its vocab_size is 1000, this run's tokenizer has {tokens} tokens" in text
