"""A student's and a teacher's process, started by benchmarks/teachers.py: a serial step, the sides.

The serial step is ROLL's, from its description: the teacher computes the batch of the whole step,
its top-k travels as four messages one after another, all processes wait for each other after every
phase, and the student trains last. Models, loss and messages are ours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.steps.cases import Case
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.launch import Launch, joined_world

if TYPE_CHECKING:
    from benchmarks.steps.own_step import TrainedStudent
    from megatron_distill.runtime.groups import Groups
    from megatron_distill.signals import Recorded
    from megatron_distill.train.teachers.live import OnlineTeacher

_TIMEOUT_SECONDS = 300
_K = 64
_STUDENT, _TEACHER = 0, 1
_BARRIER_TAG, _TENSOR_TAG = 901, 902
_PHASES = ("teacher", "messages", "student")
# Waits after a message: of the transfer, and of the copies inside the receiving side.
_WAITS_PER_MESSAGE = 2


def main() -> None:
    """Measure the case given by the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, type=Path)
    parser.add_argument("--warmup", required=True, type=int)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--result", required=True, type=Path)
    arguments = parser.parse_args()
    case = Case.from_dict(json.loads(arguments.case.read_text(encoding="utf-8")))
    launch = Launch.from_environment()
    with joined_world(
        device="cpu",
        backend="gloo",
        threads=1,
        timeout_seconds=_TIMEOUT_SECONDS,
        launch=Launch(launch.rank, launch.size, launch.store, (("teacher", 1),)),
    ) as device:
        assert device.bridge is not None, "one rank trains, one runs the teacher"
        found = _measure(case, device.bridge, warmup=arguments.warmup, steps=arguments.steps)
        if launch.rank == _STUDENT:
            arguments.result.write_text(json.dumps(found), encoding="utf-8")


