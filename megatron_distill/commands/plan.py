"""Plan a run: the layouts that fit a number of devices, their time and memory; needs no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from megatron_distill.commands.command import Command
from megatron_distill.commands.job import config_file
from megatron_distill.errors import ConfigError, counted
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.log import get_logger

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.planning.device import DeviceProfile
    from megatron_distill.planning.run import Choice, PlannedRun
    from megatron_distill.planning.search import Planned

__all__ = ["COMMAND", "plan_of"]

_LOGGER = get_logger(__name__)
_SHOWN: Final = 10


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="the YAML file of a run, here or shipped")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for the run")
    parser.add_argument(
        "--devices", type=whole_number("64"), required=True, metavar="N", help="number of devices"
    )
    parser.add_argument(
        "--device", required=True, metavar="NAME", help="a shipped device, or a YAML file"
    )
    parser.add_argument(
        "--simulate",
        type=Path,
        metavar="FOLDER",
        help="walk a step of one layout; write timeline.png and trace.json there",
    )
    parser.add_argument(
        "--row",
        type=whole_number("2"),
        metavar="N",
        help="with --simulate: row of the table, 0: as configured (1)",
    )
    parser.add_argument(
        "--document-length",
        type=whole_number("512"),
        metavar="TOKENS",
        help="of the documents in a sample, sum of squares over sum (one document per sample)",
    )
    parser.add_argument(
        "--shown",
        type=whole_number("20"),
        default=_SHOWN,
        metavar="N",
        help=f"layouts to show ({_SHOWN})",
    )


def _check(given: argparse.Namespace) -> str | None:
    for name in ("devices", "shown"):
        if getattr(given, name) < 1:
            return f"--{name} {getattr(given, name)}: must be 1 or more"
    if given.document_length is not None and given.document_length < 1:
        return f"--document-length {given.document_length}: must be 1 or more"
    if given.row is not None and given.row < 0:
        return f"--row {given.row}: must be 0, the configured layout, or a row of the table"
    if given.simulate is not None and given.simulate.exists() and not given.simulate.is_dir():
        return f"--simulate {given.simulate}: not a folder; name one, made where missing"
    return None


def _run(given: argparse.Namespace) -> int:
    from megatron_distill.config import load_config

    if given.row is not None and given.simulate is None:
        _LOGGER.warning("--row %d: has no effect without --simulate; give its folder", given.row)
    config = load_config(config_file(given.config), given.overrides)
    plan = make_plan(
        config,
        given.devices,
        given.device,
        shown=given.shown,
        document_length=given.document_length,
    )
    # A row that is not there is told alone; where no layout fits, the table says why.
    is_shown = given.simulate is None or (given.row is None and not plan.rows)
    if is_shown:
        sys.stdout.write(plan.text)
    if given.simulate is not None:
        chosen = _chosen(plan, 1 if given.row is None else given.row)
        sys.stdout.write("" if is_shown else plan.text)
        sys.stdout.write(_simulated(plan, chosen, given.simulate))
    return 0


@dataclass(frozen=True)
class PrintedPlan:
    """A plan in words, and what it is made of; `configured`: or why that layout does not run."""

    text: str
    run: PlannedRun
    device: DeviceProfile
    rows: Sequence[Planned]
    configured: Planned | str


def plan_of(config: RunConfig, devices: int, device_name: str) -> str:
    """Return the plan of a run, as for `train --plan`. Raises ConfigError or CheckpointError."""
    option = f"--plan {devices}x{device_name}"
    return make_plan(config, devices, device_name, shown=_SHOWN, option=option).text


def make_plan(
    config: RunConfig,
    devices: int,
    device_name: str,
    *,
    shown: int,
    document_length: int | None = None,
    option: str | None = None,
) -> PrintedPlan:
    """Plan a run on so many devices. Raises ConfigError or CheckpointError.

    document_length: tokens of the document of a mean token; None: one document per sample.
    option: that names the devices, for messages; None: those of `plan`.
    """
    device = _device_of_rank(config, devices, device_name, option)
    from megatron_distill.planning.refine import refined_for
    from megatron_distill.planning.report import plan_report
    from megatron_distill.planning.search import Search, planned
    from megatron_distill.train.reports.engine_rates import engine_note
    from megatron_distill.train.reports.planned_run import (
        open_shapes,
        planned_run,
        shape_rule,
        teacher_places,
        unplanned,
        vocabulary_note,
        with_documents,
    )

    problem = unplanned(config)
    if problem is not None:
        raise ConfigError(f"{problem.reason}; {problem.remedy}")
    shapes = open_shapes(config)
    run = with_documents(planned_run(config, shapes), config.data, document_length)
    places = teacher_places(config)
    choice = _configured(config, run, device, devices)
    device = refined_for(device, run, None if isinstance(choice, str) else choice)
    own = None if isinstance(choice, str) else choice
    search = Search(run, device, devices, shape_rule(config, shapes), places, own)
    ranking = search.ranking(shown=shown)
    configured = choice if isinstance(choice, str) else planned(run, choice, device)
    is_live = "shared" in places and not run.several
    notes = (
        vocabulary_note(config.models, config.data.tokenizer, shapes),
        engine_note(config.runtime, device, option=f"--plan {devices}x" if option else "--device "),
    )
    text = plan_report(
        run,
        device,
        devices,
        ranking,
        shown=shown,
        store=search.with_store() if is_live else None,
        capture=search.capture() if is_live else None,
        configured=configured,
        note="\n".join(filter(None, notes)) or None,
        way_out="" if ranking.fitting else search.way_out(),
    )
    rows = ranking.fitting[:shown]
    return PrintedPlan(text, run, device, rows, configured)


def _device_of_rank(
    config: RunConfig, devices: int, name: str, option: str | None
) -> DeviceProfile:
    """Return what a rank of a run has of a device; arguments and errors as of `make_plan`."""
    from megatron_distill.planning.device import load_device
    from megatron_distill.train.reports.engine_rates import check_fp8_rate

    machine = load_device(name, option=option)
    if machine.cores is not None and devices > machine.node.devices:
        raise ConfigError(
            f"{option or f'--devices {devices}'}: {name} is one machine with room for "
            f"{counted(machine.node.devices, 'rank')}; plan at most as many"
        )
    check_fp8_rate(config, machine)
    return machine.shared_by(devices, threads=config.runtime.threads)


def _configured(
    config: RunConfig, run: PlannedRun, device: DeviceProfile, devices: int
) -> Choice | str:
    """Return the configuration's own layout, or the reason why it does not run."""
    from megatron_distill.config import check_layout, teacher_ranks
    from megatron_distill.train.reports.planned_run import configured_choice

    teachers = teacher_ranks(config, ranks_per_node=min(devices, device.node.devices))
    try:
        check_layout(config, devices, teachers=teachers)
    except ConfigError as error:
        return str(error)
    own = sum(count for _, count in teachers)
    return configured_choice(config, run, ranks=devices, teachers=own)


