"""The end of the quickstart: its table and the sentences below it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from megatron_distill.errors import counted
from megatron_distill.evaluation.runs import Margin, RunSummary, result_table

__all__ = ["show_drafts", "show_next_line", "show_outcome", "show_store"]


def show_outcome(summaries: Sequence[RunSummary], brought: Margin, console: Console) -> None:
    """Print the table of a teacher and its students, and the margin of the distilled student."""
    console.print()
    console.print(result_table(summaries, title="Held-out text, the same for all"))
    verdict = "lower" if brought.nats > 0 else "HIGHER"
    console.print(
        f"With the teacher, the same student on the same tokens ends {abs(brought.nats):.4f} nats"
        f" per token {verdict} ({abs(brought.share):.1%})."
    )
    if brought.gap_closed is not None and brought.nats > 0:
        console.print(f"That is {brought.gap_closed:.0%} of the way to its teacher.")


def show_drafts(
    tokens: Mapping[str, float], errors: Mapping[str, float], draft: str, console: Console
) -> None:
    """Print the expected tokens of a forward pass of the teacher that checks a student's draft.

    errors: standard errors by label; a record of an earlier version has none.
    """
    around = {label: f" +- {error:.2f}" for label, error in errors.items()}
    listed = ", ".join(
        f"{label} {value:.2f}{around.get(label, '')}" for label, value in tokens.items()
    )
    console.print(
        f"Expected tokens per forward pass of the teacher over {draft} drafted tokens: {listed}.",
        markup=False,
    )


def show_next_line(accuracies: Mapping[str, float], items: int, console: Console) -> None:
    """Print how often each model finds the right next line of held-out code out of four.

    The standard error of a share of n independent items, that of a task's `acc`, follows from both.
    """
    if accuracies:
        listed = ", ".join(
            f"{label} {share:.1%} +- {math.sqrt(share * (1 - share) / max(1, items - 1)):.1%}"
            for label, share in accuracies.items()
        )
        console.print(
            f"The right next line of held-out code ({counted(items, 'item')}), out of four: "
            f"{listed}.",
            markup=False,
        )


def show_store(
    store: Mapping[str, Any], online: RunSummary, offline: RunSummary, console: Console
) -> None:
    """Print loss, speed and storage of the offline run next to those of the online run."""
    console.print(
        f"From the store ({store['bytes_per_token']:.0f} bytes per token, "
        f"{store['kept_mass']:.1%} of the teacher's probability) it ends at "
        f"{offline.held_out_ce:.4f} nats; with the live teacher at {online.held_out_ce:.4f}."
    )
    if online.tokens_per_second and offline.tokens_per_second:
        console.print(
            f"It trains at {offline.tokens_per_second:,.0f} tokens/s, "
            f"{offline.tokens_per_second / online.tokens_per_second:.2f} times as fast; writing "
            f"the store took {store['seconds']:.0f} s, once for any number of students."
        )
