"""A run whose model cannot come from where it is said ends all ranks with one message.

Regimes: more layers than there are; key and value heads that the tensor ranks cannot share; another
tokenizer than the model's; a folder that is no model.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed.hugging_face_models import save_model
from tests.distributed.pool import Pool
from tests.e2e.failing import call, message
from tests.e2e.runs import Inputs

SHORT = ("train.steps=4", "schedule.warmup_steps=1")
PLAIN = ("student.architecture=null", "teacher=null", "objective.terms=[]")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three layers and three groups of heads, with room for every token."""
    return save_model(
        tmp_path_factory.mktemp("saved"), "llama2", vocab_size=301, num_attention_heads=6,
        num_key_value_heads=3, head_dim=8,
    )  # fmt: skip


def said(pool: Pool, inputs: Inputs, tmp_path: Path, folder: Path, *overrides: str) -> str:
    output = tmp_path / "run"
    endings = call(
        pool, inputs.folder / "dense.yaml", output, *SHORT, *PLAIN, f"student.hf={folder}",
        *overrides, world=2,
    )  # fmt: skip
    assert not (output / "metrics.jsonl").exists()
    return message(endings)


WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "more layers": (("student.num_layers=4",), ("student.num_layers = 4", "has only 3 layers")),
    "a layer that is not there": (
        ("student.keep_layers=[0,3]",), ("student.keep_layers = [0, 3]", "3 layers, 0 to 2,"),
    ),
    "heads": (
        ("parallel.tensor=2",),
        ("parallel.tensor = 2", "student", "num_kv_heads = 3", "use 1, 3 or 6"),
    ),
    "stages": (
        ("parallel.pipeline=2", "student.num_layers=1"), ("parallel.pipeline = 2", "num_layers"),
    ),
    "no model": (("student.hf=/nowhere/model",), ("/nowhere/model/config.json: no such file",)),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_source_that_does_not_fit_is_said_once(
    pool: Pool, inputs: Inputs, saved: Path, tmp_path: Path, case: str
) -> None:
    overrides, parts = WRONG[case]
    found = said(pool, inputs, tmp_path, saved, *overrides)
    for part in parts:
        assert part in found


def other_tokenizer(rank: int, world: int, folder: Path) -> None:
    """Train another tokenizer of as many tokens; to be called in a pool worker."""
    from megatron_distill.data.tokenizers.open import train_bpe

    train_bpe([str(number) * 3 for number in range(4000)], vocab_size=301).save(folder)


def test_a_model_with_another_tokenizer_is_said_once(
    pool: Pool, inputs: Inputs, saved: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "hf"))
    pool.run(1, other_tokenizer, tmp_path / "tokenizer")
    shutil.copytree(tmp_path / "tokenizer", folder, dirs_exist_ok=True)
    found = said(pool, inputs, tmp_path, folder)
    assert f"student.hf = '{folder}': its tokenizer encodes" in found
    assert ", data.tokenizer as" in found
