"""Figures of the front page and the pages on performance, generation and several tokenizers are
those of records."""

import csv
import json
import re
from collections.abc import Iterator
from functools import cache
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from megatron_distill.commands.quickstart.one_tokenizer import DRAFT
from megatron_distill.commands.quickstart.outcome import show_drafts, show_next_line
from megatron_distill.evaluation.next_line import ITEMS
from megatron_distill.evaluation.runs import RunSummary, result_table
from tests.guards.source_tree import ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")
# Of a loss's row: family, our subject and the peer's, and whether ranks are one or two.
LOSSES = {
    "forward KL against ModelOpt": ("forward_kl", "ours", "ModelOpt", 1),
    "forward KL against `log_softmax` and `kl_div`": ("forward_kl", "ours", "torch", 1),
    "the same, the gradient over the logits": (
        "forward_kl", "ours, over the logits", "ModelOpt", 1,
    ),
    "the same on two tensor-parallel ranks": ("forward_kl", "ours", "ModelOpt", 2),
    "top 64, renormalized, against ModelOpt": ("top-k", "ours, renormalized", "ModelOpt", 1),
    "JSD against plain torch": ("jsd", "ours", "torch", 1),
    "JSD against TRL 1.16": ("jsd", "ours", "TRL", 1),
    "adaptive KL against plain torch": ("adaptive_kl", "ours", "torch", 1),
    "JSD from hidden states against Liger, chunked": (
        "fused jsd, width 1024", "ours", "Liger, chunked", 1,
    ),
}  # fmt: skip
CASES = ("v32k/fp32", "v32k/bf16", "v152k/fp32")


def cells(line: str) -> list[str]:
    return [cell.strip().strip("*") for cell in line.strip().strip("|").split("|")]


def number(text: str) -> float:
    return float(text.replace(",", "").removesuffix("x"))


def rounded(value: float, text: str) -> bool:
    """Whether a figure is this value, rounded to the digits that are given."""
    digits = len(text.removesuffix("x").partition(".")[2])
    return abs(number(text) - value) <= 0.5 * 10**-digits * 1.02


def table(name: str) -> Iterator[dict[str, str]]:
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


@cache
def steps() -> dict[str, list[float]]:
    """Of each case: tokens/s of ours, of the peer, the ratio; the same of the step's peak."""
    found: dict[str, list[float]] = {}
    measured = {(row["case"], row["subject"]): row for row in table("step_peer.csv")}
    for ratio in table("step_ratios.csv"):
        if ratio["peer"] == "peer":
            ours, peer = (measured[ratio["case"], subject] for subject in ("ours", "peer"))
            found[ratio["case"]] = [
                float(value)
                for key, unit in (("tokens_per_second", ""), ("step_peak", "_mib"))
                for value in (ours[key + unit], peer[key + unit], ratio[key])
            ]
    return found


@cache
def losses() -> dict[tuple[str, str, str], tuple[float, float, float]]:
    """Median, best and extra memory of each case, loss and subject."""
    found, case = {}, ""
    for line in (RESULTS / "losses.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## v"):
            case = line.removeprefix("## ")
        row = cells(line)
        if case and len(row) == 8 and re.fullmatch(r"[\d.]+", row[2]):
            found[case, row[0], row[1]] = number(row[2]), number(row[4]), number(row[6])
    return found


