"""A teacher and students with its tokenizer, compared in nats per token: launch/quickstart.py."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console

from megatron_distill.commands.command import ScriptMain
from megatron_distill.commands.quickstart.options import (
    Checkout,
    add_arguments,
    child_run,
    place_of,
    script_main,
    seeds_of,
    spread,
    write_outcomes,
)
from megatron_distill.commands.quickstart.outcome import (
    show_drafts,
    show_next_line,
    show_outcome,
    show_store,
)
from megatron_distill.config import RunConfig, load_capture_config, load_config, to_yaml
from megatron_distill.data.sources import held_out_texts
from megatron_distill.errors import DataError
from megatron_distill.evaluation.child_runs import (
    ChildCapture,
    ChildRun,
    Clock,
    announce,
    ask,
    check_equal_start,
    make,
    remove_child,
)
from megatron_distill.evaluation.next_line import TASK, write_task
from megatron_distill.evaluation.plot import plot_losses
from megatron_distill.evaluation.runs import (
    RunSummary,
    margin,
    markdown_table,
    summarize,
)
from megatron_distill.train.assemble.sources import data_options, source_specs

__all__ = ["DRAFT", "Flow", "carry_out", "parse", "plan", "plan_capture", "remove", "script"]

PROMPT: Final = "def __init__(self, "
SAMPLE_TOKENS: Final = 150
STORE: Final = "teacher_store"
DRAFT: Final = "4"  # tokens that a student drafts for one forward pass of the teacher


@dataclass(frozen=True)
class Flow:
    """The runs of one seed, and the folder of their results.

    checkout: the scripts that the runs and questions are of.
    """

    checkout: Checkout
    place: Path
    config: RunConfig  # of the students
    teacher: ChildRun
    alone: ChildRun
    distilled: ChildRun
    capture: ChildCapture | None
    offline: ChildRun | None

    @property
    def children(self) -> tuple[ChildRun | ChildCapture, ...]:
        """The runs and the capture, in order of execution."""
        further = (self.capture, self.offline)
        made = (child for child in further if child is not None)
        return (self.teacher, self.alone, self.distilled, *made)

    @property
    def students(self) -> tuple[ChildRun, ...]:
        """The compared students."""
        made = (self.alone, self.distilled)
        return made if self.offline is None else (*made, self.offline)

    def agreement_file(self, run: ChildRun) -> Path:
        """Held-out losses of a student, and its figures beside the teacher."""
        return self.place / f"{run.name}_with_teacher.json"

    def task_file(self, run: ChildRun) -> Path:
        """Results of a student on the task of held-out code."""
        return self.place / f"{run.name}_{TASK}.json"

    @property
    def exported(self) -> Path:
        """The distilled student as a Hugging Face folder."""
        return self.place / "student_hf"

    @property
    def sample_file(self) -> Path:
        """Text that `transformers` generates with the distilled student."""
        return self.place / "sample.txt"


def script(description: str | None, *, root: Path) -> ScriptMain:
    """Return the main function of the script with this description, in the checkout `root`."""
    return script_main(description, root, parse=parse, all_seeds=all_seeds)


def all_seeds(arguments: argparse.Namespace, checkout: Checkout, console: Console) -> None:
    """Carry out the runs of every seed, and write their result where one is asked for."""
    flows = [plan(arguments, seed, checkout) for seed in seeds_of(arguments)]
    if arguments.fresh:
        for flow in flows:
            remove(flow)
    outcomes = [carry_out(flow, console) for flow in flows]
    if arguments.result is not None:
        margins = spread([outcome["margin"]["nats"] for outcome in outcomes])
        write_outcomes(arguments.result, outcomes, {"margin_nats": margins})


def parse(words: Sequence[str] | None, description: str | None = None) -> argparse.Namespace:
    """Read the arguments of the script."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    example = "parallel.pipeline=1"
    add_arguments(parser, output=Path("runs/quickstart"), example=example)
    parser.add_argument(
        "--config",
        help="start of two files' names, NAME_teacher.yaml and NAME_student.yaml (default:"
        " configs/quickstart; on a GPU configs/quickstart_gpu)",
    )
    parser.add_argument(
        "--offline", action="store_true", help="distil from a store of the teacher's outputs too"
    )
    return parser.parse_args(words)


