"""The training loop: take batches, step with the teacher's signals, log, validate, save."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import TracebackType
from typing import Final

import torch

from megatron_distill.data.prefetch import StepSource
from megatron_distill.errors import ConfigError, MegatronDistillError, TrainingError, counted
from megatron_distill.evaluation.requests import Interrupted
from megatron_distill.log import get_logger
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.collectives import agree, highest
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.termination import TerminationRequest
from megatron_distill.signals import Signals, Teacher
from megatron_distill.train.balancing import Balancing, ClampWatch
from megatron_distill.train.checkpoint.best import BestRule
from megatron_distill.train.evaluation.phase import Evaluated, RunEvaluation, named_measures
from megatron_distill.train.metrics import LabelTotals, MetricsLog, part_of, public_names
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.phase_report import PhaseReports
from megatron_distill.train.phase_timers import COMMUNICATION, DATA, TEACHER
from megatron_distill.train.profile import StepProfiler
from megatron_distill.train.run_state import RunState
from megatron_distill.train.start_clock import StartClock
from megatron_distill.train.step import PROJECTOR_NORM, StepReport, train_step
from megatron_distill.train.teachers.own_ranks import OwnRanksTeacher
from megatron_distill.train.teachers.several import on_own_ranks
from megatron_distill.train.throughput import PeakMemory, Throughput
from megatron_distill.train.validation import HeldOut, validate


@dataclass
class StepGarbage:
    """A block without automatic collections; `after_step` collects every `interval` steps.

    An automatic collection stops one rank at a time, and with it all ranks that wait for it.
    """

    interval: int = 50
    _was_enabled: bool = False

    def __enter__(self) -> StepGarbage:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect, if the step is one of those on which all ranks do."""
        if step % self.interval == 0:
            gc.collect()


_LOGGER = get_logger(__name__)
_LOGGED_ROUTES: Final = 32  # of a step's record, which a large launch would make long


@dataclass(frozen=True)
class LoopPlan:
    """Schedule of the loop. Intervals are in steps; 0 means only at the end of the run."""

    steps: int
    validation_interval: int
    checkpoint_interval: int
    save: bool
    clip_grad_norm: float
    max_bad_steps: int
    best: BestRule | None = None


@dataclass(frozen=True)
class LoopInputs:
    """Inputs of the loop; the loader and the run state are its only mutable parts.

    logged_validation: the figures of the resumed step's, where the log has them.
    """

    state: RunState
    teacher: Teacher | None
    objective: TokenObjective
    balancing: Balancing
    loader: StepSource
    held_out: HeldOut
    metrics: MetricsLog
    throughput: Throughput
    reports: PhaseReports
    profiler: StepProfiler
    memory: PeakMemory
    evaluation: RunEvaluation | None = None
    logged_validation: Mapping[str, object] | None = None


class _Vote(IntEnum):
    """A rank's vote after a step; all ranks follow the largest vote."""

    GO_ON = 0
    STOP = 1
    FAIL = 2


def train(
    parts: LoopInputs, plan: LoopPlan, termination: TerminationRequest, clock: StartClock
) -> bool:
    """Train from the state's step to the plan's last; return whether it got there.

    A validation and an evaluation that an earlier start owes come first, the latter also where no
    step is left. Before them the disk must have room for a checkpoint, which steps would be lost
    without.
    A termination signal on any rank ends the loop after the current step, which is saved.
    Raises TrainingError when more than `max_bad_steps` steps were not finite, ConfigError when the
    log can no longer be written, and CheckpointError when there is no room or a save fails.

    Collective: those of the parts, and per step one all-reduce in the world. It has 16 bytes and 8
    for each route from teachers on ranks of their own.
    """
    log = _Log(parts.metrics)
    try:
        if plan.save and parts.state.step < plan.steps:
            parts.state.require_room()
        with StepGarbage() as garbage:
            stopped = _train(parts, plan, termination, log, garbage, clock)
        agree(log.failure)
    except MegatronDistillError:
        # All ranks raise together, and the checkpoint being written is of a step that went well.
        parts.state.checkpoints.finish()
        raise
    parts.state.checkpoints.finish()
    if stopped:
        _LOGGER.info("stopped by a signal after step %d", parts.state.step)
    return parts.state.step >= plan.steps


