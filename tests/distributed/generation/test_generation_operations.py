"""Operations of a step of one position per row, each of which is a launch on a GPU; their sizes.

Regimes: kinds of layers; rows that end by an id or at their limits; layers with a window.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megatron_distill.models.generation import Sampling, Stops, WriteRow
from tests.distributed.megatron_world import megatron_groups, small_architecture, writer_of
from tests.distributed.pool import Pool
from tests.reference.tracing import Watch

STEPS = 10
# One operation each of CUDA, and these of a CPU: RMSNorm; keys with values into the cache, and
# attention of one position.
NORM = ("linalg_vector_norm", "hypot", "div", "mul")
STORE = ("copy", "copy")
ATTENTION = ("baddbmm", "softmax", "bmm")


class Operations(Watch):
    """Counts what is computed, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: Counter[str] = Counter()
        self.views: Counter[str] = Counter()

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        returns = func._schema.returns
        alias = returns[0].alias_info if returns else None
        is_view = alias is not None and not alias.is_write
        name = func._schema.name.removeprefix("aten::").removesuffix("_")
        (self.views if is_view else self.computed)[name] += 1

    def sums(self) -> tuple[int, int]:
        """Return the numbers of operations, a norm and attention as one each, and of views."""
        more = (len(NORM) - 1) * self.computed["hypot"]
        more += (len(STORE) - 1 + len(ATTENTION) - 1) * self.computed["baddbmm"]
        return self.computed.total() - more, self.views.total()


def _per_step(
    rank: int, world: int, changes: dict[str, Any], sampling: dict[str, Any]
) -> dict[int, tuple[float, float]]:
    """Return operations and views of a step, by the number of layers."""
    with megatron_groups() as groups:
        found = {}
        for layers in (2, 4):
            shape = small_architecture(
                num_layers=layers, max_position_embeddings=64, vocab_size=128, **changes
            )
            model = writer_of(shape, groups)
            counts = []
            for tokens in (4, 4 + STEPS):
                rows = [WriteRow((7,) * length, length, tokens) for length in (3, 9, 5)]
                with Operations() as operations:
                    model.write(rows, sampling=Sampling(**sampling), stops=Stops())
                counts.append(operations.sums())
            (few, few_views), (many, many_views) = counts
            found[layers] = (many - few) / STEPS, (many_views - few_views) / STEPS
        return found


# Two norms, four products of which two add to the hidden state, a rotation, keys with values into
# the cache, attention, and a gate of two. A rotation of CUDA takes three.
DENSE = 2 + 4 + 1 + 1 + 1 + 2
KINDS: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, DENSE),
    "biases": ({"qkv_bias": True, "linear_bias": True}, DENSE + 2),
    "head norms": ({"qk_norm": True}, DENSE + 1),  # one for queries and key
    "windows": ({"sliding_window": 32, "sliding_layers": (0, 2)}, DENSE),
    "post norms": ({"post_norms": True}, DENSE + 4),  # two norms, and two sums of their own
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_has_few_operations_in_each_step(pool: Pool, kind: str) -> None:
    changes, most = KINDS[kind]
    (found,) = pool.run(1, _per_step, changes, {})
    (few, few_views), (many, many_views) = found[2], found[4]
    assert (many - few) / 2 == most
    assert (many_views - few_views) / 2 <= 16
    # Embedding, positions, rotation, norm, head, and five for the likeliest ids: CUDA finds their
    # places with one operation, a CPU with five. Log-probabilities take three, and seven.
    assert few - (many - few) <= 10 + 4 + 4


class Sizes(Watch):
    """Records rows of the products with one matrix, keys of the scores, and slots of each layer."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns  # of the matrix
        self.rows: list[int] = []
        self.keys: list[int] = []
        self.slots: list[int] = []

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = func._schema.name
        if name in ("aten::mm", "aten::linear") and result.shape[1] == self.columns:
            self.rows.append(result.shape[0])
        elif name == "aten::baddbmm" and args[0].shape[1] == 1:  # not the first rows' mask
            self.keys.append(result.shape[2])
        elif name == "aten::zeros" and result.dim() == 5:  # keys of a layer, then its values
            self.slots.append(result.shape[3])


def _sizes(
    rank: int, world: int, changes: dict[str, Any], lengths: list[int], limits: list[int]
) -> tuple[Sizes, list[Any]]:
    """Write rows that each ninth id ends; return sizes, and the texts."""
    with megatron_groups() as groups:
        shape = small_architecture(max_position_embeddings=64, **changes)
        model = writer_of(shape, groups)
        rows = [
            WriteRow((7,) * length, row, limit)
            for row, (length, limit) in enumerate(zip(lengths, limits, strict=True))
        ]
        with Sizes(shape.vocab_size) as sizes:
            written = model.write(
                rows, sampling=Sampling(temperature=1.0), stops=Stops(ids=tuple(range(0, 200, 9)))
            )
        return sizes, written


def test_later_steps_leave_ended_rows_out(pool: Pool) -> None:
    ((sizes, written),) = pool.run(1, _sizes, {}, [3, 9, 5, 4], [2, 20, 20, 12])
    assert {one.ended for one in written} == {"id", "length"}
    lengths = [len(one.ids) for one in written]
    assert len(set(lengths)) >= 3, "rows should end at several steps"
    assert sizes.rows == [sum(length > step for length in lengths) for step in range(max(lengths))]


def test_a_layer_with_a_window_stores_and_reads_no_more_positions(pool: Pool) -> None:
    changes = {"sliding_window": 6, "sliding_layers": (0, 2)}
    ((sizes, written),) = pool.run(1, _sizes, changes, [3, 9], [30, 30])
    slots = sizes.slots[1::2]
    whole = slots[1]
    assert whole >= 9 + 30
    assert slots == [6, whole, 6, whole]
    steps = max(len(one.ids) for one in written) - 1
    assert len(sizes.keys) == 4 * steps
    last = 9 + steps
    assert last > 2 * 6, "the ring should be written again"
    assert sizes.keys[-4:] == [6, last, 6, last]