def _chosen(plan: PrintedPlan, row: int) -> Planned:
    """Return the layout of a row. Raises ConfigError: there is none."""
    if row > len(plan.rows):
        rows = f"the table has {counted(len(plan.rows), 'row')}; give one of them"
        raise ConfigError(f"--row {row}: {rows if plan.rows else 'no layout fits these devices'}")
    chosen = plan.rows[row - 1] if row else plan.configured
    if isinstance(chosen, str):
        raise ConfigError(
            f"--row 0: the configured layout does not run on these devices ({chosen}); give a row "
            "of the table"
        )
    return chosen


def _simulated(plan: PrintedPlan, chosen: Planned, folder: Path) -> str:
    """Simulate a layout, write its picture and trace, and return the comparison in words."""
    from megatron_distill.planning.cost import in_seconds
    from megatron_distill.planning.report import choice_name
    from megatron_distill.planning.schedule import chrome_trace, simulate
    from megatron_distill.planning.timeline import draw_timeline

    timeline = simulate(plan.run, chosen.choice, plan.device, chosen.time)
    picture, trace = folder / "timeline.png", folder / "trace.json"
    name = f"{choice_name(chosen.choice)}, {chosen.choice.devices:,} x {plan.device.title}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draw_timeline(timeline, picture, title=f"{name}: {in_seconds(timeline.seconds)} s per step")
        trace.write_text(json.dumps(chrome_trace(timeline)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--simulate {folder}: cannot be written ({error.strerror}); name another folder"
        ) from error
    # Without the lane that reads, where there is one: it stands for no ranks.
    idle = [timeline.idle_share(lane) for lane, ranks in enumerate(timeline.ranks) if ranks]
    difference = round(timeline.seconds / chosen.time.total - 1, 3) + 0.0  # not -0.0
    return (
        f"\nSimulated: {name}: {in_seconds(timeline.seconds)} s, {difference:+.1%} of the "
        f"prediction; stages wait {min(idle):.0%} to {max(idle):.0%} of it\n"
        f"  {picture}\n  {trace}\n"
    )


COMMAND = Command(
    description="""Plan a run: layouts that fit, ranked, with time and memory. Needs no GPU.

    megatron-distill plan run.yaml --devices 64 --device h100-80gb
    megatron-distill plan tiny.yaml --devices 2 --device this-cpu.yaml --simulate plan

Without a measurement the figures are arithmetic; docs/planning.md has their errors.""",
    add_arguments=_add_arguments,
    run=_run,
    check=_check,
)
