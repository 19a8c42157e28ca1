"""Runs that are compared: whether they may be, what came out, and over several seeds."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megatron_distill.errors import DataError
from megatron_distill.evaluation.report import Margin, RunSummary, result_table
from megatron_distill.evaluation.runs import RunLog
from megatron_distill.runtime.torchrun import available_cores

__all__ = ["check_equal_start", "over_seeds", "show_outcome", "show_store"]


def check_equal_start(alone: RunLog, distilled: RunLog) -> None:
    """Raise DataError unless both students began with the same weights and saw as many tokens."""
    first = [float(run.training("ce_loss").values[0]) for run in (alone, distilled)]
    tokens = [float(run.training("tokens").values[-1]) for run in (alone, distilled)]
    if abs(first[0] - first[1]) > 1e-3 * abs(first[0]) or tokens[0] != tokens[1]:
        raise DataError(
            f"{alone.folder} and {distilled.folder} cannot be compared: first cross-entropies"
            f" {first[0]:.4f} and {first[1]:.4f}, tokens {tokens[0]:.0f} and {tokens[1]:.0f};"
            " start anew with --fresh"
        )


def over_seeds(outcomes: Sequence[Mapping[str, object]], command: str) -> Mapping[str, object]:
    """Return the outcomes with the spread of their margins and where they come from."""
    margins = [outcome["margin"]["nats"] for outcome in outcomes]  # type: ignore[index]
    return {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "hardware": _hardware(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "margin_nats": {
            "mean": statistics.fmean(margins),
            "least": min(margins),
            "most": max(margins),
        },
        "seeds": list(outcomes),
    }


def _hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    about = Path("/proc/cpuinfo")
    names = about.read_text().splitlines() if about.exists() else []
    model = next((line.split(":")[1] for line in names if line.startswith("model name")), "CPU")
    return f"{model.strip()}, {available_cores()} cores"


def show_outcome(summaries: Sequence[RunSummary], brought: Margin, console: Console) -> None:
    """Print the table of a teacher and its students, and what the teacher brought."""
    console.print()
    console.print(result_table(summaries, title="Held-out text, the same for all"))
    verdict = "lower" if brought.nats > 0 else "HIGHER"
    console.print(
        f"With the teacher, the same student on the same tokens ends {abs(brought.nats):.4f} nats"
        f" per token {verdict} ({abs(brought.share):.1%})."
    )
    if brought.gap_closed is not None and brought.nats > 0:
        console.print(f"That is {brought.gap_closed:.0%} of the way to its teacher.")


def show_store(
    store: Mapping[str, Any], online: RunSummary, offline: RunSummary, console: Console
) -> None:
    """Say what the offline route costs and brings beside the online one."""
    console.print(
        f"From the store ({store['bytes_per_token']:.0f} bytes per token, "
        f"{store['kept_mass']:.1%} of the teacher's probability) it ends at "
        f"{offline.held_out_ce:.4f} nats, beside the live teacher at {online.held_out_ce:.4f}."
    )
    if online.tokens_per_second and offline.tokens_per_second:
        console.print(
            f"It trains at {offline.tokens_per_second:,.0f} tokens/s, "
            f"{offline.tokens_per_second / online.tokens_per_second:.2f} times as fast; writing "
            f"the store took {store['seconds']:.0f} s, once for any number of students."
        )
