"""Rows of ours and of theirs: each one covered once, and read as if assembled by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from tests.distributed.hugging_face_models import save_model, stored_tensors
from tests.distributed.megatron_world import small_architecture

if TYPE_CHECKING:
    from megatron_distill.models.hugging_face.rules import Piece

LAYERS = "decoder.layers."
QKV = f"{LAYERS}self_attention.linear_qkv."
RULES: dict[str, tuple[str, tuple[Any, ...], bool]] = {
    "same": ("Same", ("a",), False),
    "same, transposed": ("Same", ("a",), True),
    "two stacked": ("Stacked", (("gate", "up"),), False),
    "three stacked": ("Stacked", (("a", "b", "c"),), False),
    "split": ("SplitQKV", ("q", "k", "v"), False),
    "fused": ("FusedQKV", ("qkv",), False),
    "fused, transposed": ("FusedQKV", ("qkv",), True),
}


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare_megatron_core(on_cuda=False)


def assert_covered_once(pieces: Sequence[Piece], rows: int) -> None:
    ours = [row for p in pieces for run in p.runs for row in range(run.ours, run.ours + run.rows)]
    assert sorted(ours) == list(range(rows))
    for piece in pieces:
        other = [row for run in piece.runs for row in range(run.theirs, run.theirs + run.rows)]
        assert sorted(other) == list(range(piece.shape[1 if piece.transposed else 0]))


@pytest.mark.parametrize("case", RULES)
@given(
    groups=st.integers(1, 5), each=st.integers(1, 4), head=st.integers(1, 7),
    width=st.integers(1, 9), is_bias=st.booleans(),
)  # fmt: skip
@settings(max_examples=20, deadline=None)
def test_every_row_of_both_sides_is_covered_once(
    case: str, groups: int, each: int, head: int, width: int, is_bias: bool
) -> None:
    architecture = small_architecture(
        num_attention_heads=groups * each, num_kv_heads=groups, head_size=head
    )
    from megatron_distill.models.hugging_face import rules

    kind, names, transposed = RULES[case]
    rule = getattr(rules, kind)(*names, **({"transposed": True} if transposed else {}))
    rows = groups * (each + 2) * head * (len(names[0]) if kind == "Stacked" else 1)
    shape = (rows,) if is_bias else (rows, width)
    pieces = rule.pieces(shape, architecture)
    assert_covered_once(pieces, rows)
    assert sum(torch.Size(piece.shape).numel() for piece in pieces) == torch.Size(shape).numel()


def by_group(query: Tensor, key: Tensor, value: Tensor, groups: int) -> Tensor:
    """Queries, key and value of the first group, then of the second, and so on."""
    parts = [tensor.chunk(groups) for tensor in (query, key, value)]
    return torch.cat([part for group in zip(*parts, strict=True) for part in group])


def by_hand(name: str, stored: dict[str, Tensor], groups: int) -> dict[tuple[Any, ...], Tensor]:
    """Assemble some of our tensors of one model, by key and place."""
    ours: dict[tuple[Any, ...], Tensor] = {}
    for layer in range(3):
        at = f"transformer.h.{layer}." if name == "gpt2" else f"model.layers.{layer}."
        fc1 = f"{LAYERS}mlp.linear_fc1.weight"
        if name == "gpt2":
            fused = stored[f"{at}attn.c_attn.weight"].t()
            ours[f"{QKV}weight", layer] = by_group(*fused.split(32), groups)
            ours[f"{QKV}bias", layer] = by_group(*stored[f"{at}attn.c_attn.bias"].split(32), groups)
            ours[fc1, layer] = stored[f"{at}mlp.c_fc.weight"].t()
        elif name == "phi3":
            fused = stored[f"{at}self_attn.qkv_proj.weight"]
            ours[f"{QKV}weight", layer] = by_group(*fused.split([32, 16, 16]), groups)
            ours[fc1, layer] = stored[f"{at}mlp.gate_up_proj.weight"]
        else:
            for kind in ("weight", "bias") if name == "qwen2" else ("weight",):
                split = (stored[f"{at}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
                ours[f"{QKV}{kind}", layer] = by_group(*split, groups)
        if name in ("llama3.1", "qwen2"):
            up = stored[f"{at}mlp.up_proj.weight"]
            ours[fc1, layer] = torch.cat([stored[f"{at}mlp.gate_proj.weight"], up])
        for expert in range(4 if name == "mixtral" else 0):
            inner = f"{at}block_sparse_moe.experts.{expert}."
            both = [stored[f"{inner}{matrix}.weight"] for matrix in ("w1", "w3")]
            key = f"{LAYERS}mlp.experts.experts.linear_fc"
            ours[f"{key}1.weight", layer, expert] = torch.cat(both)
            ours[f"{key}2.weight", layer, expert] = stored[f"{inner}w2.weight"]
    word = "transformer.wte.weight" if name == "gpt2" else "model.embed_tokens.weight"
    # Padding as under several tensor-parallel ranks.
    padding = torch.zeros(53, 32)
    ours[("embedding.word_embeddings.weight",)] = torch.cat([stored[word], padding])
    return ours


@pytest.mark.parametrize("name", ["llama3.1", "qwen2", "phi3", "gpt2", "mixtral"])
def test_a_window_equals_that_of_the_tensor_assembled_by_hand(tmp_path: Path, name: str) -> None:
    from megatron_distill.models.hugging_face.description import describe
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.models.hugging_face.safetensors_files import SafetensorsFolder

    folder = save_model(tmp_path, name)
    description = describe(folder)
    weights = HuggingFaceWeights(folder, description)
    whole = by_hand(name, stored_tensors(folder), description.architecture.num_kv_heads)
    read: list[int] = []
    original = SafetensorsFolder.read

    def recorded(self: SafetensorsFolder, tensor: str, *window: slice) -> Tensor:
        part = original(self, tensor, *window)
        read.append(part.numel())
        return part

    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def holds(data: st.DataObject) -> None:
        (key, *place), expected = data.draw(st.sampled_from(list(whole.items())))
        window = []
        for size in expected.shape:
            start = data.draw(st.integers(0, size - 1))
            window.append(slice(start, data.draw(st.integers(start + 1, size))))
        found = torch.full_like(expected[tuple(window)], torch.nan)
        read.clear()
        weights.read_into(found, key, tuple(place), [part.start for part in window])
        assert found.equal(expected[tuple(window)])
        stored_rows = min(window[0].stop, 203 if "embedding" in key else window[0].stop)
        rows = max(0, stored_rows - window[0].start)
        assert sum(read) == rows * torch.Size(found.shape[1:]).numel()

    with patch.object(SafetensorsFolder, "read", recorded):
        holds()


@given(available=st.integers(1, 200), data=st.data())
@settings(max_examples=200, deadline=None)
def test_pruned_layers_are_spread_evenly(available: int, data: st.DataObject) -> None:
    from megatron_distill.train.assemble.shapes import evenly_spread

    count = data.draw(st.integers(1, available))
    kept = evenly_spread(count, available)
    assert len(kept) == count
    assert kept[0] == 0
    if count > 1:
        assert kept[-1] == available - 1
        gaps = {second - first for first, second in zip(kept, kept[1:], strict=False)}
        assert min(gaps) >= 1
        assert max(gaps) - min(gaps) <= 1
    if count == available:
        assert kept == tuple(range(available))
