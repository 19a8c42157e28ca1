"""Held-out comparison of a student and its teacher: agreement, calibration, draft acceptance.

A block of g drafted tokens yields ``1 + a_1 + a_1 a_2 + ... + a_1 ... a_g`` tokens on average, with
the acceptance a_i of each position (Leviathan et al. 2023). It is averaged over all blocks of the
text, because the acceptance of neighbours is correlated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.losses import Term
from megatron_distill.losses.comparison import (
    TokenComparison,
    compare_student,
    compare_with_ids,
    compare_with_logits,
)
from megatron_distill.models.gpt import hidden_for_head
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.runtime.batch import Batch, StepBatches, zigzag_index
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import HiddenState, Signal, TopK
from megatron_distill.train.calibration import BINS, Figures, equal_mass_errors, token_figures
from megatron_distill.train.features import FeatureLosses
from megatron_distill.train.objective import Head
from megatron_distill.train.step import Student, run_student
from megatron_distill.train.validation import HeldOut, evaluating

__all__ = [
    "LONGEST_DRAFT",
    "SUM_NAMES",
    "block_sums",
    "compare_held_out",
    "summary_of",
    "token_sums",
]

LONGEST_DRAFT: Final = 8
_AT_ONE = Term(divergence="forward_kl", support="tail")
_FIGURES = ("label_nll", "brier", "student_entropy", "teacher_entropy", "forward_kl", "reverse_kl")
_ACCEPTED = ("overlap", "overlap_most")
_OF_BIN = ("count", "confidence", "label", "teacher")


def _names() -> tuple[str, ...]:
    blocks = [
        f"{name}@{length}"
        for length in range(1, LONGEST_DRAFT + 1)
        for name in ("blocks", *_ACCEPTED)
    ]
    bins = [f"{name}@bin{number}" for name in _OF_BIN for number in range(BINS)]
    weights = ("tokens", "weight", "weight_beside", "weight_whole")
    return (*weights, *_FIGURES, "agreement", *_ACCEPTED, *blocks, *bins)


SUM_NAMES: Final = _names()
_COUNTS: Final = frozenset(
    name for name in SUM_NAMES if name == "tokens" or name.startswith("blocks@")
)


@torch.no_grad()
def compare_held_out(student: Student, held_out: HeldOut) -> dict[str, object]:
    """Return the figures of the student against labels and teacher, the same on every rank.

    A teacher with another tokenizer, several teachers, and a store without top-k at temperature one
    leave out what needs the teacher's probabilities. A top-k store bounds the acceptance.

    Collective: per held-out batch, those of the teacher's pass and of `run_student`; at the end
    those of `equal_mass_errors`.
    """
    objective = _Comparison(
        held_out.objective.shard, held_out.objective.logit_rule, held_out.objective.groups
    )
    beside = held_out.objective.aligned is None and held_out.objective.several is None
    teacher = held_out.teacher if beside else None
    sums = dict.fromkeys(SUM_NAMES, 0.0)
    with evaluating(student):
        for step in held_out.steps:
            batches = step.micro_batches
            signals = teacher.signals(batches) if teacher else [None] * len(batches)
            found = run_student(
                student, signals, [objective] * len(batches), step, forward_only=True
            )
            values = torch.stack([found[name] for name in SUM_NAMES]).tolist()
            for name, value in zip(SUM_NAMES, values, strict=True):
                whole = value * step.positions  # the report has the quotient, in single precision
                sums[name] += round(whole) if name in _COUNTS else whole
    return summary_of(sums) | equal_mass_errors(objective.tokens, objective.groups)


@dataclass(frozen=True)
class _Comparison:
    """A `MicroBatchObjective` without a loss, whose report holds sums over tokens and blocks.

    All are divided by the positions of the global batch, which is the same for every batch.
    `tokens` gets the figures of each micro-batch's tokens.
    """

    shard: VocabShard
    logit_rule: LogitRule
    groups: Groups
    features: FeatureLosses | None = None
    feature_weights: tuple[float, ...] = ()
    report_names: tuple[str, ...] = ("total", *SUM_NAMES)
    source_report_names: tuple[str, ...] = ()
    tokens: list[Figures] = field(default_factory=list)

    def __call__(
        self,
        hidden_sbh: Tensor,
        head: Head,
        batch: Batch,
        signal: Signal | None,
        step: StepBatches,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `MicroBatchObjective`.

        Collective: those of `hidden_for_head` and of the comparison; context group, one all-gather
        of 24 bytes per token.
        """
        rows = batch.trained_rows_n
        if rows is None:
            rows = (batch.ce_mask_bs | batch.kd_mask_bs).reshape(-1).nonzero().squeeze(1)
        rule = self.logit_rule
        own = HiddenState(
            hidden_for_head(hidden_sbh, groups=self.groups),
            head.head_weight(),
            rule.softcap,
            rule.scale,
        )
        found = self._compare(own, signal, batch.labels_bs.reshape(-1), rows)
        weights = batch.kd_weights_bs.reshape(-1)[rows].double()
        self.tokens.append(token_figures(found, weights))
        sums = token_sums(found, weights) | self._block_sums(found, weights, rows, batch)
        report = {
            name: (sums[name] / step.positions).float() if name in sums else weights.new_zeros(())
            for name in SUM_NAMES
        }
        return hidden_sbh.new_zeros((), dtype=torch.float32), {
            name: value.float() for name, value in report.items()
        }

    def _compare(
        self, own: HiddenState, signal: Signal | None, labels: Tensor, rows: Tensor
    ) -> TokenComparison:
        shard, group = self.shard, self.groups.tensor
        source = None if signal is None else signal.logit_source()
        if source is not None:
            return compare_with_logits(own, source, labels, rows, shard=shard, group=group)
        ids = None if signal is None else _topk(signal)
        if ids is not None:
            return compare_with_ids(own, ids, labels, rows, shard=shard, group=group)
        return compare_student(own, labels, rows, shard=shard, group=group)

    def _block_sums(
        self, found: TokenComparison, weights: Tensor, rows: Tensor, batch: Batch
    ) -> dict[str, Tensor]:
        """Sums over the blocks that begin at this rank's positions, by their length."""
        if found.overlap is None or found.overlap_most is None:
            return {}
        shape = batch.tokens_bs.shape
        local = weights.new_zeros(3, shape[0] * shape[1])
        local[:, rows] = torch.stack(
            [(weights > 0).to(weights.dtype), found.overlap, found.overlap_most]
        )
        fields = self._whole(local.view(3, *shape))
        begins_bS = torch.zeros_like(fields[0], dtype=torch.bool)
        begins_bS.index_fill_(1, batch.sequence_index_s, True)
        return block_sums(fields[0] > 0, begins_bS, batch.document_ids_bS, fields[1], fields[2])

    def _whole(self, local_fbs: Tensor) -> Tensor:
        """Fields ``[f, b, S]`` of the whole sequence from those of each context rank."""
        size = self.groups.context.size()
        if size == 1:
            return local_fbs
        parts = [torch.empty_like(local_fbs) for _ in range(size)]
        dist.all_gather(parts, local_fbs.contiguous(), group=self.groups.context)
        length = local_fbs.shape[2] * size
        whole = local_fbs.new_empty(*local_fbs.shape[:2], length)
        for rank, part in enumerate(parts):
            index = zigzag_index(length, rank=rank, size=size, device=local_fbs.device)
            whole[:, :, index] = part
        return whole