def _train(
    parts: LoopInputs,
    plan: LoopPlan,
    termination: TerminationRequest,
    log: _Log,
    garbage: StepGarbage,
    clock: StartClock,
) -> bool:
    """Step until the last step or until a signal; return whether a signal was the reason."""
    state, timers = parts.state, parts.state.student.timers
    watch = ClampWatch(parts.balancing.ratios.clamp)
    stopping = _measured_before(parts, plan, log)
    first = state.step + 1
    while state.step < plan.steps and not stopping:
        step = state.step + 1
        parts.profiler.before_step(step)
        started = time.perf_counter()
        timers.start_step(step)
        with timers.phase(DATA):
            batches = parts.loader.take(step)
        report, balance = _distil(parts, batches, plan)
        state.advance(batches, applied=report.applied)
        _check_step(report, batches, state, plan)
        if report.applied and torch.distributed.get_rank() == 0:
            for warning in watch.observe(balance):
                _LOGGER.warning("%s", warning)
        with timers.phase(COMMUNICATION):
            stopping, peak_bytes, answers = _vote(termination, log, parts)
        phases = timers.end_step()
        seconds = time.perf_counter() - started
        last = step == plan.steps
        parts.profiler.after_step(step)
        record = _record(parts, report, batches, seconds, phases, peak_bytes)
        record |= {"answer_bytes": answers} if answers else {}
        if step == first:
            _tell_start(clock, state, seconds)
            record["device"] = parts.throughput.device
        log.write({**record, "balance": dict(balance)} if balance else record)
        # A validation may take longer than the time that the signal leaves. The last one is not
        # made up by a later start, and comes first.
        saved = plan.save and stopping and not last and _validates(parts, plan, step)
        if saved:
            state.save(parts.loader)
            state.checkpoints.finish()
        measures, interrupted = _measures(parts, plan, log, step, stopping=stopping)
        stopping = stopping or interrupted
        is_best = state.note_best(plan.best, measures)
        is_due = not saved and (last or stopping or _due(step, plan.checkpoint_interval))
        if plan.save and (is_best or is_due):
            state.save(parts.loader)
        state.checkpoints.poll()
        garbage.after_step(step)
    return stopping


def _tell_start(clock: StartClock, state: RunState, seconds: float) -> None:
    line = clock.line(load_seconds=state.load_seconds, step_seconds=seconds)
    if line is not None:
        _LOGGER.info("%s", line)


def _measured_before(parts: LoopInputs, plan: LoopPlan, log: _Log) -> bool:
    """Measure what an earlier start owes before the first step; return whether a signal ended it.

    A step whose measures are made up may be the best: it is saved again, as the best.
    """
    state, found = parts.state, Evaluated()
    measures = _validated_before(parts, plan, log)
    if parts.evaluation is not None:
        try:
            with parts.memory.left_out():
                found = parts.evaluation.before_training(state.step, last_step=plan.steps)
        except Interrupted:
            return True
    measures |= named_measures(found.results)
    if state.step and state.note_best(plan.best, measures) and plan.save:
        state.save(parts.loader)
    if found.results:
        # Logged last: a start that is killed before evaluates again.
        log.write(found.record(state.step))
    elif state.step >= plan.steps:
        done = f"{counted(state.step, 'step')} {'is' if state.step == 1 else 'are'} done"
        _LOGGER.info("nothing to do: %s, train.steps is %d", done, plan.steps)
    return False


def _validated_before(parts: LoopInputs, plan: LoopPlan, log: _Log) -> dict[str, float]:
    """Return the measures of the resumed step's validation, made up where none is logged.

    A stop saves before it validates, and a kill may end it there, or before it saves the best.
    """
    step = parts.state.step
    if not 0 < step < plan.steps or not _validates(parts, plan, step):
        return {}
    if parts.logged_validation is not None:
        return _validation_measures(parts.logged_validation)
    return _validated(parts, plan, log)


def _validated(parts: LoopInputs, plan: LoopPlan, log: _Log) -> dict[str, float]:
    """Validate after the state's step, log the figures, and return the measures by name."""
    began = time.perf_counter()
    validation = _validation(parts)
    seconds = time.perf_counter() - began
    log.write({"step": parts.state.step, "validation": validation, "validation_seconds": seconds})
    found = _validation_measures(validation)
    missing = "" if plan.best is None else plan.best.missing_figure(found)
    if missing and torch.distributed.get_rank() == 0:
        _LOGGER.warning("%s", missing)
    return found


