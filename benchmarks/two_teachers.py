"""Two specialised teachers, one student: routed, mixed, and each teacher alone, over three seeds.

One teacher learns code of the running Python's standard library, the other its documentation. All
students have the same initial weights and read the same blend of both; held-out losses are of each
corpus apart.

python benchmarks/two_teachers.py                    # three seeds, some 25 minutes on two cores
python benchmarks/two_teachers.py --seeds 1 --students alone routed
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console

from benchmarks.harness.environment import ROOT, describe
from benchmarks.stdlib_corpora import CORPORA, Corpus, write_corpora
from megatron_distill.commands.quickstart.options import child_run
from megatron_distill.data.tokenizers.hugging_face import train_bpe
from megatron_distill.evaluation.child_runs import ChildRun, ask, check_equal_start, make

_VOCABULARY = 2048
_TEXT_BYTES = 2_000_000
_NO_TEACHER = "teacher=null"
_MEAN = "[{divergence: forward_kl, teachers: {code: 1, docs: 1}, mixture: %s}]"
_BOTH = "both"
STUDENTS: Mapping[str, tuple[str, ...]] = {
    "alone": (_NO_TEACHER, "objective.terms=[]"),
    "code teacher": ("teacher.checkpoint={code}",),
    "docs teacher": ("teacher.checkpoint={docs}",),
    "routed": (_BOTH,),
    "arithmetic": (_BOTH, f"objective.terms={_MEAN % 'arithmetic'}"),
    "geometric": (_BOTH, f"objective.terms={_MEAN % 'geometric'}"),
    "lowest loss": (_BOTH, f"objective.terms={_MEAN % 'lowest_loss'}"),
}
_NOTE = """\
The models and schedules of the quickstart (configs/quickstart_teacher.yaml, 500 steps, and
configs/quickstart_student.yaml, 250 steps of 8 samples, half the cross-entropy and forward KL),
data parallel. Code: the standard library's modules without docstrings. Documentation: their
docstrings, and the topics of `help()`. One document in twenty is held out, by hash. One BPE of
2,048 tokens is trained on both. The students read both corpora with equal weights.
`routed`: each sample has the teacher of its source. `arithmetic`, `geometric`: every sample has the
mean of both teachers. `lowest loss`: every sample has the teacher with the lower loss. Held-out CE
in nats per token, means over the seeds, least and most in brackets. No recipe was tuned.
"""


@dataclass(frozen=True)
class Outcome:
    """Held-out cross-entropy of one model, by corpus; nats per token."""

    model: str
    seed: int
    held_out: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The mean over the corpora."""
        return fmean(self.held_out.values())


