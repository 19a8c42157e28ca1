"""Steps of one student from a store and from memory, in turns; started by benchmarks/store.py."""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from benchmarks.harness.quiet import busy_seconds
from benchmarks.steps.cases import Case
from benchmarks.stores.data import MadeUpSample, made_up_sample, record_of
from benchmarks.stores.planned import TRAINED
from benchmarks.stores.sizes import write_store
from megatron_distill.runtime.batch import StepBatches
from megatron_distill.runtime.launch import joined_world
from megatron_distill.runtime.torchrun import threads_per_process
from megatron_distill.store import CaptureSettings, SampleRecord, StoreReader, StoreSet

if TYPE_CHECKING:
    from megatron_distill.data.samples import State
    from megatron_distill.runtime.groups import Groups
    from megatron_distill.signals import Signals
    from megatron_distill.train.objective import TokenObjective
    from megatron_distill.train.step import Student

_TIMEOUT_SECONDS: Final = 600


@dataclass(frozen=True)
class Loaded:
    """Preloaded steps, as the source of a `Lookahead`."""

    steps: Sequence[StepBatches]

    def take(self, step: int) -> StepBatches:
        """The micro-batches of a step, counted from 1."""
        return self.steps[step - 1]

    def state_dict(self) -> State:
        """Empty: there is no resume here."""
        return {}


@dataclass(frozen=True)
class Steps:
    """The parts of some steps, except the teacher."""

    case: Case
    student: Student
    optimizer: Any
    schedule: Any
    objective: TokenObjective
    phases: list[dict[str, float]]

    def take(self, batches: StepBatches, signals: Signals) -> float:
        """One optimizer step; its loss. The seconds of its phases are added to `phases`."""
        from benchmarks.steps.subject import OPTIMIZER
        from megatron_distill.train.step import train_step

        timers = self.student.timers
        timers.start_step()
        report = train_step(
            self.student,
            self.optimizer,
            self.schedule,
            timers.of_teacher(signals),
            [self.objective] * len(signals),
            batches,
            clip_grad_norm=OPTIMIZER.clip_grad_norm,
        )
        self.phases.append(timers.end_step())
        return report.values["kd"]

    def median_phases(self, first: int) -> dict[str, float]:
        """Median seconds of each phase, without the `first` steps, which warm up."""
        counted = self.phases[first:]
        return {name: median(one[name] for one in counted) for name in counted[0]}


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", choices=TRAINED, required=True)
    parser.add_argument("--k", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="in a row, of each subject")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    case = TRAINED[given.workload]
    with (
        joined_world(
            device="cpu",
            backend="gloo",
            threads=threads_per_process(1),
            timeout_seconds=_TIMEOUT_SECONDS,
        ) as device,
        tempfile.TemporaryDirectory(dir=given.folder) as place,
    ):
        result = _measure(case, given, Path(place), device.torch_device)
    given.result.write_text(json.dumps(result), encoding="utf-8")


