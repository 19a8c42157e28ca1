"""Seconds and bytes of the losses between two tokenizers, on one rank and for one micro-batch.

A tile's losses read its logits again and again (`ops.aligned`). The unit is a pass: the exponential
of each logit, and its use. The plain objective has two for each model, so that a pass takes half of
the time of a logit there. Choices of the largest numbers have a rate of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Final

from megatron_distill.planning.operations import Passes, Rank

if TYPE_CHECKING:
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import ChunkLoss, PlannedRun

__all__ = [
    "aligned_bytes",
    "aligned_calls",
    "aligned_passes",
    "band_count",
    "measuring_aligned_passes",
    "tile_rows",
]

_FP32: Final = 4
# Passes over the logits of student and teacher by alignment; cross-entropy has two more.
_LABEL_PASSES: Final = 2
_ROW_PASSES: Final = {
    "likelihood": (0, 1),
    "common": (2, 2),
    "projection": (3, 2),
    "gold": (3, 2),
    "uld": (3, 2),
}
# Passes over chunk means: products with the rows of the map there and back, of either vocabulary;
# and of each common token of either model in the divergence of `gold`, with its slope.
_PROJECTED_PASSES: Final = 2
# Passes over chunk means of either model: their sums, the divergence with its slope, and the slope
# back to the rows. Those of `gold` are among its own.
_MEAN_PASSES: Final = 3
_GOLD_PASSES: Final = 12
# Calls of torch on a CPU beyond those of blocks of rows, which are in the time of a logit: of the
# objective, and in a tile by alignment.
_CALLS: Final = 600
_CALLS_OF_TILE: Final = {
    "likelihood": 550,
    "common": 1220,
    "projection": 1080,
    "gold": 1290,
    "uld": 980,
}
# Numbers among which one is chosen in the time in which one of the chosen is sorted.
_SORTED: Final = 5
# Without a measured logit: bytes of a pass over the width of a number.
_TRAFFIC: Final = 1.5
# A plan reads no tokenizers: common tokens over those of the smaller vocabulary, as in
# benchmarks/results/cross_tokenizer.json.
_COMMON: Final = 0.75
# Logits of a band and of a tile (ops/workspace.py), and fp32 buffers of a row block: of the student
# probabilities, exponentials, a workspace and a gradient, of the teacher all but the last.
_BAND: Final = {"cpu": 2**25, "gpu": 2**28}
_TILE: Final = {"cpu": 2**23, "gpu": 2**26}
_BLOCK: Final = {"cpu": 2**18, "gpu": 2**25}
_BUFFERS: Final = (4, 3)


@dataclass(frozen=True)
class _Columns:
    """Columns of both models on a rank, and of the tokens that both have.

    The teacher has none where its head runs elsewhere: then it has no logits here.
    """

    student: int
    teacher: int
    common: float

    @classmethod
    def of(cls, run: PlannedRun, *, teacher_tokens: float, split: int) -> _Columns:
        assert run.teacher is not None
        shapes = run.student, run.teacher
        own, theirs = (shape.padded_vocab_size(split) // split for shape in shapes)
        theirs = theirs if teacher_tokens else 0
        return cls(own, theirs, _COMMON * min(own, theirs))

    @property
    def widest(self) -> int:
        """Columns of the model that has more."""
        return max(self.student, self.teacher)


def band_count(
    run: PlannedRun, device: DeviceProfile, *, tokens: float, teacher_tokens: float, split: int
) -> int:
    """Return the products of the heads of a micro-batch with so many tokens of either model."""
    columns = _Columns.of(run, teacher_tokens=teacher_tokens, split=split)
    rows = max(tokens, teacher_tokens)
    return ceil(rows / (run.chunk_tokens or max(1, _BAND[device.kind] // columns.widest)))


def tile_rows(
    run: PlannedRun, device: DeviceProfile, *, tokens: float, teacher_tokens: float, split: int
) -> float:
    """Return the rows of a model whose losses are computed at once; arguments as `band_count`."""
    columns = _Columns.of(run, teacher_tokens=teacher_tokens, split=split)
    bands = band_count(run, device, tokens=tokens, teacher_tokens=teacher_tokens, split=split)
    band = max(tokens, teacher_tokens) / bands
    return min(band, max(1, _TILE[device.kind] // columns.widest))


def aligned_passes(run: PlannedRun, rank: Rank, *, teacher_tokens: float) -> Passes:
    """Return the time of both heads and of cross-entropy and the terms, without messages.

    The chunks are as many as the student's tokens. teacher_tokens: of the micro-batch on this rank.
    """
    assert run.teacher is not None
    split = rank.layout.tensor
    columns = _Columns.of(run, teacher_tokens=teacher_tokens, split=split)
    count = band_count(
        run, rank.device, tokens=rank.tokens, teacher_tokens=teacher_tokens, split=split
    )
    student = rank.tokens / count, run.student.hidden_size, columns.student
    once = rank.product(*student, count=count)
    forward = once + rank.product(
        teacher_tokens / count, run.teacher.hidden_size, columns.teacher, count=count
    )
    passes = [_LABEL_PASSES, 0]
    for term in run.chunk_losses:
        passes = [a + b for a, b in zip(passes, _ROW_PASSES[term.alignment], strict=True)]
        forward += _on_means(term, rank, columns)
    tile = tile_rows(
        run, rank.device, tokens=rank.tokens, teacher_tokens=teacher_tokens, split=split
    )
    tiles = ceil(max(rank.tokens, teacher_tokens) / tile)
    forward += rank.calls_of_losses(aligned_calls(run, tiles=tiles))
    forward += _pass_seconds(rank, passes[0] * rank.tokens * columns.student, columns.student)
    forward += _pass_seconds(rank, passes[1] * teacher_tokens * columns.teacher, columns.teacher)
    return Passes(forward, 2 * once)


def aligned_calls(run: PlannedRun, *, tiles: int) -> int:
    """Return the calls of torch in the losses of a micro-batch, without those of row blocks."""
    return _CALLS + tiles * sum(_CALLS_OF_TILE[term.alignment] for term in run.chunk_losses)


def measuring_aligned_passes(run: PlannedRun, rank: Rank, *, teacher_tokens: float) -> Passes:
    """Return the time of `aligned_passes` in a pass that measures losses, or gradients' norms.

    Gradients take the student's head once more for the labels, and as many products back, as in
    `measuring_passes`. Slopes are counted with the losses too, which do not need them.
    """
    found = aligned_passes(run, rank, teacher_tokens=teacher_tokens)
    if run.measures != "gradients":
        return Passes(found.forward)
    columns = run.student.padded_vocab_size(rank.layout.tensor) // rank.layout.tensor
    labels = _pass_seconds(rank, _LABEL_PASSES * rank.tokens * columns, columns)
    return Passes(found.forward + labels + 1.5 * found.backward)


def _on_means(term: ChunkLoss, rank: Rank, columns: _Columns) -> float:
    """Return the time of a term beyond its passes over rows of logits."""
    chunks, k = rank.tokens, term.uncommon_top_k
    match term.alignment:
        case "common":
            numbers = _MEAN_PASSES * chunks * 2 * columns.common
            seconds = _pass_seconds(rank, numbers, columns.common)
            if term.top_k is not None:
                seconds += _choice_seconds(rank, chunks, columns.common, term.top_k)
            return seconds
        case "projection":
            both = columns.student + columns.teacher
            passes = _PROJECTED_PASSES + _MEAN_PASSES
            numbers = passes * chunks * both
            seconds = _pass_seconds(rank, numbers, columns.teacher or columns.student)
            return seconds + _choice_seconds(rank, chunks, columns.teacher, term.top_k or 64)
        case "gold":
            numbers = _GOLD_PASSES * chunks * 2 * columns.common
            rest = [each - columns.common for each in (columns.student, columns.teacher)]
            chosen = sum(_choice_seconds(rank, chunks, each, k) for each in rest)
            return _pass_seconds(rank, numbers, columns.common) + chosen
        case "uld":
            both_of = columns.student, columns.teacher
            numbers = _MEAN_PASSES * chunks * sum(both_of)
            seconds = _pass_seconds(rank, numbers, columns.teacher or columns.student)
            return seconds + sum(_choice_seconds(rank, chunks, each, k) for each in both_of)
    return 0.0


def _pass_seconds(rank: Rank, numbers: float, columns: float) -> float:
    measured = rank.device.logit_seconds(rank.precision, columns)
    if measured is not None:
        return numbers * measured / 2
    return rank.passes(numbers * rank.width * _TRAFFIC)


def _choice_seconds(rank: Rank, rows: float, columns: float, k: int) -> float:
    """Return the time of a choice of the k largest of each row, in their order."""
    measured = rank.device.logit_seconds(rank.precision, columns, chosen=k)
    if measured is not None and rank.precision in rank.device.choice_ns:
        return rows * (columns + _SORTED * k) * measured
    return rank.passes(rows * columns * _FP32 * 2)


def aligned_bytes(
    run: PlannedRun, device: DeviceProfile, *, tokens: float, teacher_tokens: float, split: int
) -> float:
    """Return the bytes of a band's logits, and of a tile's losses at their peak, on the last stage.

    tokens, teacher_tokens: of a micro-batch on this rank. Source: docstring of
    `ops.aligned.executor.aligned_linear`, and the terms of `ops.aligned`.
    """
    columns = _Columns.of(run, teacher_tokens=teacher_tokens, split=split)
    width, most = run.width, max(tokens, teacher_tokens)
    bands = band_count(run, device, tokens=tokens, teacher_tokens=teacher_tokens, split=split)
    rows = tile_rows(run, device, tokens=tokens, teacher_tokens=teacher_tokens, split=split)
    logits = (tokens * columns.student + teacher_tokens * columns.teacher) / bands * width
    blocks = 0.0
    for each, buffers in zip((columns.student, columns.teacher), _BUFFERS, strict=True):
        block = device.threads * max(1, round(_BLOCK[device.kind] / max(1, each)))
        blocks += min(most, block) * each * _FP32 * (buffers + (width < _FP32))
    terms = {term.alignment for term in run.chunk_losses}
    gradient = 0.0 if terms <= {"likelihood"} else rows * columns.student * _FP32
    of_terms = max((_numbers_of_term(term, columns) for term in terms), default=0.0)
    return logits + blocks + gradient + rows * of_terms * _FP32


def _numbers_of_term(alignment: str, columns: _Columns) -> float:
    """Return the fp32 numbers per row of a tile that a term holds besides the gradient."""
    student, teacher, common = columns.student, columns.teacher, columns.common
    return {
        "likelihood": 0.0,
        # The common tokens of both, and the student's further ones.
        "common": common + student,
        # Means of both, and slopes.
        "projection": 2 * student + teacher,
        # The teacher's means, a copy in two parts, and the part that the choice overwrites.
        "gold": 3 * teacher - common,
        "uld": 2 * teacher,
    }[alignment]