def rows(page: Path) -> list[list[str]]:
    return [cells(line) for line in page.read_text(encoding="utf-8").splitlines() if "|" in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_steps_are_those_of_the_record(page: Path) -> None:
    found = [row for row in rows(page) if re.match(r"\d+k( deep)?, TP", row[0])]
    assert len(found) >= 5
    for name, *figures in found:
        case = "v" + name.replace(" deep", "-deep").replace(", ", "/")
        for value, text in zip(steps()[case], figures, strict=True):
            assert rounded(value, text), (name, value, text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_losses_are_those_of_the_record(page: Path) -> None:
    found = [row for row in rows(page) if row[0] in LOSSES]
    assert len(found) >= 5
    for name, *figures in found:
        # Three speeds are of prepared memory, two of a plain loop; a table may end with memory.
        in_turns = len(figures) == len(CASES) + 2
        record = losses()
        loss, ours, peer, ranks = LOSSES[name]
        speeds, memory = (figures[:3], figures[3:]) if in_turns else (figures[:2], figures[2:])
        timed = loss if in_turns else f"{loss}, plain loop"
        for case, text in zip(CASES, speeds, strict=False):
            if text:
                own, other = (
                    record[f"{case}/TP{ranks}", timed, subject] for subject in (ours, peer)
                )
                median, _, best = text.partition(" ")
                assert rounded(other[0] / own[0], median), (name, case, other[0] / own[0], text)
                assert not best or rounded(other[1] / own[1], best.strip("()")), (
                    name,
                    case,
                    text,
                )
        for subject, text in zip((ours, peer), memory, strict=False):
            extra = record[f"{CASES[0]}/TP{ranks}", loss, subject][2]
            assert rounded(extra, text), (name, subject, extra, text)


def test_the_speed_of_text_is_that_of_the_record() -> None:
    """Of widths and rows: the ratios to `transformers` and to recomputation, and both growths."""
    record = [
        row
        for name in ("generate", "generate_intel")
        for row in rows(RESULTS / f"{name}.md")
        if row[0].isdigit() and len(row) > 9
    ]
    found = [row for row in rows(ROOT / "docs" / "generation.md") if row[0].isdigit()]
    assert len(record) == 2 * 12
    assert found == [[*row[:2], f"{row[4]}, {row[9]}", row[6], *row[12:14]] for row in record]
    intel, page = rows(RESULTS / "generate_intel.md"), (ROOT / "docs" / "generation.md").read_text()
    page = " ".join(page.split())
    (bound,) = (row[-1] for row in intel if row[0] == "512" and len(row) < 9)
    assert f"leave a gain of {bound} at most" in page
    whole = [float(row[11][:-1]) for row in intel if row[0].isdigit() and len(row) > 9]
    assert f"512 tokens takes {min(whole)} to {max(whole)} times as long as the cache" in page


def test_the_speed_of_alignment_is_that_of_the_record() -> None:
    found = {}
    for line in (RESULTS / "align.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and "subject" not in line:
            texts, subject, _, rate = cells(line)
            found[texts, subject] = float(rate)
    page = " ".join((ROOT / "docs" / "cross_tokenizer.md").read_text(encoding="utf-8").split())
    given = re.search(r"encodes ([\d.]+) million .*? reads ([\d.]+) million out of the cache", page)
    alone = re.search(
        r"`align_spans` takes ([\d.]+) million .*? and ([\d.]+) million of short texts\. .*? takes "
        r"([\d.]+) million of these",
        page,
    )
    assert given
    assert alone
    subjects = (
        ("whole files", "documents encoded"), ("whole files", "documents cached"),
        ("whole files", "align_spans"), ("short", "align_spans"), ("short", "dynamic programme"),
    )  # fmt: skip
    for subject, text in zip(subjects, (*given.groups(), *alone.groups()), strict=True):
        assert rounded(found[subject], text), (subject, text)


def test_the_losses_between_tokenizers_are_those_of_the_record() -> None:
    """Bits per byte of each seed, the mean below the student alone, and the shares of the gap."""
    record = json.loads((RESULTS / "quickstart_tokenizers.json").read_text(encoding="utf-8"))
    tables = [{row["label"]: row for row in seed["rows"]} for seed in record["seeds"]]
    margins = record["margin_bits_per_byte"]
    expected = {}
    for label in tables[0]:
        of_seeds = [table[label] for table in tables]
        closed = [one["gap_closed"] for one in of_seeds]
        expected[label] = [
            ", ".join(f"{one['bits_per_byte']:.3f}" for one in of_seeds),
            f"{margins[label]['mean']:.3f}" if label in margins else "-",
            "-" if None in closed else ", ".join(f"{share * 100:.0f} %" for share in closed),
        ]
    found = {
        row[0].strip("`"): row[1:]
        for row in rows(ROOT / "docs" / "cross_tokenizer.md")
        if row[0].strip("`") in expected and len(row) == 4
    }
    assert found == expected


def test_the_end_of_the_quickstart_is_printed_from_its_record() -> None:
    record = json.loads((RESULTS / "quickstart_offline.json").read_text(encoding="utf-8"))
    seed, printed = record["seeds"][0], StringIO()
    console = Console(file=printed, width=80, highlight=False, soft_wrap=True)
    summaries = [RunSummary(**one) for one in seed["runs"]]
    console.print(result_table(summaries, title="Held-out text, the same for all"))
    drafts = dict(seed["tokens_per_verification"])
    assert drafts.pop("draft") == DRAFT
    show_drafts(drafts, seed.get("tokens_per_verification_stderr", {}), DRAFT, console)
    # A record of an earlier version is of the most items: its shares are multiples of 1 / 200.
    items = seed.get("next_line_items", ITEMS)
    rights = [share * items for share in seed["next_line"].values()]
    assert rights == pytest.approx([round(right) for right in rights], abs=1e-9)
    show_next_line(seed["next_line"], items, console)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition("```text\n")[2].partition("```")[0]
    shown, expected = (
        [line.strip() for line in found.splitlines() if line.strip()]
        for found in (block, printed.getvalue())
    )
    assert shown == expected
