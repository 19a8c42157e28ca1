"""Sums over the tokens and blocks of each text, their means, and standard errors over the texts.

A block of g drafted tokens yields ``1 + a_1 + a_1 a_2 + ... + a_1 ... a_g`` tokens on average, with
the acceptance a_i of each position (Leviathan et al. 2023). It is averaged over all blocks of the
texts, because the acceptance of neighbours is correlated.

For the same reason the units of the errors are texts, and not tokens. With the sums y_i and w_i of
n texts a mean is the ratio r = sum y_i / sum w_i, and its standard error (Cochran, Sampling
Techniques, 1977, section 2.11)

    sqrt(n / (n - 1) * sum (y_i - r w_i)^2) / sum w_i

Shapes: N compared tokens of n texts, S positions of the longest, F = len(SUM_NAMES).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.evaluation.calibration import BINS, Figures, signed_gaps
from megatron_distill.losses.comparison import TokenComparison
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.calibration import equal_mass_errors

__all__ = [
    "LONGEST_DRAFT",
    "SUM_NAMES",
    "Measured",
    "block_sums",
    "figures_of",
    "ratio_of_sums",
    "summary_of",
    "table_of",
    "token_sums",
]

LONGEST_DRAFT: Final = 8
_FIGURES = ("label_nll", "brier", "student_entropy", "teacher_entropy", "forward_kl", "reverse_kl")
_ACCEPTED = ("overlap", "overlap_most")
_DIVERGED = ("js_divergence", "js_divergence_most")
_SHARED = ("top5_overlap", "top20_overlap")
_OF_BIN = ("count", "confidence", "label", "teacher")


def _names() -> tuple[str, ...]:
    blocks = [
        f"{name}@{length}"
        for length in range(1, LONGEST_DRAFT + 1)
        for name in ("blocks", *_ACCEPTED)
    ]
    bins = [f"{name}@bin{number}" for name in _OF_BIN for number in range(BINS)]
    weights = ("tokens", "weight", "weight_beside", "weight_whole")
    figures = (*_FIGURES, "agreement", *_ACCEPTED, *_DIVERGED, *_SHARED)
    return (*weights, *figures, *blocks, *bins)


SUM_NAMES: Final = _names()


@dataclass(frozen=True)
class Measured:
    """A batch on this rank.

    Attributes:
        texts: their numbers; ranks that share a text have the same one.
        sums: fp64 [n, F], in the order of `SUM_NAMES`, on the device.
        tokens: `token_figures` of the tokens.
    """

    texts: Sequence[int]
    sums: Tensor
    tokens: Figures


def token_sums(
    found: TokenComparison, weights: Tensor, texts_n: Tensor, count: int
) -> dict[str, Tensor]:
    """Number of the tokens with a weight, and weighted sums over them, ``[count]`` by name.

    texts_n: int64 ``[N]``, the row of each token's text. No host sync.
    """

    def of_texts(values: Tensor) -> Tensor:
        return weights.new_zeros(count).index_add_(0, texts_n, values)

    whole = of_texts(weights)
    sums = {"tokens": of_texts((weights > 0).to(weights.dtype)), "weight": whole}
    for name in (*_FIGURES, *_ACCEPTED, *_DIVERGED, *_SHARED):
        values = getattr(found, name)
        if values is not None:
            # A token of weight zero may hold anything.
            sums[name] = of_texts(weights * values.masked_fill(weights == 0, 0.0))
    if found.forward_kl is not None:
        sums["weight_whole"] = whole
    agrees = None
    if found.teacher_top is not None:
        sums["weight_beside"] = whole
        agrees = (found.student_top == found.teacher_top).to(weights.dtype)
        sums["agreement"] = of_texts(weights * agrees)
    return sums | _bin_sums(found, weights, agrees, texts_n, count)


def _bin_sums(
    found: TokenComparison, weights: Tensor, agrees: Tensor | None, texts_n: Tensor, count: int
) -> dict[str, Tensor]:
    """Tokens by the student's confidence: count, confidence, and how often its top id is right."""
    bins = texts_n * BINS + (found.confidence * BINS).long().clamp_(0, BINS - 1)
    values = {
        "count": weights,
        "confidence": weights * found.confidence,
        "label": weights * found.is_label.to(weights.dtype),
        "teacher": weights * agrees if agrees is not None else torch.zeros_like(weights),
    }
    sums: dict[str, Tensor] = {}
    for name, value in values.items():
        by_bin = weights.new_zeros(count * BINS).index_add_(0, bins, value).view(count, BINS)
        sums |= {f"{name}@bin{number}": one for number, one in enumerate(by_bin.unbind(1))}
    return sums


