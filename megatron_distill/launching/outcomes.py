"""The outcome of a launch from those of its nodes, and the report of the rank that failed first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from megatron_distill.launching.records import (
    LOST_PEER,
    LOST_RENDEZVOUS,
    NodeOutcome,
    Status,
    local_time,
)
from megatron_distill.log import get_logger

__all__ = ["classified", "report"]

_LOGGER = get_logger(__name__)
_TRACEBACK: Final = "Traceback (most recent call last)"
_TRACEBACK_LINES, _TAIL_LINES = 80, 15


def classified(
    nodes: Sequence[NodeOutcome], silent: Sequence[str], status: int, *, was_told: bool
) -> tuple[Status, str]:
    """Return the outcome of all nodes together, and its reason."""
    # Ranks that end after the first node's, as those of a teacher, lose the rendezvous there.
    late = [one for one in nodes if one.order == LOST_RENDEZVOUS]
    ended = [one for one in nodes if one.order != LOST_RENDEZVOUS]
    if late and any(one.index == 0 for one in ended):
        nodes = ended
    kinds = {one.status for one in nodes}
    first = _first_failed(nodes)
    if Status.MISCONFIGURED in kinds:
        return Status.MISCONFIGURED, _reason(first)
    is_cause = first is not None and first.order < LOST_PEER
    if Status.FAILED in kinds and (is_cause or not silent):
        return Status.FAILED, _reason(first)
    if silent and not was_told:
        return Status.FAILED, f"no report from {', '.join(silent)} (status {status})"
    if kinds == {Status.DONE} and not silent:
        return Status.DONE, "done"
    if was_told:
        return Status.UNFINISHED, "stopped before the end of the job's time"
    if kinds == {Status.UNFINISHED} and not silent:
        return Status.UNFINISHED, "stopped by a signal to a rank"
    return Status.FAILED, "a signal from outside ended the ranks"


def _first_failed(nodes: Sequence[NodeOutcome]) -> NodeOutcome | None:
    """Return the outcome of the node whose rank failed first."""
    failed = [one for one in nodes if one.status in (Status.FAILED, Status.MISCONFIGURED)]
    return min(failed, key=lambda one: (one.order, one.seconds, one.index), default=None)


def _reason(first: NodeOutcome | None) -> str:
    assert first is not None, "a node failed"
    return first.message or f"a rank on {first.node} failed"


def report(nodes: Sequence[NodeOutcome], folder: Path, *, shows_traceback: bool) -> None:
    """Write the first failing rank and its traceback to the job's log."""
    first = _first_failed(nodes)
    if first is None:
        return
    if first.rank is None or first.order >= LOST_PEER or not shows_traceback:
        _LOGGER.error("%s", _reason(first))
        return
    file = folder / f"rank_{first.rank:05d}.err"
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    _LOGGER.error(
        "rank %d on %s failed first, at %s; the end of %s:\n%s",
        first.rank,
        first.node,
        local_time(first.seconds),
        file,
        _end_of(text),
    )
    _LOGGER.error("%s", _reason(first))


def _end_of(text: str) -> str:
    """Return the last traceback of a log, or its last lines where it has none."""
    lines = text.splitlines()
    starts = [place for place, line in enumerate(lines) if _TRACEBACK in line]
    if starts:
        return "\n".join(lines[starts[-1] :][:_TRACEBACK_LINES])
    return "\n".join(lines[-_TAIL_LINES:])
