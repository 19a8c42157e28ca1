"""Held-out losses of the student and its teacher, and how often they agree."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_distill.data.loader import StepLoader
from megatron_distill.log import get_logger
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.signals import Teacher
from megatron_distill.train.metrics import LabelTotals, SourceFigures, name_of, part_of
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.optimizer import finish_gathers
from megatron_distill.train.step import Student, run_student

_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """Inputs of a validation.

    Attributes:
        steps: batches of the training's size.
        teacher: None if it has no signal for held-out samples.
        objective: cross-entropy only if there is no teacher.
    """

    steps: Sequence[StepBatches]
    teacher: Teacher | None
    objective: TokenObjective

    @classmethod
    def of(
        cls, steps: Sequence[StepBatches], teacher: Teacher | None, objective: TokenObjective
    ) -> HeldOut:
        """Held-out batches; the objective has a teacher's terms only if there is a teacher."""
        return cls(steps, teacher, objective if teacher else objective.of_labels())


def read_held_out(
    loader: StepLoader, *, samples: int, global_batch_size: int, names: Sequence[str]
) -> list[StepBatches]:
    """Read the held-out samples once; they stay in memory as batches of the training's size.

    `names` are those of their sources; one whose samples have no labels is warned of. Closes the
    loader. Raises DataError or StoreError on all ranks.
    """
    try:
        steps = -(-samples // global_batch_size)
        found = [loader.take(step) for step in range(1, steps + 1)]
    finally:
        loader.close()
    by_source = LabelTotals.of(found, tuple(names)).by_source if len(names) > 1 else {}
    empty = [name for name, counts in by_source.items() if not counts.ce and not counts.kd]
    if empty:
        _LOGGER.warning(
            "validation.samples=%d gives no held-out sample of %s; raise it, or the weight of "
            "the source",
            samples,
            ", ".join(empty),
        )
    return found


@torch.no_grad()
def validate(student: Student, held_out: HeldOut) -> tuple[dict[str, float], SourceFigures]:
    """Return the means over all held-out tokens, and per source, the same on every rank.

    The objective of each batch is a mean over that batch. So batches are combined by counts: `ce`
    and `teacher_ce` by trained labels, terms between two tokenizers by their chunks, the remaining
    values by distilled positions. A single source has no separate means.

    Collective: per held-out batch, those of the teacher's pass and of `run_student`.
    """
    teacher, objective = held_out.teacher, held_out.objective
    sums: dict[str, torch.Tensor] = {}
    on_chunks = objective.on_chunks
    held = LabelTotals.of(held_out.steps, objective.source_names, on_chunks)
    with evaluating(student):
        for step in held_out.steps:
            batches = step.micro_batches
            objectives = [objective] * len(batches)
            with student.timers.passing():
                signals = teacher.signals(batches) if teacher else [None] * len(batches)
                means = run_student(student, signals, objectives, step, forward_only=True)
            batch_totals = LabelTotals.of([step], (), on_chunks)
            for key, mean in means.items():
                # A source's entry, like the rest, is a share of the whole batch.
                share = part_of(batch_totals.behind(name_of(key)), held.behind(key))
                sums[key] = sums.get(key, torch.zeros_like(mean)) + mean * share
    keys = list(sums)
    found = dict(zip(keys, torch.stack([sums[key] for key in keys]).tolist(), strict=True))
    return held.nested(found)


@contextmanager
def evaluating(student: Student) -> Iterator[None]:
    """Put the student in evaluation mode, with the parameters of the last step gathered."""
    gathered = [chunk for chunk in student.wrapped if chunk.ddp_config.overlap_param_gather]
    # With an earlier gather under way, Megatron would wait for that one and not start another.
    finish_gathers(gathered)
    for chunk in gathered:
        if chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook()
    for chunk in student.wrapped:
        chunk.eval()
    try:
        yield
    finally:
        for chunk in student.wrapped:
            chunk.train()
        for chunk in gathered:
            if not chunk.remove_forward_pre_hook_handles:
                chunk.enable_forward_pre_hook()


def logged_records(log: Path, kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a log of metrics that have this key, of whole lines alone."""
    if not log.is_file():
        return
    for line in log.read_text(encoding="utf-8").split("\n")[:-1]:
        if f'"{kind}"' in line:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # torn by a kill; the log drops it
            if isinstance(record, dict) and kind in record:
                yield record


def logged_validation(output: str | Path, step: int) -> Mapping[str, Any] | None:
    """Return the figures of a step's validation in the log of a run, None where it has none."""
    records = logged_records(Path(output) / "metrics.jsonl", "validation")
    of_step = (one for one in records if one["step"] == step)
    return next((one["validation"] for one in of_step), None)