def block_sums(
    valid_nS: Tensor,
    begins_nS: Tensor,
    documents_nS: Tensor,
    least_nS: Tensor,
    most_nS: Tensor,
) -> dict[str, Tensor]:
    """Number of blocks within a document, and their expected tokens, ``[n]`` by length."""
    sums: dict[str, Tensor] = {}
    inside = begins_nS
    reached = {name: torch.ones_like(least_nS) for name in _ACCEPTED}
    expected = {name: torch.ones_like(least_nS) for name in _ACCEPTED}
    accepted = dict(zip(_ACCEPTED, (least_nS, most_nS), strict=True))
    for length in range(1, min(LONGEST_DRAFT, valid_nS.shape[1]) + 1):
        last = length - 1
        starts = valid_nS.shape[1] - last
        same = documents_nS[:, :starts] == documents_nS[:, last:]
        inside = inside[:, :starts] & valid_nS[:, last:] & same
        sums[f"blocks@{length}"] = inside.sum(1)
        for name, acceptance in accepted.items():
            reached[name] = reached[name][:, :starts] * acceptance[:, last:]
            expected[name] = expected[name][:, :starts] + reached[name]
            sums[f"{name}@{length}"] = (expected[name] * inside).sum(1)
    return sums


def table_of(sums: Mapping[str, Tensor]) -> Tensor:
    """Return the sums as fp64 ``[n, F]``; those that are not there are zero."""
    nothing = torch.zeros_like(sums["weight"])
    return torch.stack([sums.get(name, nothing).double() for name in SUM_NAMES], 1)


def figures_of(measured: Sequence[Measured], groups: Groups) -> dict[str, object]:
    """Return the figures of all ranks' texts, the same on every rank.

    `measured`: of this rank, empty on the pipeline stages before the last.

    Collective: data x context group, one all-gather of 8 bytes per text and sum, and of 32 bytes
    per token; pipeline group, one broadcast of the result.
    """
    texts = np.array([text for one in measured for text in one.texts], np.int64)
    sums = np.zeros((0, len(SUM_NAMES)))
    if measured:
        sums = torch.cat([one.sums for one in measured]).cpu().numpy()
    tokens = np.concatenate([np.zeros((4, 0)), *(one.tokens for one in measured)], 1)
    shared: list[Any] = [None] * groups.data_context.size()
    dist.all_gather_object(shared, (texts, sums, tokens), group=groups.data_context)
    texts, sums, tokens = (
        np.concatenate([part[place] for part in shared], axis)
        for place, axis in enumerate((0, 0, 1))
    )
    found = [summary_of(_added(texts, sums)) | equal_mass_errors(tokens)]
    if groups.pipeline.size() > 1:
        dist.broadcast_object_list(
            found, group=groups.pipeline, group_src=groups.pipeline.size() - 1
        )
    return found[0]


def _added(texts: Any, sums: Figures) -> Figures:
    """The sums ``[n, F]`` of whole texts, in the order of their numbers.

    Context ranks have parts of a text. They are added before anything is squared.
    """
    numbers, places = np.unique(texts, return_inverse=True)
    whole = np.zeros((len(numbers), len(SUM_NAMES)))
    np.add.at(whole, places, sums)
    return whole


def ratio_of_sums(values: Figures, sizes: Figures) -> tuple[float, float | None]:
    """Return the ratio of sums over texts ``[n]``, and its standard error; see the module.

    Texts of size zero do not count. One text has no error. Not for sizes that are all zero.
    """
    total, count = float(sizes.sum()), int(np.count_nonzero(sizes))
    ratio = float(values.sum()) / total
    if count < 2:
        return ratio, None
    with np.errstate(invalid="ignore"):  # an infinite mean has no error
        residuals = values - ratio * sizes
    return ratio, sqrt(count / (count - 1) * float((residuals**2).sum())) / total


