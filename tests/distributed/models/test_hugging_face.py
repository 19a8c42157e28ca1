"""Hugging Face folders into our models, through checkpoints, and out again, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.hugging_face_models import (
    MODELS,
    WITH_EXPERTS,
    reference,
    save_model,
    stored_tensors,
    tokens,
)
from tests.distributed.megatron_world import megatron_groups, save_checkpoint
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow

# On one rank: test_models_against_transformers.py.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "TP4": (4, {"tensor": 4}),  # more than the KV heads of most
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2xEP2": (4, {"tensor": 2, "sequence": True, "expert": 2}),
    "PP2xEP2": (4, {"pipeline": 2, "expert": 2}),
}
# One of each kind of rules: windows, biases and two KV heads; fused matrices; post norms;
# transposed; experts in every layer with a shared one, of which a rank has a half, or in some.
KINDS = ("qwen2, windows", "phi3", "gemma3", "gpt2", "qwen2_moe", "glm4_moe")
QUICK = {"gemma3": "TP2xPP2", "gpt2": "TP2xPP2", "glm4_moe": "PP2xEP2"}  # in the fast tests


def all_cases() -> list[Any]:
    """Each model cut along both axes; kinds and experts on more ranks than KV heads too."""
    cases = []
    for name in MODELS:
        layouts = ["TP2xEP2", "PP2xEP2"] if name in WITH_EXPERTS else ["TP2xPP2"]
        if name in (*KINDS, *WITH_EXPERTS):
            layouts.append("TP4")
        for layout in layouts:
            marks = () if layout == QUICK.get(name) else pytest.mark.slow
            cases.append(pytest.param(name, *LAYOUTS[layout], marks=marks, id=f"{name}-{layout}"))
    return cases


def through_a_layout(
    rank: int,
    world: int,
    folder: Path,
    out: Path,
    settings: dict[str, Any],
    tokens_bs: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Read a folder in a layout, save a checkpoint from there, export it; return the logits."""
    with megatron_groups(**settings) as groups:
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import build_gpt
        from megatron_distill.models.hugging_face.assets import ASSETS_FOLDER, copy_assets
        from megatron_distill.models.hugging_face.description import describe
        from megatron_distill.models.hugging_face.model import HuggingFaceWeights
        from megatron_distill.models.weights import fill
        from megatron_distill.train.convert.convert import export_checkpoint
        from megatron_distill.train.next_token import logits_after

        described = describe(folder)
        weights = HuggingFaceWeights(folder, described)
        weights.check()
        execution = Execution(dtype, torch.device("cpu"))
        shape = described.architecture
        chunks = build_gpt(shape, groups=groups, execution=execution, seed=None)
        fill(chunks, weights, groups=groups)
        logits = torch.empty(0)
        if len(chunks) == 1:
            chunks[0].eval()
            logits = logits_after(
                chunks[0], tokens_bs, positions=slice(None), architecture=shape, groups=groups,
                device=torch.device("cpu"),
            )  # fmt: skip
        if rank == 0:
            copy_assets(folder, out / "run" / ASSETS_FOLDER)
        save_checkpoint(out / "run" / "checkpoints", chunks, shape, groups)
        export_checkpoint(
            str(out / "run"), out / "exported", dtype=None, max_shard_size="40KB",
            family=described.family.model_type, tokenizer=None, overwrite=False,
        )  # fmt: skip
        return logits


def assert_same_tensors(first: Path, second: Path) -> None:
    ours, other = stored_tensors(first), stored_tensors(second)
    assert ours.keys() == other.keys()
    for name, value in ours.items():
        assert value.dtype == other[name].dtype, name
        assert value.equal(other[name]), name


@pytest.mark.parametrize(("name", "ranks", "settings"), all_cases())
def test_a_model_computes_the_same_here_and_leaves_as_it_came(
    pool: Pool, tmp_path: Path, name: str, ranks: int, settings: dict[str, Any]
) -> None:
    folder = save_model(tmp_path / "hf", name)
    logits, *others = pool.run(ranks, through_a_layout, folder, tmp_path, settings, tokens())
    model = reference(folder)
    with torch.no_grad():
        expected = model(tokens()).logits
    scale = float(expected.abs().max())
    assert scale > 3, "logits so small would hide a mistake"
    torch.testing.assert_close(logits, expected, atol=1e-5 * scale, rtol=0)
    assert all(other.equal(logits) for other in others)
    assert_same_tensors(folder, tmp_path / "exported")
    exported = reference(tmp_path / "exported")
    prompt = tokens()[:, :8]
    written = [m.generate(prompt, max_new_tokens=8, do_sample=False) for m in (model, exported)]
    assert written[0].equal(written[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_pass_bit_by_bit(
    pool: Pool, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = save_model(tmp_path / "hf", "gemma2", dtype=dtype)
    settings = {"tensor": 2, "pipeline": 2}
    pool.run(4, through_a_layout, folder, tmp_path, settings, tokens(), dtype)
    assert_same_tensors(folder, tmp_path / "exported")


def test_virtual_stages_take_and_give_the_same_weights(pool: Pool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "hf", "gpt2", n_layer=5)
    settings = {"pipeline": 2, "virtual_pipeline": 2}
    pool.run(2, through_a_layout, folder, tmp_path, settings, tokens())
    assert_same_tensors(folder, tmp_path / "exported")


def convert(rank: int, world: int, folder: Path, out: Path) -> None:
    """Import and export without any model, the ranks sharing the work."""
    with megatron_groups():
        from megatron_distill.train.convert.convert import export_checkpoint, import_checkpoint

        import_checkpoint(folder, out / "checkpoint", dtype=None, overwrite=False)
        export_checkpoint(
            str(out / "checkpoint"), out / "exported", dtype=None, max_shard_size="40KB",
            family=None, tokenizer=None, overwrite=False,
        )  # fmt: skip


@pytest.mark.parametrize("name", quick_and_slow(MODELS, QUICK))
def test_the_tool_s_import_and_export_are_inverse(pool: Pool, tmp_path: Path, name: str) -> None:
    folder = save_model(tmp_path / "hf", name)
    pool.run(3, convert, folder, tmp_path)
    assert_same_tensors(folder, tmp_path / "exported")
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    files = {path.name for path in (tmp_path / "exported").glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files
    assert len(files) > 1
    given, exported = (
        reference(folder).config.to_dict(),
        reference(tmp_path / "exported").config.to_dict(),
    )
    ignored = {"_name_or_path", "n_inner", "partial_rotary_factor"}
    assert {k: v for k, v in exported.items() if k not in ignored} == {
        k: v for k, v in given.items() if k not in ignored
    }
