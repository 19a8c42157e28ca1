"""Inspect a teacher store, verify or repair it, or make one from another program's files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from megatron_distill.commands.command import Command, spelled
from megatron_distill.errors import counted
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.runtime.progress import ProgressReporter
from megatron_distill.store import (
    UNKNOWN,
    Identity,
    Manifest,
    Plan,
    Totals,
    VerificationReport,
    convert_maxtext,
    repair,
    verify,
)

SHOWN_PROBLEMS = 50


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for name, run, description in (
        ("inspect", _inspect, "size, settings and identities of a store"),
        (
            "verify",
            _verify,
            "read every record and list every problem; lists of documents are compared with the "
            "records, not with the texts, whose files the capture's configuration names",
        ),
        ("stats", _stats, "stored mass, entropy, cross-entropy and number of ids of the teacher"),
        ("repair", _repair, "verify, and move bad shards and bad lists to quarantine/"),
    ):
        action = actions.add_parser(name, help=description, description=description)
        action.add_argument("store", type=Path, metavar="DIR")
        action.set_defaults(action=run)
    convert = actions.add_parser("convert", help="make a store from another program's files")
    convert.add_argument("--from", dest="source", choices=("maxtext",), required=True)
    convert.add_argument("files", nargs="+", type=Path, metavar="FILE", help="in this order")
    convert.add_argument("--to", dest="store", type=Path, required=True, metavar="DIR")
    convert.add_argument(
        "--vocab-size", type=whole_number("32000"), required=True, help="real ids of the teacher"
    )
    convert.add_argument("--teacher", default=UNKNOWN, help="digest of the teacher's weights")
    convert.add_argument("--tokenizer", default=UNKNOWN, help="digest of the tokenizer")
    convert.add_argument("--dataset", default=UNKNOWN, help="digest of the data")
    convert.add_argument("--codec", choices=("f32", "f16", "u8"), default="u8")
    convert.add_argument("--samples-per-shard", type=whole_number("1024"), default=1024)
    convert.set_defaults(action=_convert)


def _run(arguments: argparse.Namespace) -> int:
    status: int = arguments.action(
        arguments, Console(highlight=False, soft_wrap=True, markup=False)
    )
    return status


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    plan = Plan.load(arguments.store)
    manifest = Manifest.load(arguments.store, plan)
    settings, identity = plan.settings, plan.identity
    table = Table("", Column(str(arguments.store), overflow="fold"), box=None)
    entry = "id" if settings.kind.is_ranked else "draw"
    temperatures = ", ".join(f"{t:g}" for t in (1.0, *settings.temperatures))
    rows = {
        "samples": f"{plan.samples:,} of {counted(settings.sequence_length, 'position')}",
        "tokens": f"{manifest.tokens:,}",
        "size": f"{manifest.file_bytes / 1e9:,.3f} GB in {counted(plan.shards, 'shard')} of "
        f"{counted(plan.samples_per_shard, 'sample')}",
        "bytes/token": f"{manifest.file_bytes / manifest.tokens:,.1f}",
        "entries": f"{counted(settings.k, entry)} per position of a vocabulary of "
        f"{settings.vocab_size:,}",
        "codec": settings.codec,
        "top_p": "none" if settings.top_p is None else f"{settings.top_p:g}",
        "temperatures": temperatures,
        "sampling seed": "none" if settings.sampling_seed is None else str(settings.sampling_seed),
        "serves": ", ".join(settings.supports) or "terms on sampled ids",
        "lacks": ", ".join(settings.lacks) or "nothing",
        "teacher": identity.teacher,
        "tokenizer": identity.tokenizer,
        **_student_rows(plan),
        "dataset": identity.dataset,
        **dict(_named_values("settings", identity.settings)),
        "capture": plan.uid.hex(),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)
    return 0


def _named_values(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield each value of nested mappings with its dotted name."""
    if not isinstance(value, Mapping):
        yield name, str(value)
        return
    for key, inner in value.items():
        yield from _named_values(f"{name}.{key}", inner)


def _student_rows(plan: Plan) -> dict[str, str]:
    """Rows of the table on a student with a tokenizer of its own."""
    length, tokenizer = plan.settings.student_length, plan.identity.student_tokenizer
    if length is None or tokenizer is None:
        return {}
    return {"student's tokenizer": tokenizer, "student's positions": f"{length:,} of a sample"}