def _measure(
    case: Case, given: argparse.Namespace, place: Path, device: torch.device
) -> dict[str, Any]:
    from megatron_distill.data.prefetch import Lookahead
    from megatron_distill.losses import Term
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything
    from megatron_distill.train.teachers.stored import StoredTeacher

    groups = create_groups(Layout(), timeout_minutes=_TIMEOUT_SECONDS // 60)
    seed_everything(1, groups)
    term = Term("forward_kl")
    steps = _steps(case, term, groups, device)
    records = _records(case, given.k, given.steps)
    reader, settings = _stored(case, given.k, records, place / "store")
    teacher = StoredTeacher(
        StoreSet([reader]),
        settings,
        terms=[term],
        vocab_size=settings.vocab_size,
        groups=groups,
        device=device,
    )
    loaded = Loaded(_loaded(case, records))
    in_memory = [list(teacher.signals(step.micro_batches)) for step in loaded.steps]

    def from_memory() -> list[float]:
        return [steps.take(*pair) for pair in zip(loaded.steps, in_memory, strict=True)]

    def from_store() -> list[float]:
        source = Lookahead(
            cast(Any, loaded),
            last_step=given.steps,
            expect=teacher.expect,
            stores=[reader.plan.uid.hex()],
        )
        losses = []
        for number in range(1, given.steps + 1):
            batches = source.take(number)
            losses.append(steps.take(batches, teacher.signals(batches.micro_batches)))
        return losses

    def reading_alone() -> list[Any]:
        for step in loaded.steps:
            teacher.expect(step.micro_batches)
        return [teacher.signals(step.micro_batches) for step in loaded.steps]

    subjects = {"memory": from_memory, "store": from_store, "reading alone": reading_alone}
    timed = _in_turns(subjects, rounds=given.rounds)
    # Before it is used again, to check that both subjects learn from the same signals.
    again = [teacher.signals(step.micro_batches) for step in loaded.steps]
    largest = _largest_difference(in_memory, again)
    teacher.close()
    return timed | {
        "workload": case.workload.name,
        "k": given.k,
        "steps": given.steps,
        "tokens_per_step": case.tokens_per_step,
        "largest_difference": largest,
        "phases": steps.median_phases(2 * given.steps),
    }


def _stored(
    case: Case, k: int, records: list[SampleRecord], folder: Path
) -> tuple[StoreReader, CaptureSettings]:
    """Return a store of the records, and its capture settings."""
    settings = CaptureSettings(
        k=k, vocab_size=case.workload.vocab_size, sequence_length=case.workload.sequence_length
    )
    write_store(folder, records, settings, count=len(records))
    return StoreReader.open(folder), settings


def _in_turns(subjects: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Any]:
    """Seconds of each subject's steps in each round; the order changes, the first warms up.

    `cpu_seconds` are those of this process, `machine_seconds` of all processes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in subjects}
    machine_seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for number in range(rounds + 1):
        for name in list(subjects) if number % 2 else list(subjects)[::-1]:
            gc.collect()
            busy = busy_seconds()
            started, cpu_started = time.perf_counter(), time.process_time()
            subjects[name]()
            if number:
                seconds[name].append(time.perf_counter() - started)
                cpu_seconds[name].append(time.process_time() - cpu_started)
                machine_seconds[name].append(busy_seconds() - busy)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "machine_seconds": machine_seconds,
        "threads": torch.get_num_threads(),
    }


def _steps(case: Case, term: Any, groups: Groups, device: torch.device) -> Steps:
    from benchmarks.steps.subject import (
        OPTIMIZER,
        STUDENT_SEED,
        architecture,
        execution,
        training_state,
    )
    from megatron_distill.models.gpt import build_gpt, vocab_shard
    from megatron_distill.ops import LogitRule
    from megatron_distill.train.objective import TokenObjective
    from megatron_distill.train.optimizer import connect_schedule, wrap_data_parallel
    from megatron_distill.train.phase_timers import PhaseTimers
    from megatron_distill.train.step import Student

    shape, run = architecture(case.workload.student, case), execution(case, device)
    chunks = build_gpt(shape, groups=groups, execution=run, seed=STUDENT_SEED)
    wrapped = wrap_data_parallel(chunks, OPTIMIZER, groups=groups)
    timers = PhaseTimers(device)
    connect_schedule(wrapped, OPTIMIZER, positions=case.tokens_per_step, timers=timers)
    training = training_state(wrapped, dtype=run.dtype)
    objective = TokenObjective(
        ce_weight=1.0,
        terms=(term,),
        metrics=("teacher_ce", "teacher_entropy", "student_entropy", "top1_agreement", "topk_mass"),
        chunk_tokens=case.chunk_tokens,
        shard=vocab_shard(shape, groups),
        logit_rule=LogitRule(None, 1.0),
        groups=groups,
    )
    student = Student(chunks, wrapped, groups, case.workload.sequence_length, timers)
    return Steps(case, student, training.optimizer, training.schedule, objective, [])


def _records(case: Case, k: int, steps: int) -> list[SampleRecord]:
    """One for every sequence of every step; their contents repeat after some."""
    workload = case.workload
    per_step = workload.micro_batch_size * workload.micro_batches
    distinct: list[MadeUpSample] = [
        made_up_sample(number, workload.sequence_length, vocab_size=workload.vocab_size)
        for number in range(2 * per_step)
    ]
    return [
        record_of(distinct[number % len(distinct)], k, sample_id=number)
        for number in range(steps * per_step)
    ]


def _loaded(case: Case, records: Sequence[SampleRecord]) -> list[StepBatches]:
    from megatron_distill.data.collation import count_labels, micro_batch, pack_samples
    from megatron_distill.data.samples import Sample

    size, count = case.workload.micro_batch_size, case.workload.micro_batches
    per_step, steps = size * count, []
    for first in range(0, len(records), per_step):
        samples = [
            Sample(one.tokens_S1, one.document_ids_S1, one.flags_S1, one.sample_id)
            for one in records[first : first + per_step]
        ]
        whole = pack_samples(samples)
        (labels,) = count_labels(whole, isolate_documents=False)
        micro_batches = tuple(
            micro_batch(
                whole, slice(at * size, (at + 1) * size), isolate_documents=False
            ).with_trained_rows()
            for at in range(count)
        )
        steps.append(StepBatches(micro_batches, labels.ce, labels.kd, case.tokens_per_step))
    return steps


def _largest_difference(ours: Sequence[Any], others: Sequence[Any]) -> float:
    """Between log-probabilities of two lists of steps."""
    pairs = [
        (one.by_term[0].log_probs, other.by_term[0].log_probs)
        for step, again in zip(ours, others, strict=True)
        for one, other in zip(step, again, strict=True)
    ]
    return max(float((one - other).abs().max()) for one, other in pairs)


if __name__ == "__main__":
    main()