def _topk(signal: Signal) -> TopK | None:
    try:
        targets = signal.targets([_AT_ONE])
    except ValueError:  # draws, or a top-k at another temperature
        return None
    (target,) = targets or (None,)
    return target if isinstance(target, TopK) else None


def token_sums(found: TokenComparison, weights: Tensor) -> dict[str, Tensor]:
    """Number of the tokens with a weight, and weighted sums over them, scalars by name."""
    sums = {"tokens": (weights > 0).sum(), "weight": weights.sum()}
    for name in (*_FIGURES, *_ACCEPTED):
        values = getattr(found, name)
        if values is not None:
            # A token of weight zero may hold anything.
            sums[name] = (weights * values.masked_fill(weights == 0, 0.0)).sum()
    if found.forward_kl is not None:
        sums["weight_whole"] = weights.sum()
    agrees = None
    if found.teacher_top is not None:
        sums["weight_beside"] = weights.sum()
        agrees = (found.student_top == found.teacher_top).to(weights.dtype)
        sums["agreement"] = (weights * agrees).sum()
    return sums | _bin_sums(found, weights, agrees)


def _bin_sums(found: TokenComparison, weights: Tensor, agrees: Tensor | None) -> dict[str, Tensor]:
    """Tokens by the student's confidence: count, confidence, and how often its top id is right."""
    bins = (found.confidence * BINS).long().clamp_(0, BINS - 1)
    values = {
        "count": weights,
        "confidence": weights * found.confidence,
        "label": weights * found.is_label.to(weights.dtype),
        "teacher": weights * agrees if agrees is not None else torch.zeros_like(weights),
    }
    sums: dict[str, Tensor] = {}
    for name, value in values.items():
        by_bin = weights.new_zeros(BINS).index_add_(0, bins, value)
        sums |= {f"{name}@bin{number}": one for number, one in enumerate(by_bin.unbind())}
    return sums


