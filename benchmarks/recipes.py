"""Recipes of distillation at equal tokens: the held-out losses of a student with each of them.

python benchmarks/recipes.py                  # three seeds, some twenty minutes on two cores
python benchmarks/recipes.py --seeds 1 --recipes logits "logits and features"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from benchmarks.harness.environment import ROOT, describe
from megatron_distill.config import load_config, to_yaml
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
    arguments = parser.parse_args()
    console = Console(width=120)
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
