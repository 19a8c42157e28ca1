"""An error of a conversion ends both ranks with one message, and nothing is written."""

from __future__ import annotations

import json
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.hugging_face_models import stored_tensors
from tests.distributed.pool import Pool
from tests.e2e.conversion.test_conversion_stopped import commands
from tests.e2e.converting import convert
from tests.e2e.failing import message
from tests.support.store_samples import contents


@pytest.fixture(scope="module")
def made(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as `transformers` writes it in hf/, and its checkpoint in checkpoint/."""
    root = tmp_path_factory.mktemp("made")
    commands(pool, root)
    return root


@pytest.fixture
def checkpoint(made: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to be damaged."""
    return Path(shutil.copytree(made / "checkpoint", tmp_path / "checkpoint"))


def refused(pool: Pool, folder: Path, *words: object, **how: int) -> str:
    """Convert what must be refused; return the message, having looked that nothing was written."""
    before = sorted(folder.rglob("*")), contents(folder)
    text = message(convert(pool, *words, **how))  # type: ignore[arg-type]
    assert (sorted(folder.rglob("*")), contents(folder)) == before
    return text


def exported(pool: Pool, checkpoint: Path, *words: object) -> str:
    output = checkpoint.parent / "out"
    return refused(
        pool, checkpoint.parent, "export", "--checkpoint", checkpoint, "--hf", output, *words
    )


def describe_as(**architecture: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "description.json"
        description = json.loads(path.read_text())
        description["architecture"] |= architecture
        path.write_text(json.dumps(description))

    return change


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def fill(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


METADATA, SHARD, DESCRIPTION = ".metadata", "__1_0.distcp", "description.json"
WORDS = "embedding.word_embeddings.weight"
# what happens to a checkpoint -> what the message must hold
DAMAGED: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no metadata": (lambda f: (f / METADATA).unlink(), (METADATA, "is missing")),
    "cut metadata": (cut(METADATA, 999), (METADATA, "damaged")),
    "another object": (fill(METADATA, pickle.dumps({"a": 1})), (METADATA, "damaged")),
    "an object that only looks alike": (
        fill(METADATA, pickle.dumps(Namespace(storage_meta=None, storage_data={}))),
        (METADATA, "it contains Namespace"),
    ),
    "a shard gone": (lambda f: (f / SHARD).unlink(), ("is damaged", SHARD)),
    "a cut shard": (cut(SHARD, 5000), ("is damaged",)),
    "no description": (lambda f: (f / DESCRIPTION).unlink(), ("no complete checkpoint",)),
    "cut description": (cut(DESCRIPTION, 30), (DESCRIPTION, "damaged")),
    "another width": (describe_as(hidden_size=40), (WORDS, "[203, 32]", "[203, 40]")),
    "biases": (describe_as(qkv_bias=True), ("has no tensor", "linear_qkv.bias")),
    "another release": (describe_as(wings=2), ("another release", "wings")),
    "no architecture": (
        lambda f: (f / DESCRIPTION).write_text(
            json.dumps(json.loads((f / DESCRIPTION).read_text()) | {"architecture": 3})
        ),
        (DESCRIPTION, "damaged"),
    ),
    "the original's configuration": (
        fill("hugging_face/config.json", b"{"), ("hugging_face/config.json", "damaged")
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_checkpoint_is_named(pool: Pool, checkpoint: Path, case: str) -> None:
    damage, parts = DAMAGED[case]
    damage(checkpoint)
    text = exported(pool, checkpoint)
    assert str(checkpoint) in text
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "place",
    [
        "iter_0000010/mp_rank_00/model_optim_rng.pt", "mp_rank_00_000/model_rng.pt", "model.pt",
    ],
)  # fmt: skip
def test_a_pickle_is_refused_unopened(pool: Pool, tmp_path: Path, place: str) -> None:
    path = tmp_path / "checkpoint" / place
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    folder = tmp_path / "checkpoint"
    text = exported(pool, folder)
    assert f"{path} is a pickle" in text
    assert "refused" in text
    output = tmp_path / "out"
    named = refused(pool, tmp_path, "export", "--checkpoint", path, "--hf", output)
    assert named == text


WRONG_WORDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "float64": (("--dtype", "float64"), ("--dtype float64", "bfloat16")),
    "a size of words": (("--max-shard-size", "large"), ("--max-shard-size large", "5GB")),
    "nothing": (("--max-shard-size", "0"), ("--max-shard-size 0",)),
    "unknown family": (("--family", "bloom"), ("--family bloom", "gpt2, llama")),
    "another family": (("--family", "gpt2"), ("gpt2: ", "norm 'layernorm' vs 'rmsnorm'")),
    "no tokenizer": (("--tokenizer", "/proc"), ("--tokenizer /proc", "no tokenizer files")),
}


@pytest.mark.parametrize("case", WRONG_WORDS)
def test_a_wrong_request_is_named(pool: Pool, made: Path, tmp_path: Path, case: str) -> None:
    words, parts = WRONG_WORDS[case]
    checkpoint = made / "checkpoint"
    output = tmp_path / "out"
    text = refused(
        pool, tmp_path, "export", "--checkpoint", checkpoint, "--hf", output, *words
    )  # fmt: skip
    for part in parts:
        assert part in text


def test_an_import_of_a_wrong_type_is_named(pool: Pool, made: Path, tmp_path: Path) -> None:
    words = ("import", "--hf", made / "hf", "--output", tmp_path / "out", "--dtype", "float8")
    assert "--dtype float8" in refused(pool, tmp_path, *words)


@pytest.fixture(params=["import", "export"])
def words(request: pytest.FixtureRequest, made: Path) -> tuple[object, ...]:
    """The command up to its output, either way."""
    if request.param == "import":
        return ("import", "--hf", made / "hf", "--output")
    return ("export", "--checkpoint", made / "checkpoint", "--hf")


def test_an_output_is_replaced_only_if_asked(
    pool: Pool, made: Path, tmp_path: Path, words: tuple[object, ...]
) -> None:
    output = tmp_path / "out"
    (output / "inner").mkdir(parents=True)
    (output / "inner" / "notes").write_text("mine")
    text = refused(pool, tmp_path, *words, output)
    assert f"{output} is not empty" in text
    assert "--overwrite" in text
    link = tmp_path / "link"
    link.symlink_to(output)
    endings = convert(pool, *words, link, "--overwrite")
    assert [ending.status for ending in endings] == [0, 0]
    assert link.is_symlink()
    assert not (output / "inner").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out"]
    if words[0] == "export":
        expected, found = stored_tensors(made / "hf"), stored_tensors(output)
        assert all(found[name].equal(value) for name, value in expected.items())


def test_an_output_that_cannot_be_a_folder(
    pool: Pool, tmp_path: Path, words: tuple[object, ...]
) -> None:
    (tmp_path / "file").write_text("mine")
    file = tmp_path / "file"
    assert f"{file} is a file" in refused(pool, tmp_path, *words, file, "--overwrite")
    below = refused(pool, tmp_path, *words, file / "out")
    assert f"cannot write {file}/out: Not a directory" in below
    assert "name another folder" in below
    for output in ("/proc/out", "/"):
        assert "folder" in refused(pool, tmp_path, *words, output, "--overwrite")


def test_a_source_is_not_replaced_by_its_own_conversion(
    pool: Pool, made: Path, words: tuple[object, ...]
) -> None:
    for output in (words[2], made):
        text = refused(pool, made, *words, output, "--overwrite")
        assert f"{output} is or contains the source {words[2]}" in text


def test_too_little_space_is_found_before_anything_is_written(
    pool: Pool, tmp_path: Path, words: tuple[object, ...]
) -> None:
    text = refused(pool, tmp_path, *words, tmp_path / "out", free=100_000)
    assert f"no space left for {tmp_path}/out" in text
    assert " MB and 100 kB are free" in text


@pytest.mark.parametrize("failing", [0, 1])
def test_a_disk_that_fills_up_on_one_rank_ends_both(
    pool: Pool, tmp_path: Path, words: tuple[object, ...], failing: int
) -> None:
    output = tmp_path / "out"
    output.mkdir()
    (output / "notes").write_text("mine")
    cap = ("--max-shard-size", "60KB") if words[0] == "export" else ()
    before = contents(tmp_path)
    endings = convert(pool, *words, output, "--overwrite", *cap, limits={failing: 20_000})
    text = message(endings)
    assert f"writing {output} failed" in text
    assert "File too large" in text
    assert f"rank {failing}" in text
    assert contents(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_source_that_is_damaged_is_not_called_a_failure_to_write(
    pool: Pool, made: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made / "hf", tmp_path / "hf"))
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])
    text = refused(pool, tmp_path, "import", "--hf", folder, "--output", tmp_path / "out")
    assert f"{folder}/model.safetensors is truncated or damaged" in text
    assert "writing" not in text