def plan(arguments: argparse.Namespace, seed: int | None, checkout: Checkout) -> Flow:
    """Return the runs of one seed; raises ConfigError if a configuration is invalid."""
    prefix = arguments.config or _default_config(checkout)
    place = place_of(arguments, seed)
    shared = [*([] if seed is None else [f"seed={seed}"]), *arguments.overrides]

    def run(name: str, label: str, file: str, *own: str) -> ChildRun:
        overrides = [f"output={place / name}", *own, *shared]
        script, steps = checkout.train, arguments.steps
        return child_run(name, label, file, overrides, place=place, script=script, steps=steps)

    student = f"{prefix}_student.yaml"
    tokenizer = f"data.tokenizer.path={place / 'teacher' / 'tokenizer'}"
    no_teacher = ("teacher=null", "objective.terms=[]")
    teacher = f"teacher.checkpoint={place / 'teacher'}"
    capture = offline = None
    if arguments.offline:
        stored = f"teacher.store={place / STORE}"
        label = "from the store"
        offline = run("student_offline", label, student, tokenizer, teacher, stored)
        capture = plan_capture(place, load_config(student, offline.arguments[2:]), checkout)
    return Flow(
        checkout=checkout,
        place=place,
        config=load_config(student, shared),
        teacher=run("teacher", "teacher", f"{prefix}_teacher.yaml"),
        alone=run("student_alone", "student alone", student, tokenizer, *no_teacher),
        distilled=run("student_distilled", "distilled student", student, tokenizer, teacher),
        capture=capture,
        offline=offline,
    )


def plan_capture(place: Path, student: RunConfig, checkout: Checkout) -> ChildCapture:
    """Return the capture of the teacher's outputs on the samples of a student's run."""
    train, parallel = student.train, student.parallel.model_dump() | {"virtual_pipeline": None}
    assert student.teacher is not None
    overrides = [
        f"store.path={place / STORE}",
        f"store.samples={train.steps * train.global_batch_size}",
        f"teacher.checkpoint={student.teacher.checkpoint}",
        f"seed={student.seed}",
        f"data={json.dumps(student.data.model_dump())}",
        f"parallel={json.dumps(parallel)}",
        f"capture.micro_batch_size={train.micro_batch_size}",
        f"capture.precision={train.precision}",
    ]
    config = load_capture_config(checkout.config("cache"), overrides)
    return ChildCapture(
        name=STORE,
        label="teacher store",
        place=place,
        script=checkout.capture,
        arguments=("--config", str(place / f"{STORE}.yaml")),
        settings=to_yaml(config),
        samples=config.store.samples,
        processes=parallel["tensor"] * parallel["pipeline"] * parallel["context"],
    )


def _default_config(checkout: Checkout) -> str:
    name = "quickstart_gpu" if torch.cuda.is_available() else "quickstart"
    return checkout.config(name).removesuffix(".yaml")


def remove(flow: Flow) -> None:
    """Delete the files and folders of earlier calls, and nothing else."""
    for child in flow.children:
        remove_child(child)
    for student in flow.students:
        flow.agreement_file(student).unlink(missing_ok=True)
        flow.task_file(student).unlink(missing_ok=True)
    flow.sample_file.unlink(missing_ok=True)
    if flow.exported.is_dir():
        shutil.rmtree(flow.exported)


