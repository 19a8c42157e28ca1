"""A ranking in words and tables: time, memory, reasons, the place of the teacher, days."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil
from typing import Final

from megatron_distill.errors import counted
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.flops import StepFlops, step_flops_per_token
from megatron_distill.planning.batches import reading_limit
from megatron_distill.planning.cost import in_seconds, run_cost
from megatron_distill.planning.device import DeviceProfile
from megatron_distill.planning.memory import USABLE, MemoryNeed
from megatron_distill.planning.refine import measured_like
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.search import Capture, Planned, Ranking, layout_name
from megatron_distill.planning.traffic import step_bytes

__all__ = ["changed_settings", "choice_name", "need_in_words", "plan_report", "settings", "table"]

_GIB: Final = 2**30
_COLUMNS: Final = 100  # of a sentence; tables and keys to copy may be wider
_STEADY: Final = 0.15  # spread of a rate up to which a calibration is steady
_NAMED: Final = 4  # of the rates that are not
_ALIKE: Final = 0.005  # relative difference of two times that are a tie
# A mapping would be merged into that of the configuration, and leave its numbers.
_NO_STAGES: Final = (
    "parallel.layers_per_stage.student=null",
    "parallel.layers_per_stage.teacher=null",
)
_PLACES: Final = {
    "none": "no teacher",
    "shared": "shared ranks",
    "own ranks": "own ranks",
    "store": "store",
}


def plan_report(
    run: PlannedRun,
    device: DeviceProfile,
    devices: int,
    ranking: Ranking,
    *,
    shown: int,
    store: Planned | None,
    capture: Capture | None,
    configured: Planned | str,
    note: str | None = None,
    way_out: str = "",
) -> str:
    """Return the whole report.

    store, capture: the fastest run with a store, and the fastest capture of it. configured: the
    layout of the configuration itself, or the reason why it does not run. note: an assumption.
    way_out: what makes the run fit where no layout does.
    """
    lines = [f"plan for {devices:,} x {device.title}, {ranking.tried:,} choices tried"]
    if run.document_length is not None:
        lines[0] += f", documents of {run.document_length:,} tokens"
    lines += [""]
    lines += [] if note is None else [*_wrapped(note), ""]
    best = ranking.fitting[:shown]
    if not best:
        lines += _wrapped(f"{_nothing(store)} {way_out}".strip())
    else:
        lines += [*_ranked(run, device, best), "", "Time of a step (ms):", ""]
        lines += [*_times(best), "", "Memory of the fullest rank (GiB):", "", *_memory(best)]
        lines += [*_messages(run, best)]
        lines += ["", *_wrapped(run_cost(run, best[0], device))]
        rest = best[0].time.total - best[0].time.data
        lines += _wrapped(reading_limit(run, best[0].choice, step=rest))
    there = _recommended(ranking, best)
    lines += ["", *_configured(run, device, devices, configured, best, there=there)]
    if run.several:
        lines += ["", *_wrapped(_several(run))]
    elif run.teacher is not None and best:
        lines += ["", *_teacher(run, ranking, store, capture)]
    if ranking.missing:
        lines += ["", "Popular layouts that are not above:", ""]
        lines += _reasons(ranking)
    rates = f"Rates: {device.source} ({device.date}). Shares of them: {device.efficiency_source}."
    lines += ["", *_wrapped(rates), *_wrapped(_varied(run, device))]
    lines += _wrapped(_measured(run, device, configured))
    return "\n".join(lines) + "\n"


def _varied(run: PlannedRun, device: DeviceProfile) -> str:
    """Return the line of rates that varied while they were measured, empty where none did."""
    found = device.varied(run.precision, more_than=_STEADY)
    names = [f"{name} {value:.0%}" for name, value in found.items()]
    if not names:
        return ""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (
        f"Rates that varied by more than {_STEADY:.0%} while they were measured: "
        f"{', '.join(names[:_NAMED])}{rest}."
    )


def _measured(run: PlannedRun, device: DeviceProfile, configured: Planned | str) -> str:
    """Return the line on the runs that refined the device, empty where none did."""
    if not device.runs:
        return ""
    choice = None if isinstance(configured, str) else configured.choice
    known = measured_like(device, run, choice)
    if known is None:
        runs = f"{counted(len(device.runs), 'run')} of {device.title}"
        where = "layout or place of the teacher"
        if device.kind == "cpu":
            where = "ranks that share a machine"
        return (
            f"Measured steps of {runs} refine nothing here: models, sequences, documents, losses, "
            f"precision, {where} differ."
        )
    if not known.factors:
        return "Measured steps of such a run refine nothing here: its phases were too short."
    parts = ", ".join(f"{phase} {factor:.2f}" for phase, factor in known.factors.items())
    return f"Refined by measured steps of such a run, factors: {parts}."


def _nothing(store: Planned | None) -> str:
    """Return the sentence of a plan without a layout; `store`: one that fits without a teacher."""
    text = "Nothing fits; the reasons for popular layouts are below."
    if store is None:
        return text
    return (
        f"{text} With a store in place of the live teacher, {choice_name(store.choice)} fits: "
        f"{store.memory.total / _GIB:.1f} GiB."
    )


def _reasons(ranking: Ranking) -> list[str]:
    """Return the missing layouts with their reasons, those of one reason together."""
    names: dict[str, list[str]] = {}
    for one in ranking.missing:
        names.setdefault(one.reason, []).append(one.name)
    lines = []
    for reason, several in names.items():
        lines += _wrapped(f"  {', '.join(several):<12} {reason}", indent=15)
    return lines


def _wrapped(text: str, *, indent: int = 2) -> list[str]:
    """Return the lines of a text, those after the first of each given line indented."""
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line, _COLUMNS, subsequent_indent=" " * indent, break_long_words=False,
            break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True,
        )  # fmt: skip
    return lines


def choice_name(choice: Choice) -> str:
    """Return a choice's layout, micro-batch, recomputation and teacher in one line."""
    name = f"{layout_name(choice.layout, choice.data)}, micro-batch {choice.micro_batch_size}"
    if choice.recompute != "none":
        what = f" {'+'.join(choice.modules)}" if choice.recompute == "selective" else ""
        name += f", recompute {choice.recompute}{what}"
    return name