def _measure(case: Case, bridge: Bridge, *, warmup: int, steps: int) -> dict[str, Any]:
    # Imported late: these import Megatron-Core, which must be prepared first.
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything

    groups = create_groups(Layout(), timeout_minutes=_TIMEOUT_SECONDS // 60)
    seed_everything(1, groups)
    if bridge.is_teacher:
        run, sides = _teacher_side(case, bridge, groups)
    else:
        run, sides = _student_side(case, bridge, groups)
    serial = [run(number) for number in range(warmup + steps)][warmup:]
    alone = {}
    for name, work in sides.items():
        alone[name] = _in_turns(work, bridge, repeats=steps)
    beside = {name: _at_once(work, bridge, repeats=steps) for name, work in sides.items()}
    return {"serial": serial, "alone": alone, "beside": beside}


Side = dict[str, Callable[[], None]]


def _teacher_side(
    case: Case, bridge: Bridge, groups: Groups
) -> tuple[Callable[[int], dict[str, float]], Side]:
    from benchmarks.steps.own_step import build_teacher
    from benchmarks.steps.subject import random_batches
    from megatron_distill.models.gpt import vocab_shard
    from megatron_distill.store import CaptureSettings
    from megatron_distill.train.capture.positions import PositionCapture

    device = torch.device("cpu")
    teacher = build_teacher(case, groups=groups, device=device)
    work = case.workload
    settings = CaptureSettings(
        k=_K, vocab_size=work.vocab_size, sequence_length=work.sequence_length
    )
    shard = vocab_shard(teacher.architecture, groups)
    positions = PositionCapture(settings, shard, groups.tensor, case.chunk_tokens)
    fixed = random_batches(case, 0, groups=groups, device=device).micro_batches

    def serial(number: int) -> dict[str, float]:
        batches = random_batches(case, number, groups=groups, device=device).micro_batches
        _meet(bridge)
        columns = [_top_k(teacher, batch) for batch in batches]
        _meet(bridge)
        for parts in zip(*columns, strict=True):
            whole = torch.cat(parts).contiguous()
            bridge.send(whole, _STUDENT, tag=_TENSOR_TAG).wait()
            for _ in range(_WAITS_PER_MESSAGE):
                _meet(bridge)
        _meet(bridge)
        return {}

    def hidden() -> None:
        for _ in teacher.signals(fixed):
            pass

    def top_k() -> None:
        for batch, signal in zip(fixed, teacher.signals(fixed), strict=True):
            assert signal is not None, "one stage"
            state = signal.logit_source()
            positions(state, batch)

    return serial, {"hidden": hidden, "top_k": top_k}


@torch.no_grad()
def _top_k(teacher: OnlineTeacher, batch: Any) -> list[torch.Tensor]:
    """Return probabilities fp32, log-probabilities bf16, ids int64 and the mask of infinities."""
    signal = teacher.signals([batch])[0]
    assert signal is not None, "one stage"
    state = signal.logit_source()
    logits = state.hidden @ state.weight.T
    values, ids = logits.topk(_K)
    log_probs = values.log_softmax(-1)
    return [values.softmax(-1), log_probs.bfloat16(), ids, values.isinf()]


def _student_side(
    case: Case, bridge: Bridge, groups: Groups
) -> tuple[Callable[[int], dict[str, float]], Side]:
    from benchmarks.steps.own_step import build_student
    from benchmarks.steps.subject import random_batches
    from megatron_distill.losses import Term

    device = torch.device("cpu")
    few = Term("forward_kl", top_k=_K, support="renormalized")
    trained = build_student(case, few, (), groups=groups, device=device)

    def serial(number: int) -> dict[str, float]:
        step = random_batches(case, number, groups=groups, device=device)
        _meet(bridge)
        marks = [time.perf_counter()]
        _meet(bridge)
        marks.append(time.perf_counter())
        received = [_receive(case, dtype, bridge) for dtype in _MESSAGES]
        marks.append(time.perf_counter())
        signals = _signals(received, len(step.micro_batches))
        trained.step(step, signals)
        _meet(bridge)
        marks.append(time.perf_counter())
        phases = [after - before for before, after in zip(marks, marks[1:], strict=False)]
        return {"step": marks[-1] - marks[0], **dict(zip(_PHASES, phases, strict=True))}

    return serial, _student_sides(case, trained, groups)


_MESSAGES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def _receive(case: Case, dtype: torch.dtype, bridge: Bridge) -> torch.Tensor:
    message = torch.empty(case.tokens_per_step, _K, dtype=dtype)
    bridge.receive(message, _TEACHER, tag=_TENSOR_TAG).wait()
    for _ in range(_WAITS_PER_MESSAGE):
        _meet(bridge)
    return message


def _signals(received: list[torch.Tensor], micro_batches: int) -> list[Recorded]:
    from megatron_distill.signals import Recorded, TopK

    probs, _, ids, masked = received
    log_probs = probs.log().masked_fill(masked, -torch.inf)
    parts = zip(ids.chunk(micro_batches), log_probs.chunk(micro_batches), strict=True)
    return [
        Recorded((TopK(own, values, torch.full((len(own),), -torch.inf)),)) for own, values in parts
    ]


def _student_sides(case: Case, few: TrainedStudent, groups: Groups) -> Side:
    """The student's step with answers at hand: random numbers, which take the same time."""
    from benchmarks.steps.own_step import build_student
    from benchmarks.steps.subject import architecture, random_batches
    from megatron_distill.losses import Term
    from megatron_distill.train.teachers.live import ModelOutput
    from megatron_distill.train.teachers.own_ranks import RemoteHead

    device, work = torch.device("cpu"), case.workload
    step = random_batches(case, 0, groups=groups, device=device)
    metrics = ("teacher_ce", "student_entropy", "teacher_entropy", "top1_agreement")
    whole = build_student(case, Term("forward_kl"), metrics, groups=groups, device=device)
    shape = architecture(work.teacher, case)
    weight = torch.randn(work.vocab_size, shape.hidden_size) * shape.init_std
    head = RemoteHead(weight, shape, groups)
    state = torch.randn(work.sequence_length, work.micro_batch_size, shape.hidden_size)
    tokens = work.sequence_length * work.micro_batch_size
    answers = [ModelOutput(tokens, lambda: state, head)] * work.micro_batches
    values, ids = torch.randn(case.tokens_per_step, work.vocab_size).topk(_K)
    stored = _signals(
        [values.softmax(-1), values, ids, values.isinf()],
        work.micro_batches,
    )
    return {
        "hidden": lambda: _discard(whole.step(step, answers)),
        "top_k": lambda: _discard(few.step(step, stored)),
    }


def _discard(_: object) -> None:
    """Take no result."""


def _meet(bridge: Bridge) -> None:
    """Return once both processes are here."""
    other = _STUDENT if bridge.is_teacher else _TEACHER
    own, theirs = torch.zeros(1), torch.zeros(1)
    sending = bridge.send(own, other, tag=_BARRIER_TAG)
    bridge.receive(theirs, other, tag=_BARRIER_TAG).wait()
    sending.wait()


@dataclass(frozen=True)
class _Taken:
    """Seconds of the clock and of the process's threads on a CPU."""

    seconds: float
    cpu: float

    @classmethod
    def by(cls, work: Callable[[], None]) -> _Taken:
        """Measure some work."""
        started, used = time.perf_counter(), time.process_time()
        work()
        return cls(time.perf_counter() - started, time.process_time() - used)

    @classmethod
    def median(cls, taken: Sequence[_Taken]) -> _Taken:
        """Return the medians."""
        return cls(median(one.seconds for one in taken), median(one.cpu for one in taken))


def _in_turns(work: Callable[[], None], bridge: Bridge, *, repeats: int) -> dict[str, float]:
    """Return the medians of each side's work while the other side waits."""
    own = _Taken(0.0, 0.0)
    for is_teachers in (True, False):
        _meet(bridge)
        if bridge.is_teacher == is_teachers:
            own = _Taken.median([_Taken.by(work) for _ in range(1 + repeats)])
    return _both(own, bridge)


def _at_once(work: Callable[[], None], bridge: Bridge, *, repeats: int) -> dict[str, float]:
    """Return the medians of each side's work while the other side works too."""
    first = _both(_Taken.by(work), bridge)
    slower = max(first["student"], first["teacher"])
    _meet(bridge)
    end = time.perf_counter() + repeats * slower
    taken = [_Taken.by(work)]
    while time.perf_counter() < end:
        taken.append(_Taken.by(work))
    return _both(_Taken.median(taken), bridge)


def _both(taken: _Taken, bridge: Bridge) -> dict[str, float]:
    """Return the figures of both sides."""
    other = _STUDENT if bridge.is_teacher else _TEACHER
    own, theirs = torch.tensor([taken.seconds, taken.cpu]), torch.empty(2)
    sending = bridge.send(own, other, tag=_TENSOR_TAG)
    bridge.receive(theirs, other, tag=_TENSOR_TAG).wait()
    sending.wait()
    student, teacher = (theirs, own) if bridge.is_teacher else (own, theirs)
    found: dict[str, float] = {}
    for role, figures in (("student", student), ("teacher", teacher)):
        found[role], found[f"{role}_cpu"] = figures.tolist()
    return found


if __name__ == "__main__":
    main()
