"""Recipes of distillation at equal tokens: the held-out losses of a student with each of them.

python benchmarks/recipes.py                  # three seeds, some twenty minutes on two cores
python benchmarks/recipes.py --seeds 1 --recipes logits "logits and features"
python benchmarks/recipes.py --speed          # steps beside their plans: twelve minutes
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from benchmarks.harness.calibrated import (
    dumped,
    loaded,
    measured_in_turns,
    planned_seconds,
    step_cells,
)
from benchmarks.harness.environment import ROOT, describe
from benchmarks.harness.launched import launched, launched_steps
from megatron_distill.commands.quickstart.losses_compared import LOSSES
from megatron_distill.config import RunConfig, load_config, to_yaml
from megatron_distill.evaluation.child_runs import ChildRun, check_equal_start, make
from megatron_distill.evaluation.runs import RunSummary, summarize

_FEATURES = "objective.features=[{match: uniform, loss: mse}]"
_PROJECTOR = "objective.projector={kind: linear}"
RECIPES: dict[str, tuple[str, ...]] = {
    "labels": ("teacher=null", "objective.terms=[]"),
    "logits": (),
    "logits, magnitude": ("objective.balance={mode: magnitude}",),
    "logits and features": (_FEATURES, _PROJECTOR, "objective.balance={mode: magnitude}"),
    "logits and features, fixed": (_FEATURES, _PROJECTOR),
}
_NOTE = """\
The quickstart's corpus, models and schedule (configs/quickstart_teacher.yaml and
configs/quickstart_student.yaml); every student of a seed starts from the same weights and sees the
same tokens. `logits` is that configuration as it stands: half the cross-entropy and forward KL.
`features` are all student layers, each paired with the teacher's layer at the same depth, mean
squared error behind a linear projector; `magnitude` scales the features to the KL, and both to the
cross-entropy. Held out: 128 samples, the same for all. Means over the seeds; least and most in
brackets. No recipe was tuned.
"""
_SPEED_NOTE = """\
Steps of the quickstart's runs beside their plans: its teacher, and its student with each recipe, on
as many ranks as there. `labels` is the student alone and `logits` the distilled one. All learn from
the first row's teacher after its {teacher} steps. `from a store` is the student of `logits` with a
top-64 of that teacher, which was captured before. `two tokenizers` are students of
configs/quickstart_tokenizers_student.yaml, each with one loss between its tokens and its teacher's.
Each run takes {steps} steps, of which the first {warmup} are not counted; runs take turns, round by
round. `step` is the median over all rounds, with the extremes of their medians in parentheses.
`planned` is the planner's time of it on this machine, which was calibrated before each round and at
the end: the median of these plans, with the extremes.
"""
_TEACHER_RUN = "the teacher"
_STORE_RUN = "from a store"
# Each loss between two tokenizers, by the name of its run.
_TOKENIZER_RUNS = {f"two tokenizers, {loss}": terms for loss, terms in LOSSES.items()}
_ROWS = 2048  # of the quickstart's tokenizer
_OWN_ROWS = 1200  # of its students' with a tokenizer of their own
_WARMUP = 5
# With random weights on both sides most tokens are near their teacher, which takes fp64 on a CPU.
_TEACHER_STEPS = 150


@dataclass(frozen=True)
class Outcome:
    """Result of one student."""

    recipe: str
    seed: int
    summary: RunSummary


def main() -> int:
    """Train, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--runs", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--speed", action="store_true", help="only steps, beside their plans")
    parser.add_argument("--rounds", type=int, default=2, help="with --speed: runs of each")
    parser.add_argument("--steps", type=int, default=40, help="with --speed: of a run")
    arguments = parser.parse_args()
    console = Console(width=120)
    if arguments.speed:
        return _measure_speed(arguments, console)
    environment = describe("benchmarks/recipes.py", sys.argv[1:])
    outcomes: list[Outcome] = []
    for seed in arguments.seeds:
        for outcome in _of_seed(seed, arguments.recipes, arguments.runs / f"seed_{seed}", console):
            outcomes.append(outcome)
            console.print(_row(outcome.recipe, [outcome]), markup=False)
    lines = [
        "| recipe | held-out CE (nats) | KL to the teacher (nats) | agreement (top-1) |",
        "|---|---:|---:|---:|",
        *(_row(name, [one for one in outcomes if one.recipe == name]) for name in _named(outcomes)),
    ]
    described = [f"- {key}: {value}" for key, value in environment.items()]
    described.append(f"- seeds: {', '.join(map(str, arguments.seeds))}")
    text = "\n".join(["# Recipes\n", *described, "", _NOTE, *lines, ""])
    console.print("\n".join(lines), markup=False)
    (arguments.output / "recipes.md").write_text(text, encoding="utf-8")
    kept = [{"recipe": one.recipe, "seed": one.seed, **vars(one.summary)} for one in outcomes]
    (arguments.output / "recipes.json").write_text(
        json.dumps({"environment": environment, "runs": kept}, indent=1), encoding="utf-8"
    )
    return 0


