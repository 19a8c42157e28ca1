"""Figures of docs/planning.md: its worked example against a plan of the YAML, every one of them,
and the errors of planned steps against present plans of the records."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks.cross_tokenizers.planned import LOSSES, planned_row
from benchmarks.harness.calibrated import loaded
from benchmarks.steps.cases import document_cases, layout_cases, peer_cases
from benchmarks.steps.planned import planned_case
from benchmarks.teachers import planned_steps
from megatron_distill.commands.plan import PrintedPlan, make_plan
from megatron_distill.config import check_layout, load_config, teacher_ranks
from megatron_distill.models.flops import step_flops_per_token
from megatron_distill.planning.report import choice_name, settings
from megatron_distill.planning.search import Planned
from megatron_distill.planning.traffic import step_bytes
from tests.guards.source_tree import ROOT
from tests.unit.planning.test_recorded_runs import of_smallest
from tests.unit.planning.test_recorded_steps import (
    CPU,
    RECORDS,
    TIMED,
    compared_pairs,
    peaks_of_ranks,
    record,
)

GIB = 2**30
PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
EXAMPLE = PAGE.split("## A 70B teacher")[1].split("\n## ")[0]
PROSE = " ".join(EXAMPLE.split())
WHOLE = " ".join(PAGE.split())


def tables() -> list[list[list[str]]]:
    """The cells of each table, the heading first."""
    found: list[list[list[str]]] = []
    previous = ""
    for line in EXAMPLE.splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                found.append([])
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        previous = line
    return [[rows[0], *rows[2:]] for rows in found]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PrintedPlan:
    path = tmp_path_factory.mktemp("documented") / "run.yaml"
    path.write_text(EXAMPLE.split("```yaml\n")[1].split("```")[0])
    return make_plan(load_config(path, []), 256, "h100-80gb", shown=10)


def cells_of(plan: PrintedPlan, one: Planned) -> list[str]:
    """The figures of a row: seconds, tokens/s, MFU and GiB."""
    run, seconds = plan.run, one.time.total
    flops = step_flops_per_token(run.student, run.teacher, sequence_length=8192).total
    share = flops * run.tokens / seconds / 256 / (plan.device.peak_tflops["bf16"] * 1e12)
    figures = f"{seconds:.2f}", f"{run.tokens / seconds:,.0f}"
    return [*figures, f"{share:.0%}", f"{one.memory.total / GIB:.1f}"]


def test_the_rows_are_those_of_the_plan(plan: PrintedPlan) -> None:
    _, *rows = tables()[0]
    by_name = {choice_name(one.choice): one for one in plan.rows}
    assert rows[0][0] == choice_name(plan.rows[0].choice)
    assert rows[0][2:] == cells_of(plan, plan.rows[0])
    assert rows[1][2:] == cells_of(plan, by_name[rows[1][0]])
    # The fastest with own ranks, which may be below the rows that are shown.
    (own,) = (row for row in rows if "own" in row[1])
    line = f"own ranks {own[0]}; {own[1]} {own[2]} "
    assert line in " ".join(plan.text.split())
    assert rows[-1][0] == f"{choice_name(plan.configured.choice)} (configured)"
    assert rows[-1][2:] == cells_of(plan, plan.configured)


def test_the_parts_of_the_first_row_are_those_of_the_plan(plan: PrintedPlan) -> None:
    first = plan.rows[0]
    for table, parts, scale, digits in (
        (tables()[1], first.time.parts, 1e3, 0),
        (tables()[2], first.memory.parts, 1 / GIB, 1),
        (tables()[3], step_bytes(plan.run, first.choice).parts, 1e-9, 1),
    ):
        (_, *names), (_, *cells) = table
        expected = {name: f"{parts[name.replace(' ', '_')] * scale:,.{digits}f}" for name in names}
        assert dict(zip(names, cells, strict=True)) == expected
        # Only parts that would be shown as nothing are left out.
        left = {name for name in parts if name.replace("_", " ") not in names}
        assert all(parts[name] * scale < 0.05 for name in left), left


def test_the_sentences_have_the_figures_of_the_plan(plan: PrintedPlan) -> None:
    text = " ".join(plan.text.split())
    configured, best = plan.configured, plan.rows[0]
    gib, usable, slower = re.findall(
        r"Yes, with ([\d.]+) GiB of ([\d.]+) usable. It is (\d+) % slower", PROSE
    )[0]
    assert f"fits, {gib} of {usable} usable GiB" in text
    assert round(100 * (configured.time.total / best.time.total - 1)) == int(slower)
    (held,) = re.findall(r"Four stages hold the teacher \(([\d.]+) GiB each\)", PROSE)
    assert held == f"{best.memory.teacher / GIB:.1f}"
    quoted = re.findall(r"`(TP\d[^`]*)`", PROSE)
    assert len(quoted) == 2
    for words in quoted:
        assert words in text
    (share,) = re.findall(r"It is (\d+) % of the step", PROSE)
    assert round(100 * best.time.teacher / best.time.total) == int(share)
    (longer,) = re.findall(r"Ranks of its own are (\d+) % slower", PROSE)
    (own,) = re.findall(r"its step is (\d+)% shorter than with own ranks", text)
    assert own == longer
    (capture,) = re.findall(r"A capture takes ([\d.]+) s for the tokens of a step", PROSE)
    assert f"its capture takes {capture} s per step's tokens" in text
    (saved,) = re.findall(r"a run with its store saves ([\d.]+) s per step", PROSE)
    assert f"each run with it saves {saved} s per step: it pays from 1 run on" in text
    steps, tokens, days, hours = re.findall(
        r"([\d,]+) steps are ([\d.]+) billion tokens in ([\d.]+) days, ([\d,]+) device-hours",
        PROSE,
    )[0]
    assert f"{steps} steps = {tokens}" in text
    assert f" billion tokens in {days} days, {hours} device-hours" in text


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (64, []),
        (16, ["teacher.offload=true"]),
        (64, ["runtime.tp_comm_overlap=true"]),
        pytest.param(32, ["teacher.shard_weights=true"], marks=pytest.mark.slow),
        pytest.param(64, ["objective.balance.mode=gradient_norm"], marks=pytest.mark.slow),
    ],
)
def test_the_keys_of_every_row_run(devices: int, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLE.split("```yaml\n")[1].split("```")[0])
    plan = make_plan(load_config(path, words), devices, "h100-80gb", shown=10)
    assert len(plan.rows) >= 5
    for row in plan.rows:
        config = load_config(path, [*words, *settings(row.choice)])
        teachers = teacher_ranks(config, ranks_per_node=8)
        assert sum(count for _, count in teachers) == row.choice.teacher_ranks
        check_layout(config, devices, teachers=teachers)


def test_overlapped_messages_take_less_time_and_buffers_of_both_models(tmp_path: Path) -> None:
    """Three quarters of all messages but the teacher's gathers; 12 buffers of each width."""
    path = tmp_path / "run.yaml"
    path.write_text(EXAMPLE.split("```yaml\n")[1].split("```")[0])
    plain, overlapped = (
        make_plan(load_config(path, words), 64, "h100-80gb", shown=10).configured
        for words in ([], ["runtime.tp_comm_overlap=true"])
    )
    assert isinstance(plain, Planned)
    assert isinstance(overlapped, Planned)
    assert plain.choice == overlapped.choice
    of_layers = overlapped.time.tensor / plain.time.tensor  # and of the heads, which wait
    assert 0.25 < of_layers < 0.27
    work = plain.time.teacher - overlapped.time.teacher
    assert 0 < work < 0.375 * plain.time.teacher
    buffers = overlapped.memory.buffers - plain.memory.buffers
    assert buffers == 12 * 8192 * (4096 + 8192) * 2