def _teacher_name(choice: Choice) -> str:
    if choice.teacher_layout is None or choice.is_same_layout:
        return _PLACES[choice.place]
    name = layout_name(choice.teacher_layout, choice.teacher_data)
    return f"{choice.teacher_ranks} own, {name}" if choice.teacher_ranks else f"shared, {name}"


def settings(choice: Choice) -> list[str]:
    """Return the changes to a configuration that make this choice."""
    layout = choice.layout
    words = [f"parallel.tensor={layout.tensor}", f"parallel.pipeline={layout.pipeline}"]
    words += [f"parallel.virtual_pipeline={layout.virtual_pipeline or 'null'}"]
    words += [f"parallel.context={layout.context}", f"parallel.expert={layout.expert}"]
    words += [f"parallel.sequence={str(layout.sequence).lower()}"]
    words += _NO_STAGES
    words += [f"train.micro_batch_size={choice.micro_batch_size}"]
    words += [f"train.recompute={choice.recompute}"]
    # Both are refused beside a recomputation that they do not change.
    modules = choice.modules if choice.recompute == "selective" else ("attention",)
    count = "null" if choice.recomputed_layers is None else choice.recomputed_layers
    words += [f"train.recompute_modules=[{','.join(modules)}]", f"train.recompute_layers={count}"]
    own = choice.teacher_layout
    if own is not None and choice.place in ("shared", "own ranks"):
        words += [f"teacher.ranks={choice.teacher_ranks or 'null'}", "teacher.nodes=null"]
        if choice.is_same_layout:
            words += ["teacher.parallel=null"]
        else:
            words += [
                "teacher.parallel={"
                f"tensor: {own.tensor}, pipeline: {own.pipeline}, context: {own.context}, "
                f"expert: {own.expert}, sequence: {str(own.sequence).lower()}" + "}"
            ]
    return words


def changed_settings(choice: Choice, there: Choice) -> list[str]:
    """Return the settings of a choice that differ from those of another one, the configured one.

    Layers per stage that a configuration may name are of its own stages.
    """
    known = settings(there)
    if (choice.layers, choice.teacher_layers) != (there.layers, there.teacher_layers):
        known = [word for word in known if word not in _NO_STAGES]
    return [word for word in settings(choice) if word not in known]


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Align columns; the first `left` to the left, the rest to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _several(run: PlannedRun) -> str:
    """Return the teachers and their samples; they have no other place to compare."""
    shares = ", ".join(f"{one.name} {one.share:.0%}" for one in run.several)
    return f"Teachers on the student's ranks, with their shares of the samples: {shares}."


