"""Distil a small model on this machine and show what the teacher brought.

Three runs of launch/pretrain_distill.py under torchrun: a teacher learns a corpus; then one small
student learns from the corpus alone and, from the same initial weights and on the same tokens, from
the corpus and the teacher. Started again, it goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from megatron_distill.config import load_config, to_yaml
from megatron_distill.errors import DataError, MegatronDistillError
from megatron_distill.evaluation.child_run import ChildRun, RunStoppedError, ask, make, write_json
from megatron_distill.evaluation.plot import plot_losses
from megatron_distill.evaluation.report import (
    Margin,
    RunSummary,
    margin,
    markdown_table,
    result_table,
    summarize,
)
from megatron_distill.evaluation.runs import RunLog
from megatron_distill.runtime.torchrun import available_cores

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "def __init__(self, "
SAMPLE_TOKENS = 150
STOPPED_STATUS = 130


@dataclass(frozen=True)
class Flow:
    """The three runs of one seed, and where their result goes."""

    place: Path
    seed: int
    teacher: ChildRun
    alone: ChildRun
    distilled: ChildRun

    @property
    def runs(self) -> tuple[ChildRun, ...]:
        """The runs in the order in which they are made."""
        return self.teacher, self.alone, self.distilled

    @property
    def agreement_file(self) -> Path:
        """Held-out figures of the student alone beside the teacher, whom it never met."""
        return self.place / "student_alone_with_teacher.json"

    @property
    def exported(self) -> Path:
        """The distilled student as a Hugging Face folder."""
        return self.place / "student_hf"

    @property
    def sample_file(self) -> Path:
        """Text by the distilled student, as `transformers` writes it."""
        return self.place / "sample.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = _parse(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        flows = [plan(arguments, seed) for seed in arguments.seeds or [arguments.seed]]
        if arguments.fresh:
            for flow in flows:
                remove(flow)
        outcomes = [carry_out(flow, console) for flow in flows]
        if arguments.result is not None:
            write_json(arguments.result, _result(outcomes))
    except MegatronDistillError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"\nerror: {error}", markup=False
        )
        return 1
    except RunStoppedError as stop:
        console.print(f"\n{stop}. The same command goes on from here.", markup=False)
        return STOPPED_STATUS
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument(
        "--config",
        help="start of two files' names, NAME_teacher.yaml and NAME_student.yaml (default:"
        " configs/quickstart; on a GPU configs/quickstart_gpu)",
    )
    parser.add_argument("--seed", type=int, help="in place of the files' seed")
    parser.add_argument("--seeds", type=_numbers, help="everything once per seed, e.g. 1,2,3")
    parser.add_argument("--steps", type=int, help="in place of train.steps, in all three runs")
    parser.add_argument("--fresh", action="store_true", help="throw earlier runs away first")
    parser.add_argument("--result", type=Path, help="write the outcome of every seed as JSON")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="changes to all three runs, e.g. parallel.pipeline=1",
    )
    return parser.parse_args(argv)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def plan(arguments: argparse.Namespace, seed: int | None) -> Flow:
    """Return the three runs of one seed; raises ConfigError if one of them is not sound."""
    prefix = arguments.config or _default_config()
    place: Path = arguments.output / f"seed_{seed}" if arguments.seeds else arguments.output
    shared = [*([] if seed is None else [f"seed={seed}"]), *arguments.overrides]

    def run(name: str, label: str, file: str, *own: str) -> ChildRun:
        overrides = [f"output={place / name}", *own, *shared]
        if arguments.steps is not None:
            warmup = load_config(file, overrides).schedule.warmup_steps
            overrides.append(f"train.steps={arguments.steps}")
            overrides.append(f"schedule.warmup_steps={min(warmup, arguments.steps // 5)}")
        config = load_config(file, overrides)
        parallel = config.parallel
        return ChildRun(
            name=name,
            label=label,
            place=place,
            script=ROOT / "launch" / "pretrain_distill.py",
            arguments=("--config", file, *overrides),
            settings=to_yaml(config),
            steps=config.train.steps,
            processes=parallel.tensor * parallel.pipeline * parallel.context,
        )

    student = f"{prefix}_student.yaml"
    tokenizer = f"data.tokenizer.path={place / 'teacher' / 'tokenizer'}"
    no_teacher = ("teacher=null", "objective.terms=[]")
    teacher = f"teacher.checkpoint={place / 'teacher'}"
    return Flow(
        place=place,
        seed=load_config(student, shared).seed,
        teacher=run("teacher", "teacher", f"{prefix}_teacher.yaml"),
        alone=run("student_alone", "student alone", student, tokenizer, *no_teacher),
        distilled=run("student_distilled", "distilled student", student, tokenizer, teacher),
    )


def _default_config() -> str:
    name = "quickstart_gpu" if torch.cuda.is_available() else "quickstart"
    return os.path.relpath(ROOT / "configs" / name)


def remove(flow: Flow) -> None:
    """Delete what earlier calls have made, and nothing else."""
    for run in flow.runs:
        if run.folder.is_dir():
            shutil.rmtree(run.folder)
        run.settings_file.unlink(missing_ok=True)
        run.summary_file.unlink(missing_ok=True)
    flow.agreement_file.unlink(missing_ok=True)
    flow.sample_file.unlink(missing_ok=True)
    if flow.exported.is_dir():
        shutil.rmtree(flow.exported)


def carry_out(flow: Flow, console: Console) -> Mapping[str, object]:
    """Make the runs that are not made yet, show the result, and return it as plain values.

    Raises RunStoppedError when a signal came, and a MegatronDistillError when a run failed.
    """
    for number, run in enumerate(flow.runs, start=1):
        _announce(run, console, f"{number}/{len(flow.runs)}", seed=flow.seed)
        make(run)
    teacher, alone, distilled = (run.log() for run in flow.runs)
    check_equal_start(alone, distilled)
    summaries = [summarize(teacher), _beside_teacher(flow, alone), summarize(distilled)]
    losses = [_held_out_loss(summary, flow) for summary in summaries]
    brought = margin(teacher=losses[0], alone=losses[1], distilled=losses[2])
    sample = _sample(flow)
    picture = plot_losses(
        [alone, distilled],
        flow.place / "curves.png",
        title="One student, the same tokens: alone and with a teacher",
        teacher_ce=losses[0],
    )
    (flow.place / "result.md").write_text(markdown_table(summaries), encoding="utf-8")
    _show(summaries, brought, console)
    checkpoints = sorted(flow.distilled.folder.glob("checkpoints/step_*[0-9]"))
    places = {"curves": picture, "student": checkpoints[-1], "exported": flow.exported}
    console.print()
    for name, place in places.items():
        console.print(f"{name:<9} {place}", markup=False)
    console.print("\n[bold]The exported student writes, by transformers[/bold]\n")
    console.print(sample, markup=False)
    return {
        "seed": flow.seed,
        "runs": [vars(summary) for summary in summaries],
        "margin": vars(brought),
    }


def _sample(flow: Flow) -> str:
    """Export the distilled student and return text that `transformers` writes with it."""
    ask(
        ROOT / "tools" / "convert_checkpoint.py",
        [
            *("export", "--checkpoint", str(flow.distilled.folder)),
            *("--hf", str(flow.exported), "--overwrite"),
        ],
        answer=flow.exported / "config.json",
    )
    return ask(
        ROOT / "launch" / "generate.py",
        [
            *("--hf", str(flow.exported), "--text", str(flow.sample_file)),
            *("--prompt", PROMPT, "--tokens", str(SAMPLE_TOKENS)),
        ],
        answer=flow.sample_file,
    )


def _announce(run: ChildRun, console: Console, number: str, *, seed: int) -> None:
    console.print(f"\n[bold]{number} {run.label}[/bold] (seed {seed})", end="")
    if run.finished:
        console.print(": finished before")
        return
    console.print(f": {run.steps} steps in {run.processes} process(es)")
    script = os.path.relpath(run.script)
    call = ["torchrun", f"--nproc-per-node={run.processes}", script, *run.arguments]
    console.print(f"  {shlex.join(call)}", style="dim", markup=False)


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


def _held_out_loss(summary: RunSummary, flow: Flow) -> float:
    if summary.held_out_ce is None:
        raise DataError(
            f"{flow.place}: the run {summary.label!r} has no held-out loss; set validation.samples"
            " above 0 and start anew with --fresh"
        )
    return summary.held_out_ce


def _beside_teacher(flow: Flow, alone: RunLog) -> RunSummary:
    """Return the summary of the student alone with its agreement with the teacher."""
    said = ask(
        ROOT / "launch" / "evaluate.py",
        [
            *("--run", str(flow.alone.folder), "--json", str(flow.agreement_file)),
            *(f"teacher.checkpoint={flow.teacher.folder}",),
            "objective.terms=[{divergence: forward_kl}]",
        ],
        answer=flow.agreement_file,
    )
    return replace(summarize(alone), top1_agreement=json.loads(said)["top1_agreement"])


def _show(summaries: Sequence[RunSummary], brought: Margin, console: Console) -> None:
    console.print()
    console.print(result_table(summaries, title="Held-out text, the same for all three"))
    verdict = "lower" if brought.nats > 0 else "HIGHER"
    console.print(
        f"With the teacher, the same student on the same tokens ends {abs(brought.nats):.4f} nats"
        f" per token {verdict} ({abs(brought.share):.1%})."
    )
    if brought.gap_closed is not None and brought.nats > 0:
        console.print(f"That is {brought.gap_closed:.0%} of the way to its teacher.")


def _result(outcomes: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    margins = [outcome["margin"]["nats"] for outcome in outcomes]  # type: ignore[index]
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
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


if __name__ == "__main__":
    sys.exit(main())