CASES = {case.name: case for case in (*layout_cases(), *peer_cases(), *document_cases())}


def span(pattern: str) -> list[float]:
    """The shares of the only sentence of the page like this: those of its groups, in per cent."""
    (found,) = re.findall(pattern, WHOLE)
    return [float(one) for one in found]


def ends(errors: list[float]) -> list[float]:
    """The least and the largest error in per cent, as the page rounds them."""
    return [round(100 * one, 1) for one in (min(errors), max(errors))]


def errors_of(name: str) -> list[float]:
    """Errors of the present plans of a record of `benchmarks/planning.py`; its own are the same."""
    recorded = record(name)
    devices = loaded(recorded["devices"])
    found = []
    for row in recorded["rows"]:
        case = CASES[row["case"]]
        planned = median(planned_case(case, device).time.total for device in devices)
        assert row["calibrated_seconds"] == pytest.approx(planned), row["case"]
        found.append(planned / row["seconds"] - 1)
    return found


def test_the_errors_of_steps_with_teachers_elsewhere_are_those_of_the_page() -> None:
    recorded = record("teachers")
    measured = {
        name: median(step["step_seconds"] for step in steps)
        for name, steps in recorded["steps"].items()
    }
    planned = planned_steps(loaded(recorded["devices"]))
    found = [median(seconds) / measured[name] - 1 for name, seconds in planned.items()]
    assert ends(found) == span(
        r"nine rows are \S+ to \S+ % off, and (\S+) to (\S+) % by the present formulas"
    )