def _flops(run: PlannedRun) -> StepFlops:
    """Return the operations of a step, those of several teachers by their shares of the samples."""
    teachers: list[Architecture | None] = [run.teacher]
    if run.several:
        teachers = [one.shape for one in run.several]
    found = [
        step_flops_per_token(
            run.student,
            shape,
            sequence_length=run.sequence_length,
            teacher_length=run.teacher_length,
        )
        for shape in teachers
    ]
    if not run.several:
        return found[0]
    forward = sum(
        one.share * flops.teacher_forward for one, flops in zip(run.several, found, strict=True)
    )
    return replace(found[0], teacher_forward=forward)


def _ranked(run: PlannedRun, device: DeviceProfile, best: Sequence[Planned]) -> list[str]:
    flops = _flops(run)
    peak = device.peak_tflops["fp32" if run.precision == "fp32" else "bf16"] * 1e12
    rows = [("", "layout", "teacher", "step (s)", "tokens/s", "MFU", "memory (GiB)")]
    for number, one in enumerate(best, start=1):
        seconds = one.time.total
        per_token = flops.total
        if one.choice.place in ("store", "none"):
            per_token -= flops.teacher_forward
        used = per_token * run.tokens / seconds / one.choice.devices / peak
        rows.append(
            (
                str(number),
                choice_name(one.choice),
                _teacher_name(one.choice),
                in_seconds(seconds),
                f"{run.tokens / seconds:,.0f}",
                f"{used:.0%}",
                f"{one.memory.total / _GIB:.1f}",
            )
        )
    return table(rows, left=3)


def _parts(rows: list[dict[str, float]], *, scale: float) -> list[str]:
    """Return a table of parts, without those that are zero in every row."""
    names = [name for name in rows[0] if any(row[name] for row in rows)]
    heading = ["", *(name.replace("_", " ") for name in names), "sum"]
    digits = 0 if max(sum(row.values()) for row in rows) * scale >= 1000 else 1
    body = [
        [str(number), *(f"{row[name] * scale:,.{digits}f}" for name in names),
         f"{sum(row.values()) * scale:,.{digits}f}"]
        for number, row in enumerate(rows, start=1)
    ]  # fmt: skip
    return table([heading, *body])


def _times(best: Sequence[Planned]) -> list[str]:
    return _parts([one.time.parts for one in best], scale=1e3)


def _memory(best: Sequence[Planned]) -> list[str]:
    return _parts([one.memory.parts for one in best], scale=1 / _GIB)


def _messages(run: PlannedRun, best: Sequence[Planned]) -> list[str]:
    """Return the table of bytes; nothing where no rank sends any."""
    found = [step_bytes(run, one.choice) for one in best]
    largest = max(one.total for one in found)
    if not largest:
        return []
    unit, scale = ("GB", 1e-9) if largest >= 1e9 else ("MB", 1e-6)
    heading = f"Messages of a step to the rank that receives most ({unit}):"
    return ["", heading, "", *_parts([one.parts for one in found], scale=scale)]


def _configured(
    run: PlannedRun,
    device: DeviceProfile,
    devices: int,
    one: Planned | str,
    best: Sequence[Planned],
    *,
    there: Planned | None,
) -> Iterator[str]:
    """Compare the configured layout with the first row; there: the one whose keys are given."""
    if isinstance(one, str):
        yield from _wrapped(f"Configured: does not run on {counted(devices, 'device')}: {one}")
    else:
        verdict = "fits" if one.fits(device) else "does not fit"
        text = (
            f"Configured: {choice_name(one.choice)}, {_teacher_name(one.choice)}: {verdict}, "
            f"{one.memory.total / _GIB:.1f} of {USABLE * device.memory_gib:.1f} usable GiB; step "
            f"{in_seconds(one.time.total)} s"
        )
        if best:
            text += f", {one.time.total / best[0].time.total:.2f} times the first row's"
        yield from _wrapped(text)
    if there is not None:
        choice = there.choice
        words = settings(choice) if isinstance(one, str) else changed_settings(choice, one.choice)
        if run.several:  # they have the student's layout
            words = [word for word in words if not word.startswith("teacher.")]
        row, keys = "The first row", "The first row's keys:"
        if there != best[0]:
            row = f"row {best.index(there) + 1}" if there in best else _name(choice)
            keys = f"The keys of {row}, which is recommended:"
            row = f"{row[0].upper()}{row[1:]}, which is recommended,"
        yield from _wrapped(keys if words else f"{row} is the configured layout.")
        if words:
            yield "  " + " ".join(_quoted(word) for word in words)