def _validation_measures(validation: Mapping[str, object]) -> dict[str, float]:
    numbers = {name: value for name, value in validation.items() if isinstance(value, float)}
    return {f"validation.{name}": value for name, value in numbers.items()}


def _measures(
    parts: LoopInputs, plan: LoopPlan, log: _Log, step: int, *, stopping: bool
) -> tuple[dict[str, float], bool]:
    """Validate and evaluate after a step, where they are due, and log both.

    Returns the measures by name, and whether a signal ended the evaluation.
    """
    found: dict[str, float] = {}
    is_end = step == plan.steps
    if _validates(parts, plan, step):
        found |= _validated(parts, plan, log)
    evaluation = parts.evaluation
    if evaluation is None or stopping:  # a signal came before it began
        return found, False
    if evaluation.is_due(step, is_last=is_end):
        try:
            with parts.memory.left_out():
                evaluated = evaluation.after_step()
        except Interrupted:
            return found, True
        except MegatronDistillError as error:
            # All ranks raise together. A later start begins with this evaluation.
            if torch.distributed.get_rank() == 0:  # the save may fail too, with its own error
                _LOGGER.warning("the evaluation after step %d failed: %s", step, error)
            parts.state.note_best(plan.best, found)
            if plan.save:
                parts.state.save(parts.loader)
            raise
        log.write(evaluated.record(step))
        found |= named_measures(evaluated.results)
    return found, False


class _Log:
    """The metrics log; a write error on the writing rank is held until the next vote."""

    def __init__(self, metrics: MetricsLog) -> None:
        self._metrics = metrics
        self.failure: MegatronDistillError | None = None

    def write(self, record: dict[str, object]) -> None:
        if self.failure is None:
            try:
                self._metrics.write(record)
            except ConfigError as error:
                self.failure = error


def _vote(
    termination: TerminationRequest, log: _Log, parts: LoopInputs
) -> tuple[bool, int, dict[str, int]]:
    """Return whether to stop, the largest peak memory of any rank, and the bytes of answers."""
    vote = _Vote.STOP if termination.received else _Vote.GO_ON
    vote = _Vote.FAIL if log.failure else vote
    memory, remotes = parts.memory, on_own_ranks(parts.teacher)
    # A route ends on one rank: zero everywhere else.
    own = [count for one in remotes.values() for count in one.received_bytes()]
    verdict, peak_bytes, *found = highest(vote, memory.bytes, *own, device=memory.device)
    if verdict == _Vote.FAIL:
        agree(log.failure)
    return verdict == _Vote.STOP, peak_bytes, _answer_bytes(remotes, found)


def _answer_bytes(remotes: Mapping[str, OwnRanksTeacher], counts: Sequence[int]) -> dict[str, int]:
    """Return the bytes of a step's answers by route, of many routes by teacher."""
    routes = [(name, route) for name, one in remotes.items() for route in one.routes]
    found: dict[str, int] = {}
    for (name, route), count in zip(routes, counts, strict=True):
        key = route if len(routes) <= _LOGGED_ROUTES else name
        found[key] = found.get(key, 0) + count
    return found


def _validates(parts: LoopInputs, plan: LoopPlan, step: int) -> bool:
    is_due = step == plan.steps or _due(step, plan.validation_interval)
    return bool(parts.held_out.steps) and is_due


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def _distil(
    parts: LoopInputs, batches: StepBatches, plan: LoopPlan
) -> tuple[StepReport, Mapping[str, float]]:
    """Return the step's report and its logged weights."""
    state = parts.state
    signals = _signals(parts, batches)
    balanced = parts.balancing.prepare(
        state.student,
        signals,
        parts.objective,
        batches,
        steps_done=state.step,
        state=state.balance,
    )
    report = train_step(
        state.student,
        state.optimizer,
        state.schedule,
        signals,
        balanced.objectives,
        batches,
        clip_grad_norm=plan.clip_grad_norm,
        late=balanced,
    )
    state.balance, report, weights = parts.balancing.finish(balanced, report)
    return report, weights