def _stats(arguments: argparse.Namespace, console: Console) -> int:
    plan = Plan.load(arguments.store)
    totals, lacks = Manifest.load(arguments.store, plan).totals, plan.settings.lacks
    table = Table("per trained position", "", box=None)
    table.add_row("positions", f"{totals.positions:,}")
    if totals.positions:
        mass = "not defined" if not plan.settings.kind.is_ranked or lacks else None
        table.add_row("stored probability", mass or f"{totals.kept_mass / totals.positions:.5f}")
        nats = {"entropy": totals.entropy, "cross-entropy": -totals.label_log_prob}
        for name, total in nats.items():
            known = f"{total / totals.positions:.4f} nats"
            table.add_row(f"teacher's {name}", "unknown" if lacks else known)
        table.add_row("stored ids", f"{totals.kept / totals.positions:.2f}")
        for name, share in _histogram(totals):
            table.add_row(name, f"{share:7.2%} {'#' * round(40 * share)}")
    console.print(table)
    return 0


def _histogram(totals: Totals) -> Iterator[tuple[str, float]]:
    for power, count in enumerate(totals.kept_histogram):
        first, last = 1 << power, (2 << power) - 1
        yield (f"  {first}" if first == last else f"  {first} to {last}"), count / totals.positions


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    report = _read_all(arguments.store, console)
    again = f"{spelled(arguments, 'store')} repair {arguments.store} moves"
    if any(not problem.is_of_list for problem in report.problems):
        console.print(f"{again} the bad shards away; the capture, run again, rewrites them")
    if report.bad_lists:
        console.print(
            f"{again} the bad lists of documents away; the capture, run again, rewrites them from "
            "the texts without the teacher. Until then records are found by number alone"
        )
    return 1 if report.problems else 0


def _repair(arguments: argparse.Namespace, console: Console) -> int:
    report = _read_all(arguments.store, console)
    for moved in repair(arguments.store, report):
        console.print(f"moved to {moved}")
    if report.bad_shards or report.missing:
        console.print("run the capture again: it writes the missing shards and finishes the store")
    if report.bad_lists:
        console.print(
            "run the capture again: it writes the missing lists of documents, and runs no teacher"
        )
    return 0


def _read_all(store: Path, console: Console) -> VerificationReport:
    with _progress("shards") as update:
        report = verify(store, progress=update)
    if report.problems:
        for problem in report.problems[:SHOWN_PROBLEMS]:
            sample = "" if problem.sample_id is None else f"sample {problem.sample_id}: "
            console.print(f"{problem.file}: {sample}{problem.text}")
        if len(report.problems) > SHOWN_PROBLEMS:
            console.print(f"and {len(report.problems) - SHOWN_PROBLEMS:,} more")
    lists = f", {counted(len(report.bad_lists), 'bad list')}" if report.bad_lists else ""
    console.print(
        f"{report.samples:,} of {counted(report.plan.samples, 'sample')} "
        f"{'is' if report.plan.samples == 1 else 'are'} good; "
        f"{counted(len(report.problems), 'problem')}, "
        f"{counted(len(report.bad_shards), 'bad shard')}, "
        f"{len(report.missing):,} missing{lists}"
    )
    return report


def _convert(arguments: argparse.Namespace, console: Console) -> int:
    identity = Identity(
        teacher=arguments.teacher,
        tokenizer=arguments.tokenizer,
        dataset=arguments.dataset,
        settings={"converted_from": arguments.source},
    )
    with _progress("samples") as update:
        manifest = convert_maxtext(
            arguments.files,
            arguments.store,
            vocab_size=arguments.vocab_size,
            identity=identity,
            codec=arguments.codec,
            samples_per_shard=arguments.samples_per_shard,
            progress=update,
        )
    console.print(
        f"{arguments.store}: {counted(manifest.plan.samples, 'sample')}, "
        f"{counted(manifest.tokens, 'token')}, "
        f"{manifest.file_bytes / 1e9:,.3f} GB; for support renormalized only, because the files "
        f"lack {', '.join(manifest.plan.settings.lacks)}"
    )
    return 0


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many of all are done; the number of all is known with the first."""
    reporters: list[ProgressReporter] = []

    def update(done: int, total: int) -> None:
        if not reporters:
            reporters.append(ProgressReporter(sys.stderr, label=unit, total=total))
        reporters[0].update(done, lambda: [])

    try:
        yield update
    finally:
        for reporter in reporters:
            reporter.close()


COMMAND = Command(
    description="""Inspect a teacher store, verify or repair it, or convert another program's files.

    megatron-distill store inspect stores/code
    megatron-distill store verify stores/code
    megatron-distill store stats stores/code
    megatron-distill store repair stores/code
    megatron-distill store convert --from maxtext part_*.array_record --to stores/code \\
        --vocab-size 128256

`verify` needs the store alone: it compares lists of documents with the records, not with the texts.
A wrong digest of a text makes its document missing, never a wrong loss, since a run compares the
tokens. `repair` moves bad shards and bad lists of documents to quarantine/; the
capture, run again, rewrites them.""",
    add_arguments=_add_arguments,
    run=_run,
    has_actions=True,
    stopped="stopped; run the command again to continue",
)