def _recommended(ranking: Ranking, best: Sequence[Planned]) -> Planned | None:
    """Return the recommended choice: the first row, not on own ranks where shared ones are alike.

    It may have no row, where many choices take as long.
    """
    shared = ranking.best("shared")
    if not best or best[0].choice.place != "own ranks" or shared is None:
        return best[0] if best else None
    return shared if _are_alike(best[0], shared) else best[0]


def _name(choice: Choice) -> str:
    """Return a choice with the layout of its teacher, where that has one of its own."""
    name = choice_name(choice)
    if choice.teacher_layout is None or choice.is_same_layout:
        return name
    return f"{name}; {_teacher_name(choice)}"


def _are_alike(fast: Planned, slow: Planned) -> bool:
    return 1 - fast.time.total / slow.time.total < _ALIKE


def _quoted(word: str) -> str:
    return f"'{word}'" if any(mark in word for mark in "{[ ") else word


def _teacher(
    run: PlannedRun, ranking: Ranking, store: Planned | None, capture: Capture | None
) -> Iterator[str]:
    """Compare the places of the teacher and recommend one, with the reason."""
    rows = [("teacher", "best layout", "step (s)", "device-hours per 1,000 steps")]
    serves = not run.paired_layers
    found = {
        "shared": ranking.best("shared"),
        "own ranks": ranking.best("own ranks"),
        "store": store or ranking.best("store") if serves else None,
    }
    by_place = {place: one for place, one in found.items() if one is not None}
    for place, one in by_place.items():
        hours = one.time.total * one.choice.devices / 3.6
        rows.append(
            (_PLACES[place], _name(one.choice), in_seconds(one.time.total), f"{hours:,.1f}")
        )
    yield "The place of the teacher:"
    yield ""
    yield from table(rows, left=2)
    live = min(
        (by_place[place] for place in ("shared", "own ranks") if place in by_place),
        key=lambda one: one.time.total,
        default=None,
    )
    yield ""
    if live is None:
        yield "No live teacher fits next to the student."
    else:
        place = live.choice.place
        other = by_place.get("own ranks" if place == "shared" else "shared")
        reason = "it is the only live one that fits"
        if other is not None:
            gain = 1 - live.time.total / other.time.total
            reason = f"its step is {gain:.0%} shorter than with {_PLACES[other.choice.place]}"
            if _are_alike(live, other):
                place = "shared"
                reason = "with ranks of its own a step takes as long"
        yield f"Recommended live: {_PLACES[place]}, because {reason}."
    if "store" in by_place and capture is not None:
        yield from _wrapped(_break_even(capture, live, by_place["store"]))
    if store is not None and not serves:
        yield "A store serves no losses between layers, which this objective has."


def _break_even(capture: Capture, live: Planned | None, store: Planned) -> str:
    """Return the number of runs over the same tokens from which a store costs less."""
    text = f"A store: its capture takes {in_seconds(capture.seconds_per_step)} s per step's tokens "
    text += f"({capture.name})"
    if live is None:
        return f"{text}; it is the only way."
    saved = live.time.total - store.time.total
    if saved <= 0:
        return f"{text}, and a run with it is no faster: keep the teacher live."
    runs = max(1, ceil(capture.seconds_per_step / saved))
    return (
        f"{text}, and each run with it saves {in_seconds(saved)} s per step: it pays from "
        f"{counted(runs, 'run')} on, or as many epochs over the same tokens. It serves terms on "
        f"top-k or sampled ids, not those on the whole vocabulary."
    )


def need_in_words(need: MemoryNeed) -> str:
    """Return the sum and the parts of a need of memory."""
    parts = ", ".join(
        f"{name.replace('_', ' ')} {count / _GIB:.2f}"
        for name, count in need.parts.items()
        if count >= 0.005 * _GIB
    )
    return f"{need.total / _GIB:.2f} GiB ({parts})"
