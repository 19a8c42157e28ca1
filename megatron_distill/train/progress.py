"""The progress of a run and of a capture on the screen.

A run shows losses that add up to the total, rates and held-out lines. A capture shows shards and
samples, rate, bytes per token, and its result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO, cast

from megatron_distill import log
from megatron_distill.errors import counted
from megatron_distill.log import get_logger
from megatron_distill.runtime.progress import (
    ProgressFigure,
    ProgressReporter,
    SecondsClock,
    duration,
    gigabytes,
    short_count,
    significant,
    size,
)
from megatron_distill.store import Manifest
from megatron_distill.train.metrics import MetricsRecord

__all__ = ["CaptureProgress", "Done", "TrainingProgress", "Work", "summary", "total_texts"]


_Part = tuple[str, float, float]  # label, weight in the total, loss
_SOURCE_LOSSES = (("ce_loss", "ce"), ("kd_loss", "kd"))
# Means over micro-batches with separate weights need not add up within rounding.
_ROUNDING = 1e-3


class TrainingProgress:
    """A sink that shows metrics on a progress bar of `stream`, or as lines.

    A line comes every `interval` steps, for the first step and for the last. `start_step` is the
    number of steps done before a resume; `ce_weight` is the weight for records without `balance`.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        start_step: int,
        interval: int = 1,
        ce_weight: float = 1.0,
        clock: SecondsClock = time.monotonic,
    ) -> None:
        self._ce_weight = ce_weight
        self._clock = clock
        self._record: MetricsRecord = {}
        self._validation: MetricsRecord = {}
        self._peak_memory = 0.0
        self._first: tuple[float, float] | None = None
        self._last = clock()
        self._total = total_steps
        self._reporter = ProgressReporter(
            stream, label="step", total=total_steps, done=start_step, every=interval, clock=clock
        )

    @property
    def stream(self) -> TextIO:
        """The stream for other log lines, so that they appear above a bar."""
        return self._reporter.stream

    @classmethod
    def on_screen(
        cls, *, total_steps: int, start_step: int, interval: int, ce_weight: float
    ) -> TrainingProgress:
        """Show progress on standard error, with the first rank's log lines above the bar."""
        progress = cls(
            sys.stderr,
            total_steps=total_steps,
            start_step=start_step,
            interval=interval,
            ce_weight=ce_weight,
        )
        log.configure(0, stream=progress.stream)
        return progress

    def write(self, record: MetricsRecord) -> None:
        """Show a step's record, or lines of a validation's or an evaluation's record."""
        evaluation = record.get("evaluation")
        if isinstance(evaluation, Mapping):
            self._reporter.line("\n".join(_evaluation_lines(record, evaluation)))
            return
        validation = record.get("validation")
        if isinstance(validation, Mapping):
            self._validation = validation
            self._reporter.line("\n".join(_validation_lines(record, validation)))
            return
        self._record, self._last = record, self._clock()
        self._peak_memory = max(self._peak_memory, _number(record, "peak_memory_bytes") or 0.0)
        if self._first is None:
            self._first = (self._last, _number(record, "tokens") or 0.0)
        self._reporter.update(cast(int, record["step"]), lambda: list(self._fields()))

    def close(self, *, failed: bool = False) -> None:
        """Remove the bar and write the closing line."""
        self._reporter.close()
        self._reporter.line(self._closing_line(failed=failed))

    def _fields(self) -> Iterator[ProgressFigure]:
        record = self._record
        long, *shorter = total_texts(record, ce_weight=self._ce_weight)
        yield ProgressFigure(long, shorter=tuple(shorter))
        balance = record.get("balance")
        for name in ("alpha", "kd_scale", "feature_scale"):
            value = _number(balance, name) if isinstance(balance, Mapping) else None
            if value is not None:
                yield ProgressFigure(f"{name} {value:.4g}", only_in_lines=True)
        losses = _teacher_losses(record)
        if losses:
            yield ProgressFigure(f"kd of {losses}", only_in_lines=True)
        for name, label, form in (
            ("grad_norm", "grad norm", ".3g"),
            ("learning_rate", "lr", ".2e"),
        ):
            value = _number(record, name)
            if value is not None:
                yield ProgressFigure(f"{label} {value:{form}}", only_in_lines=True)
        rate = _number(record, "tokens_per_second")
        if rate is not None:
            yield ProgressFigure(f"{short_count(rate)} tok/s")
        if self._peak_memory:
            yield ProgressFigure(gigabytes(self._peak_memory))

    def _mean_tokens_per_second(self) -> float | None:
        tokens = _number(self._record, "tokens")
        if self._first is None or tokens is None:
            return None
        then, first_tokens = self._first
        return (tokens - first_tokens) / (self._last - then) if self._last > then else None

    def _closing_line(self, *, failed: bool) -> str:
        step, total = self._reporter.done, self._total
        if not self._record and step < total:
            return f"no step was done, the run is at step {step} of {total}"
        if not self._record:
            done = f"{counted(step, 'step')} {'is' if step == 1 else 'are'} done"
            return f"no step was needed: {done}, the run has {total:,}"
        elapsed = duration(self._reporter.elapsed)
        parts = [
            f"finished {counted(step, 'step')} in {elapsed}"
            if step >= total and not failed  # the last save or evaluation may fail
            else f"stopped at step {step} of {total} after {elapsed}"
        ]
        tokens = _number(self._record, "tokens")
        if tokens is not None:
            parts.append(f"{short_count(tokens)} tokens")
        for label, record in (("ce", self._record), ("held-out ce", self._validation)):
            loss = _number(record, "ce_loss")
            if loss is not None:
                parts.append(f"{label} {loss:.4f}")
        rate = self._mean_tokens_per_second()
        if rate is not None:
            parts.append(f"{short_count(rate)} tokens/s")
        if self._peak_memory:
            parts.append(f"peak memory {gigabytes(self._peak_memory)}")
        return ", ".join(parts)


