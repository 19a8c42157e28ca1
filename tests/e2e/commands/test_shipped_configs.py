"""Each configuration that is shipped for large models runs, on small stand-ins for its models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.data.tokenizers.open import load_tokenizer
from tests.distributed.hugging_face_models import reference, save_model
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in
from tests.e2e.conversion.test_hugging_face import give_tokenizer
from tests.e2e.failing import call_alone
from tests.e2e.processes import ROOT
from tests.e2e.runs import SECOND_SIZES, Inputs, run
from tests.support.chat_fixtures import chat_tokenizer, write_rows

CONFIGS = ROOT / "configs"
CHAT = CONFIGS / "qwen25_7b_to_1.5b_chat.yaml"
CAPTURE = CONFIGS / "llama31_8b_pruned_topk_store_capture.yaml"
PRUNED = CONFIGS / "llama31_8b_pruned_topk_store.yaml"
BOTH = CONFIGS / "llama31_8b_to_1b.yaml"
FEATURES = CONFIGS / "llama_features_balanced.yaml"
TEACHERS = CONFIGS / "two_teachers.yaml"
TOKENIZERS = CONFIGS / "qwen25_7b_to_llama32_1b.yaml"

HERE = ("runtime.device=cpu", "runtime.backend=gloo", "runtime.threads=1")
SHORT = (
    "train.steps=2", "train.global_batch_size=4", "train.micro_batch_size=2",
    "schedule.warmup_steps=1", "validation.interval=2", "validation.samples=2",
    "checkpoint.interval=2", "logging.progress=false", "data.sequence_length=32",
    "data.shuffle_samples=8",
)  # fmt: skip
ALONE = ("parallel.tensor=1", "parallel.sequence=false")
STAGES = ("parallel.tensor=1", "parallel.sequence=false", "parallel.pipeline=2")


@pytest.fixture(scope="module")
def llamas(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llamas of 16 and 32 layers, the depths of 3.2 1B and 3.1 8B, and two widths."""
    folder = tmp_path_factory.mktemp("models")
    for name, layers, width in (("1B", 16, 16), ("8B", 32, 32)):
        save_model(
            folder / name, "llama3.1", num_hidden_layers=layers, hidden_size=width,
            intermediate_size=48, head_dim=8, vocab_size=301,
        )  # fmt: skip
        pool.run(1, give_tokenizer, inputs.tokenizer, folder / name)
    return folder


