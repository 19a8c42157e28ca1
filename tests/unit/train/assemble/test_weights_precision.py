"""The precision of weights without a run: fp32 on a CPU, 16 bits on a GPU, or as asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_distill.models.hugging_face.assets import weights_dtype
from megatron_distill.train.assemble.trained_config import (
    load_weights,
    weights_on,
    weights_precision,
)

TYPES = ("float32", "float16", "bfloat16", None)


@pytest.mark.parametrize("files", TYPES)
def test_a_cpu_has_fp32_and_a_gpu_sixteen_bits(files: str | None) -> None:
    assert weights_precision("cpu", files, None) == ("fp32", None)
    precision, reason = weights_precision("cuda", files, None)
    assert precision == "bf16"
    assert reason is not None
    assert (reason == "as in its files") == (files == "bfloat16")
    assert files in (None, "bfloat16") or files in reason


@pytest.mark.parametrize("files", TYPES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_precision_that_is_asked_for_wins(device: str, files: str | None) -> None:
    assert weights_precision(device, files, "fp32") == ("fp32", None)
    assert weights_precision(device, files, "bf16") == ("bf16", None)


@pytest.mark.parametrize(
    ("entries", "stored", "found"),
    [
        ({"torch_dtype": "bfloat16"}, None, "bfloat16"),
        ({"dtype": "torch.float16"}, torch.float32, "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, None, "bfloat16"),
        ({"torch_dtype": "auto"}, torch.float16, "float16"),
        ({}, torch.bfloat16, "bfloat16"),
        ({"torch_dtype": None}, torch.float32, "float32"),
        ({}, None, None),
    ],
)
def test_the_type_of_the_files_is_that_of_the_configuration_or_of_a_tensor(
    tmp_path: Path, entries: dict[str, Any], stored: torch.dtype | None, found: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(entries))
    if stored is not None:
        save_file({"a": torch.zeros(2, dtype=stored)}, tmp_path / "model.safetensors")
    assert weights_dtype(tmp_path) == found


def test_a_configuration_takes_it_unless_an_override_names_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    hf = {"hf": str(tmp_path)}
    config = load_weights(hf, [], world_size=1)
    on_cpu, said = weights_on(config, "cpu")
    assert (on_cpu.train.precision, said) == ("fp32", ())
    on_gpu, said = weights_on(config, "cuda")
    assert on_gpu.train.precision == "bf16"
    assert said == (f"{tmp_path}: read in bf16 (as in its files); for fp32 train.precision=fp32",)
    for asked in ("fp32", "bf16"):
        config = load_weights(hf, [f"train.precision={asked}"], world_size=1)
        for device in ("cpu", "cuda"):
            found, said = weights_on(config, device)
            assert (found.train.precision, said) == (asked, ())


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"train": {"precision": "bf16"}}, "as in its files"),
        ({"train": {"precision": "fp32"}}, "float32 in its files"),
        ({}, "an unknown type in its files"),
    ],
)
def test_a_checkpoint_has_the_precision_of_the_run_that_wrote_it(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "description.json").write_text(
        json.dumps(
            {
                "step": 1, "tokens": 1, "bad_steps": 0, "architecture": {}, "tokenizer": "",
                "layout": "", "data": {}, "configuration": settings,
            }
        )
    )  # fmt: skip
    words = ["data.tokenizer.path=mine"]
    config = load_weights({"checkpoint": str(tmp_path)}, words, world_size=1)
    found, (said,) = weights_on(config, "cuda")
    assert found.train.precision == "bf16"
    assert f"({reason})" in said
