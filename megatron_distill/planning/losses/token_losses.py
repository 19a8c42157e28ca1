"""Bytes that losses between logits of the same tokens take besides these logits.

A CPU computes them in row blocks, with fp32 buffers that all blocks of a chunk share. On a GPU the
kernels of whole divergences have none. A term on ids has numbers for each id of a chunk's tokens.
The numbers are those of the executors in `ops`, as benchmarks/results/losses.json has them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.device import SEGMENTED_COLUMNS

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import PlannedRun

__all__ = ["IdBytes", "RowBlocks", "chunk_rows", "id_bytes"]

_FP32: Final = 4
# Logits of a chunk where the run does not say (ops/workspace.py).
_CHUNK: Final = {"cpu": 2**25, "gpu": 2**28}
# Elements of a row block (ops/workspace.py); on a CPU for each thread.
_BLOCK: Final = {"cpu": 2**18, "gpu": 2**25}
# Buffers of forward KL: exponentials of both models and a workspace. Slopes take further ones; a
# skewed reverse KL also has a mask.
_PLAIN: Final = 3
_SLOPES: Final[Mapping[str, float]] = {
    "forward_kl": 0,
    "reverse_kl": 2,
    "total_variation": 2,
    "js_divergence": 3,
    "squared_hellinger": 3,
    "skewed_forward_kl": 4,
    "skewed_reverse_kl": 7.25,
    "adaptive_kl": 2,
}
# Buffers in which adaptive KL sorts the teacher's probabilities, before any gradient.
_SORTED: Final = 6
# Bytes per id: of a solved term, of which a part is left for the gradient, and 8 of each tensor
# rank's ids.
_SOLVED: Final = 115
_KEPT: Final = 45
_OF_RANK: Final = 8
# A choice takes the maxima of segments, then reads as many segments as ids: `ops.topk.largest`. On
# a CPU it does so for the rows of a block of its own, with the maxima twice, a mask, and the
# segment's number and places per id; on a GPU with the maxima, their keys and places.
_SEGMENT: Final = {"cpu": 64, "gpu": 32}
_MAXIMA: Final = {"cpu": 2 * _FP32 + 1, "gpu": 14}
_PLACES: Final = 32
_CHOSEN: Final = 12
# Of narrow rows it reads all logits, with a mask and an fp32 place of each.
_WHOLE: Final = _FP32 + 1
# Logits that a GPU copies without their ids, for the sum of the others.
_COPIED: Final = 2**28


def chunk_rows(run: PlannedRun, device: DeviceProfile, columns: int) -> int:
    """Return the tokens of a chunk of logits with so many columns, at most."""
    return run.chunk_tokens or max(1, _CHUNK[device.kind] // columns)


@dataclass(frozen=True)
class RowBlocks:
    """The fp32 buffers of one row block.

    rows, columns: of a chunk of logits. width: bytes of a logit.
    """

    rows: int
    columns: int
    width: int
    device: DeviceProfile

    @property
    def _step(self) -> int:
        """Rows of a block, if there are as many."""
        return max(1, round(_BLOCK[self.device.kind] / self.columns)) * self.device.threads

    @property
    def one(self) -> float:
        """Bytes of one buffer."""
        return float(min(self.rows, self._step) * self.columns * _FP32)

    def of(self, divergences: Collection[str], *, models: int, sorts: bool = True) -> float:
        """Return the bytes of all buffers, those of logits that are converted included.

        divergences: on all ids, a name twice where two terms have it. models: that have logits.
        sorts: whether adaptive KL sorts; its gradient alone does not.
        """
        # At one temperature a second term has buffers of its own, which all further ones share.
        slopes = sorted(_SLOPES.get(name, max(_SLOPES.values())) for name in divergences)[-2:]
        further = sum(slopes)
        if sorts and "adaptive_kl" in divergences:
            # The first block sorts before it has the buffers of slopes.
            is_only = self.rows <= self._step
            further = max(further, _SORTED) if is_only else further + _SORTED
        return (_PLAIN + further + (models if self.width < _FP32 else 0)) * self.one


@dataclass(frozen=True)
class IdBytes:
    """Bytes of a term on ids: of their choice, of the solved term, and of its gradient."""

    choice: float
    solved: float
    gradient: float

    @property
    def peak(self) -> float:
        """The most at one time."""
        return max(self.choice, self.solved, self.gradient)


def id_bytes(
    blocks: RowBlocks, ids: int, *, has_tail: bool, split: int = 1, chooses: bool = True
) -> IdBytes:
    """Return the bytes of a term on so many ids of each token of a chunk.

    split: of the vocabulary. chooses: from a teacher's logits; else the ids are known.
    """
    rows, columns, kind = blocks.rows, blocks.columns, blocks.device.kind
    choice = 0.0
    if chooses:
        segment = _SEGMENT[kind]
        narrow = blocks.width if blocks.width < _FP32 else 0
        read = ids * (segment * (_FP32 + narrow) + _PLACES)
        at_once = min(rows, round(_BLOCK["cpu"] / (segment * ids)) * blocks.device.threads)
        if kind == "gpu":
            read, at_once = 0, rows
        choice = at_once * (columns / segment * _MAXIMA[kind] + read) + rows * ids * _CHOSEN
        if columns < SEGMENTED_COLUMNS * ids:
            choice = float(rows * (columns * _WHOLE + ids * _CHOSEN))
    solved = float(rows * ids * (_SOLVED + _OF_RANK * split))
    gradient = float(rows * ids * _KEPT)
    if has_tail and kind == "cpu":
        # The student's exponentials and a workspace.
        gradient += (2 + (blocks.width < _FP32)) * blocks.one
    elif has_tail:
        solved = max(solved, min(float(_COPIED), rows * columns * blocks.width))
    return IdBytes(choice, solved, gradient)