def test_leftovers_of_a_killed_start_are_removed(
    pool: Pool, tmp_path: Path, words: tuple[object, ...]
) -> None:
    output, partial, aside = (tmp_path / name for name in ("out", "out.partial", "out.old.partial"))
    for folder in (partial, aside):  # killed between the two renames
        folder.mkdir()
        (folder / "notes").write_text("mine")
    text = message(convert(pool, *words, output))
    assert f"{output} is not empty" in text
    assert [path.name for path in output.iterdir()] == ["notes"], "it has its name again"
    aside.mkdir()  # killed while the old content was removed
    (aside / "notes").write_text("mine")
    endings = convert(pool, *words, output, "--overwrite")
    assert [ending.status for ending in endings] == [0, 0], endings
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (output / "notes").exists()


@pytest.mark.parametrize(
    ("world", "option", "part"),
    [
        (2, (), "leave torchrun out"),
        (1, ("--tokens", "0"), "--tokens 0: compare at least 1"),
        (1, ("--sequences=-1",), "--sequences -1: compare at least 1"),
        (1, ("--tokens", "65"), "--tokens 65: the model has 64 positions"),
    ],
)
def test_a_comparison_that_cannot_be_made(
    pool: Pool, made: Path, world: int, option: tuple[str, ...], part: str
) -> None:
    for other in (("--checkpoint", made / "checkpoint"), ("--against", made / "hf")):
        words = ("verify", "--hf", made / "hf", *other, *option)
        assert part in refused(pool, made, *words, world=world)


def test_a_damaged_tokenizer_is_named(pool: Pool, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "hf", tmp_path / "hf"))
    (folder / "tokenizer.json").write_text("{")
    text = refused(pool, tmp_path, "import", "--hf", folder, "--output", tmp_path / "out")
    assert str(folder) in text