def total_texts(record: MetricsRecord, *, ce_weight: float) -> tuple[str, ...]:
    """Return the total loss of a step and its sum, `total_loss 3.0 = ce 2.0 + kd 1.0`.

    A part whose factor is not 1 is written as `kd 2*0.5`, in the second and shorter text as
    `w*kd 1.0`. The third is the total alone. Cross-entropy alone has no sum, and cross-entropy of
    weight 0 stands behind the sum.
    """
    raw = record.get("balance")
    balance = raw if isinstance(raw, Mapping) else {}
    ce_weight = balance.get("ce_weight", ce_weight)
    kd_weight = balance.get("alpha", 1.0) * balance.get("kd_scale", 1.0)
    parts: list[_Part] = []
    for name, label, weight in (
        ("ce_loss", "ce", ce_weight),
        ("kd_loss", "kd", kd_weight),
        ("features_loss", "features", kd_weight * balance.get("feature_scale", 1.0)),
    ):
        value = _number(record, name)
        # The file has a kd_loss of 0 without a teacher.
        if value is not None and (value != 0.0 or name == "ce_loss"):
            parts.append((label, weight, value))
    total = _number(record, "total_loss")
    if total is None or (len(parts) == 1 and ce_weight == 1.0):
        return ("  ".join(f"{label} {significant(value)}" for label, _, value in parts),)
    difference = abs(total - sum(weight * value for _, weight, value in parts))
    sign = "~" if difference > _ROUNDING * abs(total) else "="
    shown = f"total_loss {significant(total)}"
    summed = [part for part in parts if part[1] != 0.0]
    beside = [f"{label} {significant(value)}" for label, weight, value in parts if weight == 0.0]
    long = "  ".join([f"{shown} {sign} {_sum(summed, _factored)}", *beside])
    return long, f"{shown} {sign} {_sum(summed, _multiplied)}", shown


def _sum(parts: Sequence[_Part], text_of: Callable[[_Part], str]) -> str:
    return " + ".join(map(text_of, parts)) or "0"


def _factored(part: _Part) -> str:
    label, weight, value = part
    factor = "" if weight == 1.0 else f"{weight:.4g}*"
    return f"{label} {factor}{significant(value)}"


def _multiplied(part: _Part) -> str:
    label, weight, value = part
    return f"{'' if weight == 1.0 else 'w*'}{label} {significant(weight * value)}"


def _validation_lines(record: MetricsRecord, validation: MetricsRecord) -> Iterator[str]:
    parts = [f"step {record['step']} held-out:"]
    has_kd = bool(_number(validation, "kd_loss"))
    for name, label in (("ce_loss", "ce"), ("kd_loss", "kd")):
        value = _number(validation, name)
        if value is not None and (name != "kd_loss" or has_kd):
            parts.append(f"{label} {significant(value, 5)}")
    agreement = _number(validation, "top1_agreement")
    if agreement is not None:
        parts.append(f"top-1 agreement {agreement:.1%}")
    teacher = _number(validation, "teacher_ce_loss")
    if teacher is not None:
        parts.append(f"teacher ce {significant(teacher, 5)}")
    yield "  ".join(parts)
    losses = _teacher_losses(validation, digits=5)
    if losses:
        yield f"step {record['step']} held-out kd by teacher: {losses}"
    yield from _source_lines(record, validation)


def _evaluation_lines(record: MetricsRecord, evaluation: MetricsRecord) -> Iterator[str]:
    """One line per model: each task's usual measure, its error, and differences to teachers."""
    for role, results in evaluation.items():
        parts = [f"step {record['step']} {role}:"]
        for task, result in cast(Mapping[str, MetricsRecord], results).items():
            name = next(iter(result))
            value, error = _number(result, name), _number(result, f"{name}_stderr")
            if value is not None:
                around = "" if error is None else f" +- {error:.4f}"
                parts.append(f"{task} {name} {value:.4f}{around}{_minus(result, name)}")
        yield "  ".join(parts)