def main() -> int:
    """Train, evaluate, print, and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--students", nargs="+", choices=list(STUDENTS), default=list(STUDENTS))
    parser.add_argument("--steps", type=int, help="in place of train.steps, in all runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/two_teachers"))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    console = Console(width=120)
    environment = describe("benchmarks/two_teachers.py", sys.argv[1:])
    corpora = write_corpora(arguments.runs / "corpora")
    tokenizer = _tokenizer(arguments.runs / "tokenizer", corpora)
    outcomes: list[Outcome] = []
    for seed in arguments.seeds:
        place = arguments.runs / f"seed_{seed}"
        runs = _Runs(place, seed, arguments.steps, tokenizer, corpora)
        for outcome in runs.outcomes(arguments.students, console):
            outcomes.append(outcome)
            console.print(_row(outcome.model, [outcome]), markup=False)
    _save(outcomes, environment, corpora, arguments.output, console)
    return 0


def _tokenizer(folder: Path, corpora: Mapping[str, Corpus]) -> Path:
    if not (folder / "tokenizer.json").is_file():
        texts = (
            text
            for corpus in corpora.values()
            for text in corpus.training_texts(_TEXT_BYTES // len(corpora))
        )
        train_bpe(texts, vocab_size=_VOCABULARY).save(folder)
    return folder


@dataclass(frozen=True)
class _Runs:
    """The runs of one seed."""

    place: Path
    seed: int
    steps: int | None
    tokenizer: Path
    corpora: Mapping[str, Corpus]

    def outcomes(self, students: Sequence[str], console: Console) -> list[Outcome]:
        """Train both teachers and the students, and return the held-out losses of all."""
        teachers = {name: self._teacher(name) for name in CORPORA}
        made = {f"teacher of {name}": run for name, run in teachers.items()}
        made |= {name: self._student(name, teachers) for name in students}
        for name, run in made.items():
            console.print(f"seed {self.seed}: {name}, {run.extent}", markup=False)
            make(run)
        logs = [made[name].log() for name in students]
        for other in logs[1:]:
            check_equal_start(logs[0], other)
        return [
            Outcome(name, self.seed, {corpus: self._loss(run, corpus) for corpus in CORPORA})
            for name, run in made.items()
        ]

    def _teacher(self, corpus: str) -> ChildRun:
        sources = [{"format": "jsonl", "paths": [str(self.corpora[corpus].training)]}]
        own = (f"data.sources={json.dumps(sources)}", "data.tokenizer.train_vocab_size=null")
        return self._run(f"teacher_{corpus}", "quickstart_teacher", own)

    def _student(self, name: str, teachers: Mapping[str, ChildRun]) -> ChildRun:
        chosen = STUDENTS[name]
        folders = {corpus: str(run.folder) for corpus, run in teachers.items()}
        both = _BOTH in chosen
        if both:
            named = {corpus: {"checkpoint": folder} for corpus, folder in folders.items()}
            chosen = (_NO_TEACHER, f"teachers={json.dumps(named)}", *chosen[1:])
        elif _NO_TEACHER not in chosen:
            chosen = tuple(setting.format(**folders) for setting in chosen)
        sources = [
            {
                "format": "jsonl",
                "paths": [str(corpus.training)],
                **({"teacher": key} if both else {}),
            }
            for key, corpus in self.corpora.items()
        ]
        layout = ("parallel.tensor=1", "parallel.pipeline=1")
        own = (f"data.sources={json.dumps(sources)}", *layout, *chosen)
        return self._run(f"student_{name.replace(' ', '_')}", "quickstart_student", own)

    def _run(self, name: str, config: str, own: Sequence[str]) -> ChildRun:
        overrides = [
            f"output={self.place / name}",
            f"seed={self.seed}",
            f"data.tokenizer.path={self.tokenizer}",
            *("data.validation_fraction=0", "validation.samples=0"),
            *own,
        ]
        return child_run(
            name,
            name,
            str(ROOT / "configs" / f"{config}.yaml"),
            overrides,
            place=self.place,
            script=ROOT / "launch" / "pretrain_distill.py",
            steps=self.steps,
        )

    def _loss(self, run: ChildRun, corpus: str) -> float:
        answer = self.place / f"{run.name}_on_{corpus}.json"
        held_out = [{"format": "jsonl", "paths": [str(self.corpora[corpus].held_out)]}]
        written = ask(
            ROOT / "launch" / "evaluate.py",
            [
                *(str(run.folder), "--json", str(answer), _NO_TEACHER, "teachers=null"),
                f"data.validation_sources={json.dumps(held_out)}",
                "data.sources=" + json.dumps(held_out),
                *("objective.terms=[]", "objective.ce_weight=1", "validation.samples=128"),
            ],
            answer=answer,
        )
        loss = json.loads(written)["ce_loss"]
        assert isinstance(loss, float)
        return loss


def _save(
    outcomes: Sequence[Outcome],
    environment: Mapping[str, str],
    corpora: Mapping[str, Corpus],
    output: Path,
    console: Console,
) -> None:
    models = list(dict.fromkeys(outcome.model for outcome in outcomes))
    lines = [
        f"| model | {' | '.join(f'held-out {name}' for name in CORPORA)} | mean of both |",
        "|---|" + "---:|" * (len(CORPORA) + 1),
        *(_row(name, [one for one in outcomes if one.model == name]) for name in models),
    ]
    described = [f"- {key}: {value}" for key, value in environment.items()]
    described += [f"- {name}: {corpus.size}" for name, corpus in corpora.items()]
    text = "\n".join(["# Two teachers\n", *described, "", _NOTE, *lines, ""])
    console.print("\n".join(lines), markup=False)
    (output / "two_teachers.md").write_text(text, encoding="utf-8")
    content = {"environment": dict(environment), "models": [vars(one) for one in outcomes]}
    (output / "two_teachers.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _row(model: str, outcomes: Sequence[Outcome]) -> str:
    columns = [[one.held_out[name] for one in outcomes] for name in CORPORA]
    columns.append([one.mean for one in outcomes])
    return f"| {model} | {' | '.join(_cell(values) for values in columns)} |"


def _cell(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{fmean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


if __name__ == "__main__":
    sys.exit(main())