def summary_of(sums: Figures) -> dict[str, object]:
    """Return means, standard errors and counts under their public names.

    `sums`: ``[n, F]`` of n texts. The error of a mean is under its name and `_stderr`, where two
    texts or more have labels.
    """
    columns = dict(zip(SUM_NAMES, sums.T, strict=True))
    weights = columns["weight"]
    if not weights.any():
        return {}
    figures: dict[str, object] = {
        "tokens": int(columns["tokens"].sum()),
        "texts": int(np.count_nonzero(weights)),
    }
    is_beside = bool(columns["weight_beside"].any())
    is_whole = bool(columns["weight_whole"].any())
    means = {name: columns[name] for name in ("label_nll", "brier", "student_entropy")}
    means["calibration_error"] = _signed_gaps(columns, "label")
    if is_beside:
        means["top1_agreement"] = columns["agreement"]
        # Not a number where a label has too few ids of the teacher.
        means |= {name: columns[name] for name in _SHARED if not np.isnan(columns[name]).any()}
        means["calibration_error_to_teacher"] = _signed_gaps(columns, "teacher")
    if is_whole:
        means |= {name: columns[name] for name in ("forward_kl", "reverse_kl", "teacher_entropy")}
        means["entropy_gap"] = columns["student_entropy"] - columns["teacher_entropy"]
    for name, values in means.items():
        figures |= _with_error(name, _bounds([values], weights))
    if is_beside:
        ends = 1 if is_whole else 2  # equal by construction
        diverged = _bounds([columns[kind] for kind in _DIVERGED[:ends]], weights)
        accepted = _bounds([columns[kind] for kind in _ACCEPTED[:ends]], weights)
        figures |= _with_error("js_divergence", diverged) | _with_error("acceptance", accepted)
        figures |= _of_blocks(columns, _ACCEPTED[:ends])
    figures["calibration"] = _reliability(columns)
    return figures


_Bounds = tuple[object, object]  # a mean and its error, or the ends of an interval and theirs


def _bounds(ends: Sequence[Figures], sizes: Figures) -> _Bounds:
    """A mean and its standard error, or lists of both for the two ends of an interval."""
    found = [ratio_of_sums(values, sizes) for values in ends]
    if len(found) == 1:
        return found[0]
    means, errors = ([one[place] for one in found] for place in (0, 1))
    return means, None if None in errors else errors


def _with_error(name: str, bounds: _Bounds) -> dict[str, object]:
    mean, error = bounds
    return {name: mean} if error is None else {name: mean, f"{name}_stderr": error}


def _of_blocks(columns: Mapping[str, Figures], kinds: Sequence[str]) -> dict[str, object]:
    """Expected tokens per verification by the length of the draft, and the blocks."""
    blocks = {str(length): columns[f"blocks@{length}"] for length in range(1, LONGEST_DRAFT + 1)}
    blocks = {length: counts for length, counts in blocks.items() if counts.any()}
    found = {
        length: _bounds([columns[f"{kind}@{length}"] for kind in kinds], counts)
        for length, counts in blocks.items()
    }
    return {
        "tokens_per_verification": {length: mean for length, (mean, _) in found.items()},
        "tokens_per_verification_stderr": {
            length: error for length, (_, error) in found.items() if error is not None
        },
        "blocks": {length: int(counts.sum()) for length, counts in blocks.items()},
    }


def _signed_gaps(columns: Mapping[str, Figures], right: str) -> Figures:
    """Of each text the gaps of the bins, with the sign that a bin has over all texts."""
    return signed_gaps(
        np.stack([columns[f"{right}@bin{n}"] - columns[f"confidence@bin{n}"] for n in range(BINS)])
    )


def _reliability(columns: Mapping[str, Figures]) -> list[dict[str, object]]:
    """One row per bin of confidence that has tokens."""
    rows = []
    for number in range(BINS):
        counts = columns[f"count@bin{number}"]
        if counts.any():
            row: dict[str, object] = {
                "from": number / BINS,
                "share": float(counts.sum() / columns["weight"].sum()),
                "confidence": float(columns[f"confidence@bin{number}"].sum() / counts.sum()),
            }
            right = _bounds([columns[f"label@bin{number}"]], counts)
            rows.append(row | _with_error("accuracy", right))
    return rows
