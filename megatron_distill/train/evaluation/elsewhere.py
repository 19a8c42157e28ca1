"""Tasks of a teacher on ranks of its own: the student's ranks ask, and the teacher's evaluate.

The student's first rank sends the encoded tasks to the teacher's first rank, which sends the
results back. Either side may be asked to stop; then both end the evaluation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.errors import MegatronDistillError
from megatron_distill.evaluation.tasks.paired import TaskItems
from megatron_distill.evaluation.tasks.prepared import PreparedTask
from megatron_distill.runtime.bridge import Bridge
from megatron_distill.runtime.collectives import highest
from megatron_distill.runtime.termination import Interrupted, is_requested
from megatron_distill.train.evaluation.phase import (
    EvaluatedModel,
    Results,
    kept_random_states,
)
from megatron_distill.train.teachers.answers import EVALUATION_TAG
from megatron_distill.train.teachers.own_ranks import OwnRanksTeacher

__all__ = ["AskedRanks", "answer_evaluation", "weights_name"]

# The student's ranks meet so often: no collective waits for the teacher.
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True)
class AskedRanks:
    """The ranks of a teacher, `role`, as the student's ranks ask them; once in a launch."""

    role: str
    teacher: OwnRanksTeacher
    bridge: Bridge
    device: torch.device

    def weights(self) -> str:
        """Return the digest of the weights, which the teacher's ranks publish at the start."""
        digest: str = self.bridge.published(weights_name(self.role))
        return digest

    def results(self, tasks: Sequence[PreparedTask]) -> tuple[Results, dict[str, TaskItems]]:
        """Return the results and items of the tasks, the same on every rank of the student.

        Raises Interrupted on all of them where a signal to a rank of either side asked for it, and
        the error of the teacher's ranks.

        Collective: the bridge, the tasks and the results, pickled; the student's world, one
        all-reduce of 16 bytes every 0.1 s, and one broadcast of the results.
        """
        self.teacher.evaluate()
        is_first, other = self.bridge.rank == 0, self.bridge.roles.teacher(self.role).first
        if is_first:
            self.bridge.send_object(tuple(tasks), other, tag=EVALUATION_TAG)
        self._wait()
        found: list[tuple[Results, dict[str, TaskItems]] | MegatronDistillError | None] = [None]
        if is_first:
            found = [self.bridge.receive_object(other, tag=EVALUATION_TAG)]
        dist.broadcast_object_list(found, src=0)
        (answer,) = found
        if answer is None:
            raise Interrupted
        if isinstance(answer, MegatronDistillError):
            raise answer
        return answer

    def _wait(self) -> None:
        """Wait until the teacher's ranks are done, and end them where this side is to stop."""
        is_done = is_told = False
        while not is_done:
            is_there = self.bridge.rank == 0 and self.bridge.has_published(_done(self.role))
            there, asked = highest(int(is_there), int(is_requested()), device=self.device)
            if asked and not is_told and self.bridge.rank == 0:
                self.bridge.publish(_end(self.role), "asked")
            is_done, is_told = bool(there), bool(asked)
            time.sleep(0.0 if is_done else _LOOK_SECONDS)


def answer_evaluation(
    bridge: Bridge,
    model_of: Callable[[tuple[PreparedTask, ...], Callable[[], bool]], EvaluatedModel],
) -> None:
    """Evaluate the tasks of `AskedRanks` on this teacher's ranks, and send the results.

    model_of: of the tasks, and of what tells whether this rank was asked to stop.

    Collective: the bridge, as `AskedRanks.results`; the teacher's world, one broadcast of the
    tasks, and those of `model_of` and of its `results`.
    """
    role = bridge.role
    is_first = bridge.rank == role.first

    def stop_requested() -> bool:
        return is_requested() or (is_first and bridge.has_published(_end(role.name)))

    tasks: list[tuple[PreparedTask, ...]] = [()]
    if is_first:
        tasks = [bridge.receive_object(0, tag=EVALUATION_TAG)]
    dist.broadcast_object_list(tasks, src=0)
    answer: tuple[Results, dict[str, TaskItems]] | MegatronDistillError | None
    try:
        with kept_random_states():
            answer = model_of(tasks[0], stop_requested).results()
    except Interrupted:
        answer = None
    except MegatronDistillError as error:
        # All ranks of the teacher have it together, as an interruption; the student's raise it.
        answer = error
    if is_first:
        bridge.publish(_done(role.name), "done")
        bridge.send_object(answer, 0, tag=EVALUATION_TAG)


def weights_name(role: str) -> str:
    """Return the name under which a teacher's ranks publish the digest of its weights."""
    return f"evaluation/{role}/weights"


def _done(role: str) -> str:
    return f"evaluation/{role}/done"


def _end(role: str) -> str:
    return f"evaluation/{role}/end"