def _of_seed(seed: int, recipes: Sequence[str], place: Path, console: Console) -> list[Outcome]:
    teacher = _child("teacher", "quickstart_teacher", place, (f"seed={seed}",))
    console.print(f"seed {seed}: the teacher, {teacher.extent}", markup=False)
    make(teacher)
    given = (
        f"seed={seed}",
        f"data.tokenizer.path={place / 'teacher' / 'tokenizer'}",
        f"teacher.checkpoint={place / 'teacher'}",
    )
    made: list[ChildRun] = []
    for recipe in recipes:
        name = recipe.replace(",", "").replace(" ", "_")
        own = tuple(
            word
            for word in given
            if "teacher=null" not in RECIPES[recipe] or word[:8] != "teacher."
        )
        made.append(_child(name, "quickstart_student", place, (*own, *RECIPES[recipe])))
        make(made[-1])
    logs = [child.log() for child in made]
    for other in logs[1:]:
        check_equal_start(logs[0], other)
    return [
        Outcome(recipe, seed, summarize(log)) for recipe, log in zip(recipes, logs, strict=True)
    ]


def speed_runs(recipes: Sequence[str]) -> list[str]:
    """Return the names of the runs whose speed is measured, in the order of the first round."""
    return [_TEACHER_RUN, *recipes, _STORE_RUN, *_TOKENIZER_RUNS]


def speed_run(name: str) -> tuple[str, list[str], int]:
    """Return the file of a run whose speed is measured, its overrides, and its ranks.

    name: one of `speed_runs`. A teacher has no weights yet.
    """
    if name == _TEACHER_RUN:
        return "quickstart_teacher.yaml", [f"student.architecture.vocab_size={_ROWS}"], 2
    if name == _STORE_RUN:
        stored = ["teacher.checkpoint=null", "teacher.store=stores/quickstart"]
        return "quickstart_student.yaml", [f"student.architecture.vocab_size={_ROWS}", *stored], 4
    if name in _TOKENIZER_RUNS:
        given = [f"student.architecture.vocab_size={_OWN_ROWS}", *_teacher_shape()]
        given.append(f"objective.terms={_TOKENIZER_RUNS[name]}")
        return "quickstart_tokenizers_student.yaml", [*given, "teacher.tokenizer.path=tokenizer"], 2
    given = [f"student.architecture.vocab_size={_ROWS}", *RECIPES[name]]
    if "teacher=null" not in given:
        given += _teacher_shape()
    return "quickstart_student.yaml", given, 4


def _teacher_shape() -> list[str]:
    """Return the overrides that put the quickstart's teacher into a run, without weights."""
    trained = load_config(ROOT / "configs" / "quickstart_teacher.yaml", [])
    assert trained.student.architecture is not None
    shape = trained.student.architecture.model_dump(mode="json", exclude_none=True)
    words = json.dumps({**shape, "vocab_size": _ROWS})
    return ["teacher.checkpoint=null", f"teacher.architecture={words}"]


def speed_config(name: str) -> RunConfig:
    """Return the configuration of `speed_run`."""
    file, given, _ = speed_run(name)
    return load_config(ROOT / "configs" / file, given)


def _measure_speed(arguments: argparse.Namespace, console: Console) -> int:
    """Measure steps between calibrations, and write them beside their plans."""
    environment = describe("benchmarks/recipes.py", sys.argv[1:])
    names = speed_runs(arguments.recipes)
    with tempfile.TemporaryDirectory() as folder:
        # The first runs train the tokenizers of all others.
        steps_of = partial(_steps_of, place=Path(folder), count=arguments.steps)
        seconds, devices = measured_in_turns(names, steps_of, rounds=arguments.rounds)
    record = {"environment": environment, "seconds": seconds, "devices": dumped(devices)}
    arguments.output.mkdir(parents=True, exist_ok=True)
    file = arguments.output / "recipes_speed.json"
    file.write_text(json.dumps(record, indent=1), encoding="utf-8")
    lines = [f"- {key}: {value}" for key, value in environment.items()]
    note = _SPEED_NOTE.format(steps=arguments.steps, warmup=_WARMUP, teacher=_TEACHER_STEPS)
    table = speed_table(record)
    text = "\n".join(["# Speed of the recipes\n", *lines, "", note, *table, ""])
    file.with_suffix(".md").write_text(text, encoding="utf-8")
    console.print("\n".join(table), markup=False)
    return 0