def carry_out(flow: Flow, console: Console) -> Mapping[str, Any]:
    """Run all unfinished runs, show the result, and return it as plain values.

    Raises RunStoppedError after a signal, and a MegatronDistillError if a run failed.
    """
    clock = Clock.of(flow.children)
    for number, child in enumerate(flow.children, start=1):
        announce(child, console, f"{number}/{len(flow.children)}", seed=flow.config.seed)
        make(child)
    logs = [run.log() for run in flow.students]
    for other in logs[1:]:
        check_equal_start(logs[0], other)
    compared = [_beside_teacher(flow, run) for run in flow.students]
    summaries = [
        replace(summarize(log), top1_agreement=figures["top1_agreement"])
        for log, figures in zip(logs, compared, strict=True)
    ]
    summaries.insert(0, summarize(flow.teacher.log()))
    losses = [_held_out_loss(summary, flow) for summary in summaries]
    brought = margin(teacher=losses[0], alone=losses[1], distilled=losses[2])
    sample = _sample(flow)
    picture = plot_losses(
        logs,
        flow.place / "curves.png",
        title="One student, the same tokens: alone and with a teacher",
        teacher_ce=losses[0],
    )
    (flow.place / "result.md").write_text(markdown_table(summaries), encoding="utf-8")
    show_outcome(summaries, brought, console)
    drafts = {
        run.label: figures["tokens_per_verification"][DRAFT]
        for run, figures in zip(flow.students, compared, strict=True)
    }
    # Answers of an earlier version, and one held-out text alone, have none.
    errors = {
        run.label: figures["tokens_per_verification_stderr"][DRAFT]
        for run, figures in zip(flow.students, compared, strict=True)
        if DRAFT in figures.get("tokens_per_verification_stderr", {})
    }
    show_drafts(drafts, errors, DRAFT, console)
    accuracies, items = _next_line(flow)
    show_next_line(accuracies, items, console)
    if flow.capture is not None:
        show_store(flow.capture.summary(), summaries[2], summaries[3], console)
    checkpoints = sorted(flow.distilled.folder.glob("checkpoints/step_*[0-9]"))
    places = {"curves": picture, "student": checkpoints[-1], "exported": flow.exported}
    console.print()
    for name, place in places.items():
        console.print(f"{name:<9} {place}", markup=False)
    console.print("\n[bold]The exported student writes, by transformers[/bold]\n")
    console.print(sample, markup=False)
    return {
        "seed": flow.config.seed,
        "runs": [vars(summary) for summary in summaries],
        "margin": vars(brought),
        "tokens_per_verification": {"draft": DRAFT, **drafts},
        "tokens_per_verification_stderr": errors,
        TASK: accuracies,
        f"{TASK}_items": items,
        "seconds": clock.seconds,
        **({} if flow.capture is None else {"store": flow.capture.summary()}),
    }


def _sample(flow: Flow) -> str:
    """Export the distilled student and return text that `transformers` generates with it."""
    ask(
        flow.checkout.convert,
        [
            *("export", "--checkpoint", str(flow.distilled.folder)),
            *("--hf", str(flow.exported), "--overwrite"),
        ],
        answer=flow.exported / "config.json",
    )
    return ask(
        flow.checkout.generate,
        [
            *("--hf", str(flow.exported), "--transformers", "--text", str(flow.sample_file)),
            *("--prompt", PROMPT, "--tokens", str(SAMPLE_TOKENS)),
        ],
        answer=flow.sample_file,
    )


def _held_out_loss(summary: RunSummary, flow: Flow) -> float:
    if summary.held_out_ce is None:
        raise DataError(
            f"{flow.place}: the run {summary.label!r} has no held-out loss; set validation.samples"
            " above 0 and start over with --fresh"
        )
    return summary.held_out_ce


def _next_line(flow: Flow) -> tuple[dict[str, float], int]:
    """Accuracies on the right next line of held-out code by label, and the number of items.

    None and zero without such text.
    """
    data = flow.config.data
    options = data_options(data, flow.place, shows_progress=False)
    task = write_task(flow.place, held_out_texts(source_specs(data.sources), options=options))
    if task is None:
        return {}, 0
    found: dict[str, float] = {}
    items = 0
    for run in flow.students:
        answer, beside = flow.task_file(run), run is flow.distilled
        asked = [*(["--teacher"] if beside else []), "--json", str(answer), "--tasks", str(task)]
        written = ask(flow.checkout.evaluate, [str(run.folder), *asked], answer=answer)
        results = json.loads(written)["results"]
        found[run.label] = results["student"][TASK]["acc"]
        items = results["student"][TASK]["n"]
        if beside:
            found = {flow.teacher.label: results["teacher"][TASK]["acc"], **found}
    return found, items


def _beside_teacher(flow: Flow, run: ChildRun) -> Mapping[str, Any]:
    """The figures of a student beside the teacher, on the held-out samples."""
    answer = flow.agreement_file(run)
    written = ask(
        flow.checkout.evaluate,
        [
            *(str(run.folder), "--json", str(answer)),
            *(f"teacher.checkpoint={flow.teacher.folder}", "teacher.store=null"),
            "objective.terms=[{divergence: forward_kl}]",
        ],
        answer=answer,
    )
    figures: Mapping[str, Any] = json.loads(written)["comparison"]
    return figures
