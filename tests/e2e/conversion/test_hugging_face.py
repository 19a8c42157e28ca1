"""A Hugging Face teacher, a student of some of its layers, and the folder that comes out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from tests.distributed.hugging_face_models import reference, save_model, stored_tensors
from tests.distributed.pool import Pool
from tests.e2e.runs import Inputs, assembled, assert_same_course, run

KEPT = [0, 1, 4]
SAVE = ("checkpoint.save=true", "train.steps=3", "schedule.warmup_steps=1")


@pytest.fixture(scope="module")
def source(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma-3-like model of five layers with the session's tokenizer."""
    folder = tmp_path_factory.mktemp("hf") / "source"
    (size,) = pool.run(1, vocabulary_size, inputs.tokenizer)
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    save_model(folder, "gemma3", num_hidden_layers=5, layer_types=kinds, vocab_size=size)
    pool.run(1, give_tokenizer, inputs.tokenizer, folder)
    return folder


def vocabulary_size(rank: int, world: int, tokenizer: Path) -> int:
    from megatron_distill.data.tokenizers.open import load_tokenizer

    return load_tokenizer(tokenizer).vocab_size


def give_tokenizer(rank: int, world: int, tokenizer: Path, folder: Path) -> None:
    from megatron_distill.models.hugging_face.assets import copy_tokenizer

    copy_tokenizer(tokenizer, folder)


def configuration(inputs: Inputs, source: Path) -> Path:
    """Student and teacher from the folder; the tokenizer is the folder's, too."""
    student = f"student:\n  hf: {source}\n  keep_layers: {KEPT}\n"
    return inputs.write(f"hf_{source.parent.name}", student, f"teacher:\n  hf: {source}\n")


def export(rank: int, world: int, run_folder: Path, output: Path) -> None:
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.convert.convert import export_checkpoint

    export_checkpoint(
        str(run_folder), output, dtype=None, max_shard_size="5GB", family=None, tokenizer=None,
        overwrite=False,
    )  # fmt: skip


def saved_at_once(rank: int, world: int, config: Path, overrides: list[str]) -> None:
    """Assemble a training and save its student before the first step."""
    with assembled(rank, world, config, overrides) as (_, parts):
        parts.state.save(parts.loader)


def only(tensors: dict[str, Tensor], layers: list[int]) -> dict[str, Tensor]:
    """The tensors of some layers, counted anew, and those of none."""
    found = {name: value for name, value in tensors.items() if ".layers." not in name}
    for new, layer in enumerate(layers):
        old = f"model.layers.{layer}."
        found |= {
            name.replace(old, f"model.layers.{new}."): value
            for name, value in tensors.items()
            if name.startswith(old)
        }
    return found


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        ((), KEPT),
        pytest.param(
            ("student.keep_layers=null", "student.num_layers=2"), [0, 4], marks=pytest.mark.slow
        ),
    ],
)
def test_a_student_starts_with_the_layers_it_was_asked_for(
    pool: Pool,
    inputs: Inputs,
    source: Path,
    tmp_path: Path,
    ask: tuple[str, ...],
    expected: list[int],
) -> None:
    overrides = [f"output={tmp_path / 'run'}", "data.tokenizer.path=null", *SAVE, *ask]
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    pool.run(4, saved_at_once, configuration(inputs, source), [*overrides, *layout])
    pool.run(1, export, tmp_path / "run", tmp_path / "out")
    given, found = only(stored_tensors(source), expected), stored_tensors(tmp_path / "out")
    assert found.keys() == given.keys()
    assert all(found[name].equal(value) for name, value in given.items())
    config = reference(tmp_path / "out").config
    kinds = reference(source).config.layer_types
    assert config.layer_types == [kinds[layer] for layer in expected]


@pytest.mark.slow
def test_a_whole_student_equals_its_teacher_at_first_and_leaves_with_everything(
    pool: Pool, inputs: Inputs, source: Path, tmp_path: Path
) -> None:
    config = configuration(inputs, source)
    whole = (*SAVE, "student.keep_layers=null", "parallel.tensor=2")
    (first, *_) = run(pool, 2, config, tmp_path / "run", *whole)
    assert first["kd_loss"] == 0.0
    assert first["top1_agreement"] == 1.0
    pool.run(2, export, tmp_path / "run", tmp_path / "out")
    model = reference(tmp_path / "out")
    assert model.config.eos_token_id == reference(source).config.eos_token_id
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    moved = stored_tensors(tmp_path / "out")
    assert not all(moved[name].equal(value) for name, value in stored_tensors(source).items())


def import_folder(rank: int, world: int, folder: Path, output: Path) -> None:
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.convert.convert import import_checkpoint

    import_checkpoint(folder, output, dtype=None, overwrite=False)


@pytest.mark.slow
def test_an_imported_checkpoint_serves_as_the_folder_does(
    pool: Pool, inputs: Inputs, source: Path, tmp_path: Path
) -> None:
    pool.run(2, import_folder, source, tmp_path / "imported")
    config = configuration(inputs, source)
    checkpoint = tmp_path / "imported"
    roles = ("student", "teacher")
    given = (f"{role}={{hf: null, checkpoint: {checkpoint}}}" for role in roles)
    settings = ("train.steps=2", "schedule.warmup_steps=1")
    from_folder = run(pool, 1, config, tmp_path / "a", *settings)
    imported = run(pool, 2, config, tmp_path / "b", *settings, *given, "parallel.pipeline=2")
    assert_same_course(imported, from_folder, ["kd_loss"], first=2e-5, last=2e-5)


def test_bf16_training_takes_fp32_weights(
    pool: Pool, inputs: Inputs, source: Path, tmp_path: Path
) -> None:
    settings = (*SAVE, "train.precision=bf16", "train.steps=1", "schedule.warmup_steps=0")
    run(pool, 1, configuration(inputs, source), tmp_path / "run", *settings)
    pool.run(1, export, tmp_path / "run", tmp_path / "out")
    assert {value.dtype for value in stored_tensors(tmp_path / "out").values()} == {torch.bfloat16}