def _minus(result: MetricsRecord, name: str) -> str:
    """A student's difference to each teacher in parentheses, with its interval."""
    found = []
    for role, measures in cast(Mapping[str, MetricsRecord], result.get("minus", {})).items():
        one = cast(Mapping[str, float], measures.get(name, {}))
        if one:
            interval = f"{one['low']:+.4f} to {one['high']:+.4f}"
            found.append(f"minus {role} {one['difference']:+.4f}, 95 % {interval}")
    return f" ({'; '.join(found)})" if found else ""


def _teacher_losses(record: MetricsRecord, digits: int = 4) -> str:
    """Each teacher with its loss, where there are several; one without labels has none."""
    teachers = record.get("teachers")
    if not isinstance(teachers, Mapping):
        return ""
    losses = ((name, _number(figures, "kd_loss")) for name, figures in teachers.items())
    return ", ".join(
        f"{name} {significant(loss, digits)}" for name, loss in losses if loss is not None
    )


def _source_lines(record: MetricsRecord, validation: MetricsRecord) -> Iterator[str]:
    """One line with the held-out losses of all sources, where there are several."""
    sources = validation.get("sources")
    if not isinstance(sources, Mapping):
        return
    parts = []
    for name, figures in sources.items():
        losses = [(label, _number(figures, key)) for key, label in _SOURCE_LOSSES]
        known = [f"{label} {significant(loss, 5)}" for label, loss in losses if loss is not None]
        parts.append(f"{name} {' '.join(known) or '-'}")
    yield f"step {record['step']} held-out by source: {', '.join(parts)}"


def _number(record: MetricsRecord, name: str) -> float | None:
    value = record.get(name)
    return float(value) if isinstance(value, (int, float)) else None


_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class Work:
    """A job's work: its shards, the shards found at the start, samples to capture."""

    shards: int
    shards_before: int
    samples: int
    sequence_length: int


@dataclass(frozen=True)
class Done:
    """Progress of this start so far, over all replicas."""

    shards: int = 0
    samples: int = 0
    file_bytes: int = 0


class CaptureProgress:
    """Shows a capture on a bar of `stream`, or in a log line every 30 seconds."""

    def __init__(
        self,
        stream: TextIO,
        work: Work,
        *,
        samples_per_shard: int,
        clock: SecondsClock = time.monotonic,
    ) -> None:
        self._work = work
        self._samples_per_shard = samples_per_shard
        self._reporter = ProgressReporter(
            stream,
            label="samples",
            total=work.samples,
            write_line=lambda line: _LOGGER.info("%s", line),
            clock=clock,
        )

    @property
    def stream(self) -> TextIO:
        """The stream for other log lines, so that they appear above a bar."""
        return self._reporter.stream

    @classmethod
    def on_screen(cls, work: Work, *, samples_per_shard: int) -> CaptureProgress:
        """Show progress on standard error, with the first rank's log lines above the bar."""
        progress = cls(sys.stderr, work, samples_per_shard=samples_per_shard)
        log.configure(0, stream=progress.stream)
        return progress

    def update(self, done: Done) -> None:
        """Show the progress of the capture."""
        self._reporter.update(done.samples, lambda: list(self._fields(done)))

    def close(self, done: Done) -> None:
        """Remove the bar and write the last line."""
        self._reporter.close()
        self._reporter.count(done.samples)
        status = self._reporter.status(list(self._fields(done)))
        _LOGGER.info("%s  in %s", status, duration(self._reporter.elapsed))

    def _fields(self, done: Done) -> Iterator[ProgressFigure]:
        work = self._work
        yield ProgressFigure(f"shards {work.shards_before + done.shards}/{work.shards}")
        rate = self._reporter.per_second
        if rate is not None:
            yield ProgressFigure(f"{short_count(rate * work.sequence_length)} tok/s")
        if done.shards:
            # The last shard may be short; this estimate ignores it.
            tokens = min(done.shards * self._samples_per_shard, work.samples) * work.sequence_length
            yield ProgressFigure(f"{done.file_bytes / tokens:.1f} bytes/token")


def summary(folder: str, manifest: Manifest) -> str:
    """Return a one-line summary of a finished store."""
    totals, tokens = manifest.totals, manifest.tokens
    parts = [
        f"{folder}: {short_count(tokens)} tokens",
        size(manifest.file_bytes),
        f"{manifest.file_bytes / tokens:.1f} bytes/token",
    ]
    if totals.positions:
        if manifest.plan.settings.kind.is_ranked:
            parts.append(f"stored probability {totals.kept_mass / totals.positions:.4f}")
        parts.append(f"teacher's ce {-totals.label_log_prob / totals.positions:.4f}")
        parts.append(f"entropy {totals.entropy / totals.positions:.4f}")
    return ", ".join(parts)
