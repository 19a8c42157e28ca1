"""A checkpoint compared with the folder that came out of it, in the dtypes that the files have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.hugging_face_models import save_model
from tests.distributed.pool import Pool
from tests.e2e.converting import convert


def call(pool: Pool, *words: object, world: int = 1) -> tuple[int, str, str]:
    """The first rank's status, output and errors."""
    first, *others = convert(pool, *words, world=world)
    assert not any(ending.stdout for ending in others), "only the first rank reports"
    return first.status, first.stdout, first.stderr


@pytest.fixture(scope="module")
def checkpoint(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a model in fp32."""
    root = tmp_path_factory.mktemp("verified")
    save_model(root / "hf", "qwen3")
    assert call(pool, "import", "--hf", root / "hf", "--output", root / "checkpoint")[0] == 0
    return root / "checkpoint"


def verified(pool: Pool, folder: Path, checkpoint: Path) -> tuple[int, dict[str, str]]:
    status, text, errors = call(pool, "verify", "--hf", folder, "--checkpoint", checkpoint)
    assert ("are not the same model" in errors) == (status == 1)
    lines = dict(line.split(maxsplit=1) for line in text.splitlines() if line[0] != " ")
    return status, lines


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_export_is_the_same_model_in_its_own_dtype(
    pool: Pool, checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    words = ("export", "--checkpoint", checkpoint, "--hf", tmp_path / "out", "--dtype", dtype)
    assert call(pool, *words)[0] == 0
    status, lines = verified(pool, tmp_path / "out", checkpoint)
    assert status == 0, lines
    rounded = f"files {dtype}, checkpoint float32; compared in the files' dtype"
    assert lines["dtypes"] == ("float32 on both sides" if dtype == "float32" else rounded)
    count = lines["tensors"].split()[0]
    assert lines["tensors"] == f"{count} of {count} are equal bit for bit"
    assert lines["verdict"] == "the same model"


def test_files_of_several_dtypes_are_compared_tensor_by_tensor(
    pool: Pool, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert call(pool, "export", "--checkpoint", checkpoint, "--hf", out)[0] == 0
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        # Norms stay, one layer is rounded otherwise than the others.
        if "norm" not in name:
            other = torch.float16 if ".layers.1." in name else torch.bfloat16
            tensors[name] = tensor.to(other)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    status, lines = verified(pool, out, checkpoint)
    assert status == 0, lines
    assert lines["dtypes"].startswith("files bfloat16 and float16 and float32, checkpoint")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_another_model_is_another_in_any_dtype(
    pool: Pool, checkpoint: Path, tmp_path: Path, dtype: str
) -> None:
    out = tmp_path / "out"
    call(pool, "export", "--checkpoint", checkpoint, "--hf", out, "--dtype", dtype)
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.2.mlp.down_proj.weight"
    tensors[name].view(torch.int16)[3, 5] ^= 1  # the last bit of one number, or close to it
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    status, lines = verified(pool, out, checkpoint)
    assert status == 1
    assert lines["verdict"] == "NOT the same model"
    total = int(lines["tensors"].split()[2])
    assert lines["tensors"] == f"{total - 1} of {total} are equal bit for bit"


def test_conversions_print_their_files(pool: Pool, checkpoint: Path, tmp_path: Path) -> None:
    out, back = tmp_path / "out", tmp_path / "back"
    words = ("export", "--checkpoint", checkpoint, "--hf", out, "--dtype", "bfloat16")
    _, reported, _ = call(pool, *words, "--max-shard-size", "20KB", world=2)
    tensors = [load_file(file) for file in out.glob("*.safetensors")]
    count = sum(tensor.numel() for file in tensors for tensor in file.values())
    assert reported.splitlines() == [
        f"wrote {out}: qwen3, bfloat16, {count:,} parameters, {2 * count / 1e3:.3g} kB in "
        f"{len(tensors)} files",
        f"text from it: python launch/generate.py --hf {out}",
        f"compare it: python tools/convert_checkpoint.py verify --hf {out} --checkpoint "
        f"{checkpoint}",
    ]
    _, reported, _ = call(pool, "import", "--hf", out, "--output", back, world=2)
    assert reported.splitlines() == [
        f"wrote {back}: qwen3, bfloat16, {count:,} parameters, {2 * count / 1e3:.3g} kB",
        f"a run starts from it with student.checkpoint={back}",
    ]