def _signals(parts: LoopInputs, batches: StepBatches) -> Signals:
    """Return the teacher's signals; those computed during the schedule are timed there."""
    micro_batches, timers = batches.micro_batches, parts.state.student.timers
    if parts.teacher is None:
        return [None] * len(micro_batches)
    with timers.phase(TEACHER):
        signals = parts.teacher.signals(micro_batches)
    signals = timers.of_teacher(signals)
    # Taken twice, a signal is kept: a second forward pass of the teacher takes longer than any
    # other part of the step, its hidden states take as much memory as with pipeline stages.
    return list(signals) if parts.balancing.runs_student_twice(parts.state.balance) else signals


def _check_step(report: StepReport, batches: StepBatches, state: RunState, plan: LoopPlan) -> None:
    """Warn of a step that was not applied; raise TrainingError when there are too many."""
    if report.applied:
        return
    samples = ", ".join(map(str, _sample_ids(batches, state.student.groups)))
    projector_norm = report.values.get(PROJECTOR_NORM)
    message = (
        f"step {state.step}: the loss is {report.values['total']} and the gradient norm "
        f"{report.grad_norm}"
        + (f", that of the projectors {projector_norm}" if projector_norm is not None else "")
        + f"; the step was not applied (samples {samples} of the stream)"
    )
    if state.bad_steps > plan.max_bad_steps:
        raise TrainingError(
            f"{message}. The run had {counted(state.bad_steps, 'such step')}, "
            f"train.max_bad_steps={plan.max_bad_steps}; lower optimizer.learning_rate, look at "
            "those samples, or allow more such steps"
        )
    _LOGGER.warning("%s", message)


def _sample_ids(batches: StepBatches, groups: Groups) -> list[int]:
    """Return the sample ids of the whole global batch; called after a failing step only."""
    local = torch.cat([batch.sample_ids_b for batch in batches.micro_batches]).tolist()
    gathered: list[list[int]] = [[] for _ in range(groups.data.size())]
    torch.distributed.all_gather_object(gathered, local, group=groups.data)
    return sorted(number for part in gathered for number in part)


def _record(
    parts: LoopInputs,
    report: StepReport,
    batches: StepBatches,
    seconds: float,
    phases: Mapping[str, float],
    peak_bytes: int,
) -> dict[str, object]:
    state, values = parts.state, public_names(report.values)
    milliseconds = {phase: 1000.0 * time for phase, time in phases.items()}
    record: dict[str, object] = {
        "step": state.step,
        "tokens": state.tokens,
        "ce_loss": values.pop("ce_loss"),
        "kd_loss": values.pop("kd_loss", 0.0),
        "total_loss": values.pop("total_loss"),
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        **parts.throughput.figures(seconds),
        "step_seconds": seconds,
        "teacher_seconds": phases[TEACHER],
        "timers": milliseconds,
        **parts.reports.after_step(state.step, milliseconds),
        "peak_memory_bytes": peak_bytes,
        **values,
    }
    if batches.chunks:
        record["chunks"] = batches.chunks
        record["aligned_labels"] = part_of(batches.chunk_labels, batches.ce_tokens)
        record["data_wait"] = part_of(phases[DATA], seconds)
    if batches.coverage:
        record["coverage"] = dict(batches.coverage)
    if report.sources:
        record["sources"] = report.sources
    if report.teachers:
        record["teachers"] = report.teachers
    if not report.applied:
        record["skipped"] = True
    return record


def _validation(parts: LoopInputs) -> dict[str, object]:
    means, sources = validate(parts.state.student, parts.held_out)
    counts = LabelTotals.of(parts.held_out.steps, ()).whole
    teachers = parts.held_out.objective.take_teacher_figures(means, counts)
    values = public_names(means)
    found: dict[str, object] = {"ce_loss": values.pop("ce_loss")}
    # A stored teacher has no records of held-out samples: its loss there is unknown, not zero.
    if parts.teacher is None or "kd_loss" in values:
        found["kd_loss"] = values.pop("kd_loss", 0.0)
    del values["total_loss"]  # computed with the last step's weights
    found |= values
    found |= {"sources": sources} if sources else {}
    return found | ({"teachers": teachers} if teachers else {})
