"""Checks without data come before any is read, and a start that fails leaves nothing behind.

The corpus of every case has a broken row, which a start that reads it reports.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.distributed.hugging_face_models import save_model
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.failing import call_alone
from tests.e2e.runs import STUDENT, TEACHER, Inputs, failure, quick_and_slow, run
from tests.e2e.training.test_conversations import SECTIONS, write_chat

ROOT = Path(__file__).parents[3]
SHORT = ("train.steps=2", "schedule.warmup_steps=1")
BROKEN_ROW = "message 0 has the role 'usr'"


def write_broken(path: Path) -> Path:
    """Conversations, the last of which cannot be read."""
    write_chat(path, weights=False)
    with path.open("a") as stream:
        stream.write('{"messages": [{"role": "usr", "content": "a"}]}\n')
    return path


def other_tokenizer(rank: int, world: int, folder: Path) -> None:
    """Train another tokenizer of as many tokens; to be called in a pool worker."""
    from megatron_distill.data.tokenizers.open import train_bpe

    train_bpe([str(number) * 3 for number in range(4000)], vocab_size=301).save(folder)


@pytest.fixture(scope="module")
def models(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders by what is wrong with them: `sound` with nothing."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"sound": 301, "small": 203}
    for name, size in sizes.items():
        save_model(folder / name, "llama2", vocab_size=size, num_key_value_heads=2)
    shutil.copytree(folder / "sound", folder / "foreign")
    described = json.loads((folder / "foreign" / "config.json").read_text())
    (folder / "foreign" / "config.json").write_text(json.dumps(described | {"model_type": "bloom"}))
    shutil.copytree(folder / "sound", folder / "cut")
    weights = next((folder / "cut").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:2000])
    shutil.copytree(folder / "sound", folder / "worded")
    pool.run(1, other_tokenizer, folder / "words")
    shutil.copytree(folder / "words", folder / "worded", dirs_exist_ok=True)
    write_broken(folder / "broken.jsonl")
    return folder


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    return inputs.write("order", STUDENT, TEACHER)


TEACHER_HF = "teacher={{architecture: null, hf: {models}/%s}}"
STUDENT_HF = "student={{architecture: null, hf: {models}/%s}}"
NO_TOKENIZER = "data.tokenizer.path=null"
WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no teacher": ((TEACHER_HF % "none",), r"{models}/none/config\.json: no such file"),
    "no teacher, its tokenizer": (
        (TEACHER_HF % "none", NO_TOKENIZER), r"{models}/none/config\.json: no such file",
    ),
    "no student, its tokenizer": (
        (STUDENT_HF % "none", NO_TOKENIZER), r"{models}/none/config\.json: no such file",
    ),
    "no checkpoint": (
        ("student={{architecture: null, checkpoint: {models}/none}}",),
        "{models}/none contains no complete checkpoint",
    ),
    "no teacher's checkpoint": (
        ("teacher={{architecture: null, checkpoint: {models}/none}}",),
        "{models}/none contains no complete checkpoint",
    ),
    "family": ((TEACHER_HF % "foreign",), "model_type 'bloom' is not supported"),
    "damaged weights": ((TEACHER_HF % "cut",), r"{models}/cut/.*\.safetensors"),
    "vocabularies": (
        ("teacher.architecture.vocab_size=300",),
        r"teacher\.architecture\.vocab_size is 300, but the tokenizer has 301",
    ),
    "too small a vocabulary": (
        (STUDENT_HF % "small",),
        r"student\.hf = '{models}/small': its vocabulary has 203 tokens, but the tokenizer has 301",
    ),
    "tokenizer": ((TEACHER_HF % "worded",), "its tokenizer encodes .* data.tokenizer as"),
    "the student's tokenizer": (
        (STUDENT_HF % "worded",), r"student\.hf = '{models}/worded': its tokenizer encodes",
    ),
    "heads": (
        ("parallel.tensor=2", "student.architecture.ffn_hidden_size=49"),
        r"ffn_hidden_size = 49",
    ),
    "layers": (
        (STUDENT_HF % "sound", "student.num_layers=9"),
        "num_layers = 9: the source has only 3 layers",
    ),
    "a layer that is not there": (
        (STUDENT_HF % "sound", "student.keep_layers=[0,3]"),
        r"student\.keep_layers = \[0, 3\].*3 layers, 0 to 2,",
    ),
    "layers of two stages": (
        (STUDENT_HF % "sound", "student.num_layers=1", "parallel.pipeline=2"),
        r"parallel\.pipeline = 2: more stages than student.*num_layers = 1",
    ),
    "top k": (
        ("objective.terms=[{{divergence: forward_kl, top_k: 500}}]",),
        r"objective\.terms\.0\.top_k is 500, but the vocabulary has 301",
    ),
    "feature layers": (
        ("objective.features=[{{student: 9, teacher: 1, loss: mse, weight: 1.0}}]",), "layer",
    ),
    "no store": (
        ("teacher={{architecture: null, store: {models}/none}}",), "no teacher store found",
    ),
    "no file": (
        ("data.validation_sources=[{{format: jsonl, paths: {models}/none.jsonl}}]",),
        "{models}/none.jsonl",
    ),
    "no second file": (
        (
            "data.sources=[{{format: jsonl, paths: {models}/broken.jsonl, conversation: "
            "{{chat_template: plain}}}}, {{format: jsonl, paths: {models}/none.jsonl}}]",
        ),
        "{models}/none.jsonl",
    ),
    "no template": (
        (
            "data.sources=[{{format: jsonl, paths: {models}/broken.jsonl, conversation: "
            "{{chat_template: {models}/none.jinja}}}}]",
        ),
        "{models}/none.jinja: cannot be read",
    ),
}  # fmt: skip


QUICK = ("no teacher", "no student, its tokenizer", "family", "vocabularies",
         "too small a vocabulary", "tokenizer",
         "heads", "a layer that is not there", "no store", "no second file")  # fmt: skip


@pytest.mark.parametrize("case", quick_and_slow(WRONG, QUICK))
def test_problems_that_need_no_data_are_reported_before_any_is_read(
    pool: Pool, config: Path, models: Path, tmp_path: Path, case: str
) -> None:
    overrides, expected = WRONG[case]
    chat = SECTIONS.format(corpus=models / "broken.jsonl")
    given = [word.format(models=models) for word in overrides]
    text = failure(pool, 2, config, tmp_path / "new" / "run", *SHORT, chat, *given)
    assert re.search(expected.format(models=re.escape(str(models))), text), text
    assert BROKEN_ROW not in text
    assert list(tmp_path.iterdir()) == []


def everything(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of all files of a folder; the lock file's own is of no interest."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.mark.slow
def test_a_folder_that_was_there_is_as_it_was(
    pool: Pool, inputs: Inputs, config: Path, models: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run(pool, 2, config, output, *SHORT, "checkpoint.save=true")
    before = everything(output)
    broken = SECTIONS.format(corpus=models / "broken.jsonl")
    assert "no such file" in failure(
        pool, 2, config, output, *SHORT, broken, (TEACHER_HF % "none").format(models=models)
    )
    assert everything(output) == before
    # Of another model than the one that is there: refused before the data, too.
    other = "student.architecture.num_layers=2"
    text = failure(pool, 2, config, output, *SHORT, broken, other, "checkpoint.save=true")
    assert "is a checkpoint of another model" in text
    for save in ("true", "false"):  # without a save the metrics and settings would go all the same
        off = (f"checkpoint.save={save}", "checkpoint.resume=false")
        assert "of an earlier run exists" in failure(pool, 2, config, output, *SHORT, broken, *off)
    assert BROKEN_ROW in failure(pool, 2, config, output, *SHORT, broken, "train.steps=4")
    left = {name: content for name, (content, _) in everything(output).items()}
    assert left == {name: content for name, (content, _) in before.items()}


def test_a_start_that_its_data_ends_leaves_no_folder(
    pool: Pool, config: Path, models: Path, tmp_path: Path
) -> None:
    broken = SECTIONS.format(corpus=models / "broken.jsonl")
    saving = ("checkpoint.save=true", "logging.tensorboard=true")
    assert BROKEN_ROW in failure(pool, 2, config, tmp_path / "a" / "b", *SHORT, broken, *saving)
    assert list(tmp_path.iterdir()) == []
    trained = ("data.tokenizer={path: null, train_vocab_size: 280}",)
    assert BROKEN_ROW in failure(pool, 1, config, tmp_path / "a", *SHORT, broken, *trained)
    assert list(tmp_path.iterdir()) == []


def test_prepared_data_stay_where_another_source_is_broken(
    pool: Pool, config: Path, models: Path, tmp_path: Path
) -> None:
    sound = write_chat(tmp_path / "sound.jsonl", weights=False)
    one = "{{format: jsonl, paths: {path}, conversation: {{chat_template: plain}}}}"
    both = ", ".join(one.format(path=path) for path in (sound, models / "broken.jsonl"))
    output = tmp_path / "run"
    assert BROKEN_ROW in failure(pool, 2, config, output, *SHORT, f"data.sources=[{both}]")
    assert [path.name for path in output.iterdir()] == ["cache"]
    (kept,) = (output / "cache").iterdir()
    changed = (kept / "tokens").stat().st_mtime_ns
    chat = f"data.sources=[{one.format(path=sound)}]"
    assert len(run(pool, 2, config, output, *SHORT, chat)) == 2
    assert (kept / "tokens").stat().st_mtime_ns == changed


CAPTURE_WRONG: dict[str, tuple[tuple[str, ...], str]] = {
    "no teacher": ((TEACHER_HF % "none",), r"{models}/none/config\.json: no such file"),
    "family": ((TEACHER_HF % "foreign",), "model_type 'bloom' is not supported"),
    "tokenizer": ((TEACHER_HF % "worded",), "its tokenizer encodes"),
    "k": (("store.k=500",), r"store\.k = 500: the tokenizer has 301"),
    "the data": ((), BROKEN_ROW),
}


@pytest.mark.parametrize("case", CAPTURE_WRONG)
def test_a_capture_that_fails_at_its_start_leaves_no_store(
    pool: Pool, inputs: Inputs, models: Path, tmp_path: Path, case: str
) -> None:
    overrides, expected = CAPTURE_WRONG[case]
    config = write_capture(inputs, "order-capture", samples=8, per_shard=4)
    chat = SECTIONS.format(corpus=models / "broken.jsonl")
    given = [word.format(models=models) for word in overrides]
    text = run_in(pool, 2, config, tmp_path / "stores" / "a", chat, *given)
    assert re.search(expected.format(models=re.escape(str(models))), str(text)), text
    assert list(tmp_path.iterdir()) == []
    if case == "the data":
        # Nothing of the broken corpus is left in the way of the mended one.
        sound = write_chat(tmp_path / "sound.jsonl", weights=False)
        mended = SECTIONS.format(corpus=sound)
        assert run_in(pool, 2, config, tmp_path / "stores" / "a", mended) is True


PREVIEW = ROOT / "tools" / "preview_data.py"


@pytest.mark.parametrize("case", ["layers of two stages", "no second file"])
def test_a_preview_reports_it_too(
    pool: Pool, config: Path, models: Path, tmp_path: Path, case: str
) -> None:
    chat = SECTIONS.format(corpus=models / "broken.jsonl")
    words = (config, f"output={tmp_path / 'new' / 'run'}", *SHORT, chat)
    overrides, expected = WRONG[case]
    found = call_alone(pool, PREVIEW, *words, *(word.format(models=models) for word in overrides))
    assert found.status == 1
    assert re.search(expected.format(models=re.escape(str(models))), found.stderr), found.stderr
    assert BROKEN_ROW not in found.stderr
    # Where the data alone are broken, the folder is not left behind either.
    found = call_alone(pool, PREVIEW, *words)
    assert found.status == 1
    assert BROKEN_ROW in found.stderr
    assert list(tmp_path.iterdir()) == []