def test_the_errors_of_steps_between_two_tokenizers_are_those_of_the_page() -> None:
    step = record("cross_tokenizer")["step"]
    devices = loaded(step["devices"])
    found = [
        median(planned_row(name, device).time.total for device in devices)
        / step["rows"][name]["median"]
        - 1
        for name in LOSSES
    ]
    assert ends(found) == span(r"right order; by the present formulas, (\S+) to (\S+) %\.")


# What follows the link of a record.
SENTENCES = {
    "planning": r"record\]\S+ of 19 cases on two CPU cores",
    "planning_repeated": r"Recorded earlier\]\S+ on that day, in three rounds,",
    "planning_intel": r"an Intel CPU\]\S+",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_errors_of_layouts_are_those_of_the_page(name: str) -> None:
    errors = errors_of(name)
    average, short, long = span(
        rf"{SENTENCES[name]} times are (\S+) % off.*?, from (\S+) % too short to (\S+) % too long"
    )
    assert average == round(100 * mean(map(abs, errors)), 1)
    assert [-short, long] == [round(100 * one) for one in (min(errors), max(errors))]
    assert re.search(rf"{SENTENCES[name]}[^[]*?\ball {TIMED[name]} pairs", WHOLE, re.IGNORECASE)


def test_the_errors_of_one_round_and_its_pairs_are_those_of_the_page() -> None:
    errors = errors_of("planning_one_round")
    average, short, long, right, pairs = span(
        r"a less steady AMD CPU\]\S+ times are (\S+) % off, from (\S+) % too short to (\S+) % "
        r"too long, with (\S+) of (\S+) pairs in order"
    )
    assert average == round(100 * mean(map(abs, errors)), 1)
    assert [-short, long] == [round(100 * one) for one in (min(errors), max(errors))]
    compared, wrong = compared_pairs("planning_one_round")
    assert (right, pairs) == (compared - len(wrong), compared)


@pytest.mark.parametrize("name", ["tiny", "tiny_amd"])
def test_the_errors_of_the_smallest_runs_are_those_of_the_page(name: str) -> None:
    errors = [there / here - 1 for here, there in of_smallest(name).values()]
    *both, average = span(rf"(\S+) to (\S+) %[^[]*\[{name}\.md\].*?, (\S+) % on average")
    assert both == ends(errors)
    assert average == round(100 * mean(map(abs, errors)), 1)


def test_the_errors_of_steps_over_documents_are_those_of_the_page() -> None:
    assert ends(errors_of("planning_documents")) == span(
        r"positions, are (\S+) to (\S+) % off in \[planning_documents\.md\]"
    )


def test_the_errors_of_recorded_peaks_are_those_of_the_page() -> None:
    found = [
        ratio - 1
        for ranks in RECORDS.values()
        for name in ranks
        for ratio in peaks_of_ranks(CASES[name], ranks[name], CPU)
    ]
    average, *span_of = span(
        r"two repetitions, recorded before \| [^|]* \| mean (\S+) %, (\S+) to (\S+) % \|"
    )
    assert average == round(100 * mean(map(abs, found)), 1)
    assert span_of == ends(found)