def _steps_of(name: str, number: int, *, place: Path, count: int) -> list[float]:
    """Return the seconds of the steps of one run, without the first ones."""
    file, given, ranks = speed_run(name)
    teacher, steps = place / f"{_TEACHER_RUN} 0", count
    teachers = teacher / "tokenizer"
    own = place / f"{next(iter(_TOKENIZER_RUNS))} 0" / "tokenizer"
    if name in _TOKENIZER_RUNS:
        given.append(f"teacher.tokenizer.path={teachers}")
    tokenizer = own if name in _TOKENIZER_RUNS else teachers
    if tokenizer.exists():
        given += [f"data.tokenizer.path={tokenizer}", "data.tokenizer.train_vocab_size=null"]
    if name == _STORE_RUN:
        given.append(f"teacher.store={_captured(place, teacher, count)}")
    elif name == _TEACHER_RUN:
        steps = _TEACHER_STEPS
    elif "teacher=null" not in given:
        given += _trained(teacher)
    given += [
        f"train.steps={steps}",
        "validation={interval: 0, samples: 0}",
        f"checkpoint={{save: {'true' if name == _TEACHER_RUN else 'false'}, resume: false}}",
    ]
    folder = place / f"{name} {number}"
    log = launched_steps(file, given, folder=folder, processes=ranks, name=name)
    return [step["step_seconds"] for step in log[_WARMUP:]]


def _trained(teacher: Path) -> list[str]:
    """Return the overrides that give a teacher the weights of its run."""
    return ["teacher.architecture=null", f"teacher.checkpoint={teacher}"]


def _captured(place: Path, teacher: Path, count: int) -> Path:
    """Return the store of the first `count` steps of a student, captured unless it is there."""
    store = place / "store"
    if store.exists():
        return store
    student = load_config(ROOT / "configs" / "quickstart_student.yaml", [])
    words = ["--config", str(ROOT / "configs" / "cache.yaml"), *_trained(teacher)]
    words += [f"store.path={store}", f"data.tokenizer.path={teacher / 'tokenizer'}"]
    words.append(f"store.samples={count * student.train.global_batch_size}")
    launched("cache_teacher.py", words, folder=place, processes=1, name="the store")
    return store


def speed_table(record: dict[str, Any]) -> list[str]:
    """Return the table of a record: rates, the planned ones, and the errors of the planned times.

    A plan is that of the present formulas.
    """
    lines = ["| run | ranks | step (ms) | planned (ms) | error | tokens/s | planned |"]
    lines.append("|---|" + "---:|" * 6)
    devices = loaded(record["devices"])
    for name, rounds in record["seconds"].items():
        config, ranks = speed_config(name), speed_run(name)[2]
        step = median(second for steps in rounds for second in steps)
        plans = planned_seconds(config, devices, ranks=ranks)
        tokens = config.train.global_batch_size * config.data.sequence_length
        cells = [name, str(ranks), *step_cells(rounds, plans)]
        cells += [f"{tokens / step:,.0f}", f"{tokens / median(plans):,.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _child(name: str, config: str, place: Path, own: Sequence[str]) -> ChildRun:
    file = str(ROOT / "configs" / f"{config}.yaml")
    overrides = [f"output={place / name}", *own]
    settings = load_config(file, overrides)
    parallel = settings.parallel
    return ChildRun(
        name=name,
        label=name,
        place=place,
        script=ROOT / "launch" / "pretrain_distill.py",
        arguments=("--config", file, *overrides),
        settings=to_yaml(settings),
        steps=settings.train.steps,
        processes=parallel.tensor * parallel.pipeline * parallel.context,
    )


def _named(outcomes: Sequence[Outcome]) -> list[str]:
    return list(dict.fromkeys(outcome.recipe for outcome in outcomes))


def _row(recipe: str, outcomes: Sequence[Outcome]) -> str:
    columns = [
        ("{:.4f}", [one.summary.held_out_ce for one in outcomes]),
        ("{:.4f}", [_divergence(one.summary) for one in outcomes]),
        ("{:.1%}", [one.summary.top1_agreement for one in outcomes]),
    ]
    cells = (
        _cell(form, [value for value in values if value is not None]) for form, values in columns
    )
    return f"| {recipe} | {' | '.join(cells)} |"


def _divergence(summary: RunSummary) -> float | None:
    # A run without a teacher has no such loss, and zero in its log.
    return summary.held_out_kd if summary.top1_agreement is not None else None


def _cell(form: str, values: Sequence[float]) -> str:
    if not values:
        return "-"
    if len(values) == 1:
        return form.format(values[0])
    return (
        f"{form.format(fmean(values))} ({form.format(min(values))} to {form.format(max(values))})"
    )


if __name__ == "__main__":
    sys.exit(main())
