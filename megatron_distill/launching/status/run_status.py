"""The state of a run, a capture, rollouts or an evaluation, and its lines in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_distill.errors import counted
from megatron_distill.launching.status.run_checkpoint import checkpoint_text
from megatron_distill.runtime.progress import duration

__all__ = ["RunStatus", "in_words"]


@dataclass(frozen=True)
class RunStatus:
    """The state of a run, a capture or rollouts; times in seconds, None: not known from the files.

    Attributes:
        state: `running`, `starting`, `waiting`, `done`, `stopped` or `failed`.
        detail: about the state, in words.
        step, steps: done, and of the whole run; of a capture its shards, of rollouts their parts.
        step_seconds: median of the newest steps, or mean of the newest shards or parts.
            tokens_per_second: a step's tokens over that time.
        seconds_left: until the end of the last step, shard or part, of a run with what is due then.
        checkpoint: the newest one's name; its age, and the time that its save took. A name without
            an age is of a folder that no start can read.
        launches: number; restarts: of the newest job.
        slowest_ranks: with the phases in which they are slow, see `logging.straggler_interval`.
            slowest_teacher_ranks: the same of each teacher on ranks of its own, by its name.
        slowest_reason: why there are no slowest ranks.
        unit: `step`, `shard` of a capture, `part` of rollouts, or empty: jobs without progress.
        jobs: states of jobs that read the folder, by command, such as `evaluate`.
    """

    run: str
    state: str
    detail: str
    step: int
    steps: int | None
    step_seconds: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoint: str | None
    checkpoint_age: float | None
    save_seconds: float | None
    launches: int
    restarts: int
    slowest_ranks: str | None
    slowest_teacher_ranks: Mapping[str, str] = field(default_factory=dict)
    unit: str = "step"
    jobs: Mapping[str, str] = field(default_factory=dict)
    slowest_reason: str | None = None

    def lines(self) -> list[str]:
        """Return the state as lines of a name and a text."""
        rows = [("state", in_words(self.state, self.detail))]
        done = f"{self.step:,}"
        if self.steps and self.step <= self.steps:
            done += f" of {self.steps:,} ({100 * self.step / self.steps:.1f} %)"
        elif self.steps:  # of a later start, or of changed settings
            wanted = "train.steps =" if self.unit == "step" else f"the {self.unit}s planned,"
            done += f", past {wanted} {self.steps:,}"
        if self.unit:
            rows.append((self.unit, done))
        if self.step_seconds is not None:
            speed = f"{self.step_seconds:.3g} s per {self.unit}"
            if self.tokens_per_second is not None:
                speed += f", {self.tokens_per_second:,.0f} tokens/s"
            rows.append(("speed", speed))
        if self.seconds_left is not None:
            rows.append(("left", duration(self.seconds_left)))
        if self.unit == "step":
            text = checkpoint_text(self.checkpoint, self.checkpoint_age, self.save_seconds)
            rows.append(("checkpoint", text))
        if self.launches:
            restarts = counted(self.restarts, "restart")
            rows.append(("launches", f"{self.launches}, with {restarts} of the newest job"))
        if self.unit == "step":
            reason = self.slowest_reason or "logging.straggler_interval"
            rows.append(("slowest", self.slowest_ranks or f"not known ({reason})"))
        for name, slowest in self.slowest_teacher_ranks.items():
            rows.append(("slowest", f"of {name}, {slowest}"))
        rows += self.jobs.items()
        return [self.run, *(f"{name:<11} {text}" for name, text in rows)]


def in_words(state: str, detail: str) -> str:
    """Return a state with its detail."""
    return f"{state}: {detail}" if detail else state