@pytest.fixture(scope="module")
def qwens(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two Qwens with the tokenizer and the chat template of Qwen 2.5, padded unequally."""
    folder = tmp_path_factory.mktemp("models")
    (size,) = pool.run(1, write_chat_tokenizer, folder / "tokenizer")
    for name, layers, rows in (("1.5B", 2, size + 27), ("7B", 3, size + 40)):
        save_model(
            folder / name, "qwen2", num_hidden_layers=layers, vocab_size=rows,
            max_position_embeddings=160,
        )  # fmt: skip
        pool.run(1, give_tokenizer, folder / "tokenizer", folder / name)
    return folder


@pytest.fixture(scope="module")
def other_qwen(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen whose folder has another tokenizer than the Llamas', and rows beyond its tokens."""
    folder = tmp_path_factory.mktemp("models") / "qwen"
    size = max(SECOND_SIZES)
    save_model(folder, "qwen2", vocab_size=size + 27)
    pool.run(1, give_tokenizer, inputs.second_tokenizer(size), folder)
    return folder


@pytest.fixture(scope="module")
def corpora(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The session's corpus as `.bin/.idx` pairs."""
    folder = tmp_path_factory.mktemp("corpora")
    pool.run(1, write_corpora, inputs, folder)
    return folder


def write_chat_tokenizer(rank: int, world: int, folder: Path) -> int:
    tokenizer = chat_tokenizer("qwen25")
    tokenizer.save(folder)
    return tokenizer.vocab_size


def write_corpora(rank: int, world: int, inputs: Inputs, folder: Path) -> None:
    from tests.support.indexed_corpus import write_indexed

    tokenizer = load_tokenizer(inputs.tokenizer)
    texts = [json.loads(line)["text"] for line in inputs.corpus.read_text().splitlines()]
    documents = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    for name in ("web", "code"):
        write_indexed(folder / name, documents, end=tokenizer.eos_id)


def indexed(corpora: Path) -> tuple[str, ...]:
    """The overrides that put the session's corpus in the place of a configuration's."""
    return (
        f"data.sources.0.paths={corpora / 'web'}",
        f"data.sources.1.paths={corpora / 'code'}",
        f"data.cache={corpora / 'cache'}",
    )


def assert_two_steps(records: list[dict[str, Any]]) -> None:
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert math.isfinite(record["total_loss"])
        assert record["grad_norm"] > 0


@pytest.mark.slow
def test_chat_data_train_responses_alone(pool: Pool, qwens: Path, tmp_path: Path) -> None:
    turns = [
        [
            {"role": "user", "content": f"what is {n}?" + " please" * (n % 5)},
            {"role": "assistant", "content": "it is sunny"},
        ]
        for n in range(80)
    ]
    chat = write_rows(tmp_path / "chat.jsonl", [{"messages": messages} for messages in turns])
    answers = write_rows(
        tmp_path / "answers.jsonl",
        [{"instruction": f"say {n}", "input": "", "output": "sunny there"} for n in range(80)],
    )
    records = run(
        pool, 4, CHAT, tmp_path / "run", *HERE, *SHORT, "data.sequence_length=160",
        f"student.hf={qwens / '1.5B'}", f"teacher.hf={qwens / '7B'}",
        f"data.sources.0.paths={chat}", f"data.sources.1.paths={answers}",
        "data.validation_fraction=0.1",
    )  # fmt: skip
    assert_two_steps(records)
    for record in records:
        trained = sum(source["ce_tokens"] for source in record["sources"].values())
        assert 0 < trained < record["tokens"] / 2
        assert record["sources"].keys() == {"chat", "answers"}
        assert record["kd_loss"] > 0


@pytest.mark.slow
def test_a_pruned_student_learns_from_the_store_of_its_capture(
    pool: Pool, llamas: Path, corpora: Path, tmp_path: Path
) -> None:
    teacher, store = llamas / "8B", tmp_path / "store"
    captured = run_in(
        pool, 2, CAPTURE, store, *HERE, *STAGES, *indexed(corpora), f"teacher.hf={teacher}",
        "store.samples=8", "data.sequence_length=32", "data.shuffle_samples=8",
    )  # fmt: skip
    assert captured is True
    records = run(
        pool, 2, PRUNED, tmp_path / "run", *HERE, *SHORT, "parallel.tensor=2", *indexed(corpora),
        f"student.hf={teacher}", f"teacher.store={store}",
    )  # fmt: skip
    assert_two_steps(records)
    for record in records:
        assert record["forward_kl_top64"] > 0
        assert 0 < record["topk_mass"] <= 1


@pytest.mark.slow
def test_a_llama_of_8b_teaches_one_of_1b_within_its_warm_up(
    pool: Pool, llamas: Path, corpora: Path, tmp_path: Path
) -> None:
    # Nothing of the schedule is changed, which is much longer than the run.
    short = [word for word in SHORT if not word.startswith("schedule.")]
    records = run(
        pool, 4, BOTH, tmp_path / "run", *HERE, *short, "parallel.tensor=2", *indexed(corpora),
        f"data.sources.2.paths={corpora / 'web'}", "data.sources.2.name=math",
        f"data.validation_sources.0.paths={corpora / 'code'}",
        f"student.hf={llamas / '1B'}", f"teacher.hf={llamas / '8B'}",
    )  # fmt: skip
    assert_two_steps(records)
    assert all(record["kd_loss"] > 0 for record in records)
    rates = [record["learning_rate"] for record in records]
    assert rates == pytest.approx([0.0, 2e-4 / 500])


@pytest.mark.slow
def test_features_of_two_sizes_are_projected_and_balanced(
    pool: Pool, inputs: Inputs, llamas: Path, tmp_path: Path
) -> None:
    records = run(
        pool, 1, FEATURES, tmp_path / "run", *HERE, *SHORT, *ALONE,
        f"student.hf={llamas / '1B'}", f"teacher.hf={llamas / '8B'}",
        f"data.sources.0.paths={inputs.corpus}",
    )  # fmt: skip
    assert_two_steps(records)
    for record in records:
        assert record["feature_mse_16_32"] > 0
        assert sum(name.startswith("feature_cosine_") for name in record) == 16
        assert record["projector_grad_norm"] > 0
        assert record["balance"]["kd_scale"] > 0
        assert record["balance"]["feature_scale"] > 0


@pytest.mark.slow
def test_a_qwen_teaches_a_llama_that_leaves_with_its_own_tokenizer(
    pool: Pool, inputs: Inputs, llamas: Path, other_qwen: Path, tmp_path: Path
) -> None:
    output, student = tmp_path / "run", llamas / "1B"
    changes = (
        *HERE, *SHORT, "parallel.tensor=2", "teacher.sequence_length=40",
        f"student.hf={student}", f"teacher.hf={other_qwen}",
        f"data.sources.0.paths={inputs.corpus}", "data.validation_fraction=0.1",
    )  # fmt: skip
    records = run(pool, 2, TOKENIZERS, output, *changes)
    assert_two_steps(records)
    for record in records:
        assert record["common_forward_kl"] == pytest.approx(record["kd_loss"])
        assert record["kd_loss"] > 0
        assert record["chunks"] > 0
        assert record["coverage"]["student_bytes"] > 0.8
        assert record["coverage"]["teacher_bytes"] > 0.8
    words = ("export", "--checkpoint", output, "--hf", tmp_path / "out")
    ending = call_alone(pool, ROOT / "tools" / "convert_checkpoint.py", *words)
    assert ending.status == 0, ending.stderr
    exported = reference(tmp_path / "out")
    assert exported.config.vocab_size == reference(student).config.vocab_size == 301
    assert load_tokenizer(tmp_path / "out").identity == load_tokenizer(student).identity
    assert load_tokenizer(other_qwen).identity != load_tokenizer(student).identity


@pytest.mark.slow
def test_the_commands_of_the_page_on_two_tokenizers_work_on_that_run(
    pool: Pool, inputs: Inputs, llamas: Path, other_qwen: Path, tmp_path: Path
) -> None:
    models = (f"student.hf={llamas / '1B'}", f"teacher.hf={other_qwen}")
    changes = (
        *HERE, *SHORT, *ALONE, "teacher.sequence_length=40", *models, f"output={tmp_path / 'run'}",
        f"data.sources.0.paths={inputs.corpus}", "data.validation_fraction=0.1",
    )  # fmt: skip
    ending = call_alone(
        pool, ROOT / "tools" / "preview_data.py", TOKENIZERS, *changes,
        *("--samples", 1, "--counted", 4, "--chunks", 6, "--width", 100),
    )  # fmt: skip
    assert ending.status == 0, ending.stderr
    assert "in chunks, student" in ending.stdout
    path = tmp_path / "map.safetensors"
    sides = ("--student", llamas / "1B", "--teacher", other_qwen)
    for words in (("build", *sides, "--output", path), ("verify", path, *sides)):
        ending = call_alone(pool, ROOT / "tools" / "vocabulary_map.py", *words)
        assert ending.status == 0, ending.stderr
    run(pool, 1, TOKENIZERS, tmp_path / "run", *changes)
    write_rows(tmp_path / "rows.jsonl", [{"text": "def parse(self, text):\n    return text"}] * 3)
    task, measured = tmp_path / "held_out.yaml", tmp_path / "results.json"
    task.write_text(f"base: text\nfolder: {tmp_path}\nfiles: ['rows.jsonl']\n")
    ending = call_alone(
        pool, ROOT / "launch" / "evaluate.py", tmp_path / "run",
        *("--tasks", task, "--teacher", "--json", measured),
    )  # fmt: skip
    assert ending.status == 0, ending.stderr
    found = bits_per_byte(json.loads(measured.read_text()))
    assert len(found) == 2
    assert all(0 < value < 100 for value in found)


def bits_per_byte(results: dict[str, Any]) -> list[float]:
    """The measure of each model, wherever it stands, differences between models apart."""
    found: list[float] = []
    for name, value in results.items():
        if name == "bits_per_byte":
            found.append(value)
        elif isinstance(value, dict) and "minus" not in name:
            found += bits_per_byte(value)
    return found


@pytest.mark.slow
def test_two_teachers_train_their_sources_and_a_mean_of_them(
    pool: Pool, llamas: Path, corpora: Path, tmp_path: Path
) -> None:
    records = run(
        pool, 2, TEACHERS, tmp_path / "run", *HERE, *SHORT, "train.precision=fp32",
        *indexed(corpora), f"student.hf={llamas / '1B'}", f"teachers.prose.hf={llamas / '8B'}",
        f"teachers.code.hf={llamas / '1B'}", "train.micro_batch_size=1",
        "data.validation_fraction=0.1",
    )  # fmt: skip
    assert_two_steps(records)
    for record in records:
        teachers = record["teachers"]
        assert set(teachers) == {"prose", "code", "code+prose"}
        labels = teachers["code+prose"]["kd_tokens"]
        assert teachers["prose"]["kd_tokens"] + teachers["code"]["kd_tokens"] == labels > 0
        assert teachers["prose"]["kd_loss"] > 0
        assert record["reverse_kl_code0.3_prose0.7"] > 0
        assert set(record["sources"]) == {"web", "code"}
