"""Rows of ours and of theirs: each one covered once, and windows of them read alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.models.hugging_face import rules
from megatron_distill.models.hugging_face.description import describe
from megatron_distill.models.hugging_face.safetensors_files import SafetensorsFolder
from tests.distributed.hugging_face_models import save_model
from tests.distributed.megatron_world import small_architecture

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


def assert_covered_once(pieces: Sequence[rules.TensorPiece], rows: int) -> None:
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
@settings(max_examples=12, deadline=None)
def test_every_row_of_both_sides_is_covered_once(
    case: str, groups: int, each: int, head: int, width: int, is_bias: bool
) -> None:
    architecture = small_architecture(
        num_attention_heads=groups * each, num_kv_heads=groups, head_size=head
    )
    kind, names, transposed = RULES[case]
    rule = getattr(rules, kind)(*names, **({"transposed": True} if transposed else {}))
    rows = groups * (each + 2) * head * (len(names[0]) if kind == "Stacked" else 1)
    shape = (rows,) if is_bias else (rows, width)
    pieces = rule.pieces(shape, architecture)
    assert_covered_once(pieces, rows)
    assert sum(torch.Size(piece.shape).numel() for piece in pieces) == torch.Size(shape).numel()


WRITTEN = [
    ("llama3.1", f"{QKV}weight", (1,), 96),
    ("phi3", f"{QKV}weight", (1,), 64),
    ("gpt2", f"{QKV}weight", (1,), 96),
    ("mixtral", f"{LAYERS}mlp.experts.experts.linear_fc1.weight", (1, 2), 48),
]


# That the whole is right: tests/distributed/models/test_hugging_face.py.
@pytest.mark.parametrize(("name", "key", "place", "rows"), WRITTEN)
def test_a_window_is_that_of_the_whole_and_reads_its_own_numbers_alone(
    tmp_path: Path, name: str, key: str, place: tuple[int, ...], rows: int
) -> None:
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights

    folder = save_model(tmp_path, name)
    weights = HuggingFaceWeights(folder, describe(folder))
    whole = torch.full((rows, 32), torch.nan)
    weights.read_into(whole, key, place, (0, 0))
    assert bool(whole.isfinite().all())
    read: list[int] = []
    original = SafetensorsFolder.read

    def recorded(self: SafetensorsFolder, tensor: str, *window: slice) -> Tensor:
        part = original(self, tensor, *window)
        read.append(part.numel())
        return part

    half = rows // 2
    with patch.object(SafetensorsFolder, "read", recorded):
        for first, last, left, right in ((0, half, 0, 32), (half, rows, 0, 32), (5, 41, 3, 20)):
            expected = whole[first:last, left:right]
            found = torch.full_like(expected, torch.nan)
            read.clear()
            weights.read_into(found, key, place, (first, left))
            assert found.equal(expected)
            assert sum(read) == found.numel()


@given(available=st.integers(1, 200), data=st.data())
@settings(max_examples=60, deadline=None)
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