def block_sums(
    valid_bS: Tensor,
    begins_bS: Tensor,
    documents_bS: Tensor,
    least_bS: Tensor,
    most_bS: Tensor,
) -> dict[str, Tensor]:
    """Number of blocks within a document, and their expected tokens, by length."""
    sums: dict[str, Tensor] = {}
    inside = begins_bS
    reached = {name: torch.ones_like(least_bS) for name in _ACCEPTED}
    expected = {name: torch.ones_like(least_bS) for name in _ACCEPTED}
    accepted = dict(zip(_ACCEPTED, (least_bS, most_bS), strict=True))
    for length in range(1, min(LONGEST_DRAFT, valid_bS.shape[1]) + 1):
        last = length - 1
        starts = valid_bS.shape[1] - last
        same = documents_bS[:, :starts] == documents_bS[:, last:]
        inside = inside[:, :starts] & valid_bS[:, last:] & same
        sums[f"blocks@{length}"] = inside.sum()
        for name, acceptance in accepted.items():
            reached[name] = reached[name][:, :starts] * acceptance[:, last:]
            expected[name] = expected[name][:, :starts] + reached[name]
            sums[f"{name}@{length}"] = (expected[name] * inside).sum()
    return sums


def summary_of(sums: Mapping[str, float]) -> dict[str, object]:
    """The means and counts, under their public names, from sums under those of `SUM_NAMES`."""
    weight = sums["weight"]
    if not weight:
        return {}
    figures: dict[str, object] = {"tokens": int(sums["tokens"])}
    figures |= {name: sums[name] / weight for name in ("label_nll", "brier", "student_entropy")}
    figures["calibration_error"] = _calibration_error(sums, "label")
    if sums["weight_beside"]:
        figures["top1_agreement"] = sums["agreement"] / weight
        figures["calibration_error_to_teacher"] = _calibration_error(sums, "teacher")
    if sums["weight_whole"]:
        whole = {name: sums[name] / weight for name in ("forward_kl", "reverse_kl")}
        teacher_entropy = sums["teacher_entropy"] / weight
        gap = sums["student_entropy"] / weight - teacher_entropy
        figures |= {**whole, "teacher_entropy": teacher_entropy, "entropy_gap": gap}
    if sums["weight_beside"]:
        point = bool(sums["weight_whole"])
        figures["acceptance"] = _interval([sums[name] / weight for name in _ACCEPTED], point=point)
        counts = {length: int(sums[f"blocks@{length}"]) for length in range(1, LONGEST_DRAFT + 1)}
        blocks = {length: count for length, count in counts.items() if count}
        figures["tokens_per_verification"] = {
            str(length): _interval(
                [sums[f"{name}@{length}"] / count for name in _ACCEPTED], point=point
            )
            for length, count in blocks.items()
        }
        figures["blocks"] = {str(length): count for length, count in blocks.items()}
    figures["calibration"] = _reliability(sums)
    return figures


def _interval(bounds: Sequence[float], *, point: bool) -> object:
    """One number where both bounds are the same by construction."""
    return bounds[0] if point else list(bounds)


def _calibration_error(sums: Mapping[str, float], right: str) -> float:
    gaps = (abs(sums[f"{right}@bin{n}"] - sums[f"confidence@bin{n}"]) for n in range(BINS))
    return sum(gaps) / sums["weight"]


def _reliability(sums: Mapping[str, float]) -> list[dict[str, float]]:
    """One row per bin of confidence that has tokens."""
    return [
        {
            "from": number / BINS,
            "share": count / sums["weight"],
            "confidence": sums[f"confidence@bin{number}"] / count,
            "accuracy": sums[f"label@bin{number}"] / count,
        }
        for number in range(BINS)
        if (count := sums[f"count@bin{number}"])
    ]
