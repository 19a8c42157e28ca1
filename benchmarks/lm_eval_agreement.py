"""A model's answers beside those of lm-evaluation-harness with its Hugging Face backend.

python benchmarks/lm_eval_agreement.py        # the student of `make quickstart`, TP1 and TP2 x PP2
python benchmarks/lm_eval_agreement.py --hf models/first --task quiz.yaml --limit 100

Needs the extra `lm-eval`. The items of a task of multiple choice become three tasks of the harness:
the log-likelihoods of the choices, that of the right text as a whole, and a greedy continuation of
up to 16 tokens. Both read the same Hugging Face folder in fp32. It ends with status 1 where an
accuracy or a text differs, or a log-likelihood by more than 1e-4 nats and a millionth: the harness
sums in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from benchmarks.harness.environment import ROOT, describe, installed
from megatron_distill.evaluation.tasks.prompts import Item, read_task
from megatron_distill.evaluation.tasks.record import load_task
from megatron_distill.runtime.torchrun import run_child, threads_per_process, torchrun_command

QUICKSTART = Path("runs/quickstart")
TOKENS = 16  # of a continuation
TOLERANCE, RELATIVE = 1e-4, 1e-6  # of log-likelihoods in nats
PEER_BATCH = 8
# Ranks and settings.
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "TP2 x PP2": (4, ["parallel.tensor=2", "parallel.pipeline=2"]),
}
# Names of columns instead of templates: the text of an item may look like one.
KINDS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "asked",
        "doc_to_choice": "choices",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "whole_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "whole",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "continuation": {
        "output_type": "generate_until",
        "doc_to_text": "asked",
        "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}
MEASURES = ("acc,none", "acc_norm,none", "bits_per_byte,none", "exact_match,none")


def main() -> int:
    """Compare, print, and save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quickstart", type=Path, default=QUICKSTART, help="folder of it (default: %(default)s)"
    )
    parser.add_argument("--hf", type=Path, help="Hugging Face folder (default: its student's)")
    parser.add_argument("--task", type=Path, help="YAML file of multiple choice (default: its own)")
    parser.add_argument("--limit", type=int, help="items, at even distances")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    model = arguments.hf or arguments.quickstart / "student_hf"
    task = arguments.task or arguments.quickstart / "next_line.yaml"
    if find_spec("lm_eval") is None:
        raise SystemExit("lm-evaluation-harness is not installed; install the extra `lm-eval`")
    missing = next((path for path in (model, task) if not path.exists()), None)
    if missing is not None:
        raise SystemExit(f"{missing} is not there; run `make quickstart`, or give --hf and --task")
    record = load_task(str(task), None if arguments.limit is None else {"limit": arguments.limit})
    items = read_task(record)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        _write_tasks(folder, items)
        theirs = _theirs(model, folder)
        ours = {name: _ours(model, folder, *layout) for name, layout in LAYOUTS.items()}
    table = [_line(name, found, theirs) for name, found in ours.items()]
    lines = _report(record.name, len(items), theirs, table)
    for line in lines:
        Console(soft_wrap=True).print(line, markup=False)
    environment = describe("benchmarks/lm_eval_agreement.py", sys.argv[1:])
    facts = [f"* {name}: {value}" for name, value in environment.items()]
    facts.append(f"* lm-eval: {installed('lm-eval')}, transformers: {installed('transformers')}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = "\n".join([lines[0], "", *facts, *lines[1:], ""])
    (arguments.output / "lm_eval_agreement.md").write_text(text, encoding="utf-8")
    return 0 if all(one["agrees"] for one in table) else 1


def _write_tasks(folder: Path, items: Sequence[Item]) -> None:
    """Write the items, and the harness's tasks of them."""
    rows = [
        {
            "asked": item.prompt.text,
            "choices": list(item.choices),
            "right": item.right,
            "answer": item.choices[item.right],
            "whole": f"{item.prompt.text}{item.prompt.delimiter}{item.choices[item.right]}",
        }
        for item in items
    ]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    for name, kind in KINDS.items():
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            "target_delimiter": items[0].prompt.delimiter,
            **kind,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def _theirs(model: Path, folder: Path) -> dict[str, Any]:
    """Return the results of the harness's own backend, with every request's."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=PEER_BATCH),
        tasks=list(KINDS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    return {name: found[name] for name in ("results", "samples")}


def _ours(model: Path, folder: Path, processes: int, settings: Sequence[str]) -> dict[str, Any]:
    """Return the results of the command `evaluate` in a layout, with every request's."""
    results, samples = folder / "results.json", folder / "samples.json"
    script = str(ROOT / "launch" / "evaluate.py")
    words = [*settings, "--hf", str(model), "--include", str(folder), "--lm-eval", *KINDS]
    words += ["--json", str(results), "--items", str(samples)]
    command = [sys.executable, script, *words]
    if processes > 1:
        command = torchrun_command(script, words, processes=processes)
    threads = str(threads_per_process(processes))
    outcome = run_child(command, environment={**os.environ, "OMP_NUM_THREADS": threads})
    if outcome.status:
        raise SystemExit(f"{' '.join(command)} failed with exit status {outcome.status}")
    return {
        "results": json.loads(results.read_text(encoding="utf-8"))["results"],
        "samples": json.loads(samples.read_text(encoding="utf-8"))["samples"],
    }


def _answers(found: Mapping[str, Any], task: str) -> list[Any]:
    samples = sorted(found["samples"][task], key=lambda one: one["doc_id"])
    return [one["filtered_resps"] for one in samples]


def _measures(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures by task and name."""
    return {
        f"{task} {name.removesuffix(',none')}": own[name]
        for task in KINDS
        for own in (found["results"][task],)
        for name in MEASURES
        if name in own
    }


def _line(name: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the differences of one layout."""
    gaps, decided, is_near = [], 0, True
    pairs = zip(_answers(ours, "choices"), _answers(theirs, "choices"), strict=True)
    for own, other in pairs:
        for (value, is_greedy), (expected, was_greedy) in zip(own, other, strict=True):
            gaps.append(abs(value - expected))
            decided += is_greedy != was_greedy
            is_near &= gaps[-1] <= TOLERANCE + RELATIVE * abs(expected)
    pairs = zip(_answers(ours, "whole_text"), _answers(theirs, "whole_text"), strict=True)
    gaps_of_texts = []
    for (value,), (expected,) in pairs:
        gaps_of_texts.append(abs(value - expected))
        is_near &= gaps_of_texts[-1] <= TOLERANCE + RELATIVE * abs(expected)
    pairs = zip(_answers(ours, "continuation"), _answers(theirs, "continuation"), strict=True)
    texts = sum(own != other for own, other in pairs)
    measures = {key: abs(value - _measures(theirs)[key]) for key, value in _measures(ours).items()}
    return {
        "layout": name,
        "measures": max(measures.values()),
        "choices": max(gaps),
        "whole": max(gaps_of_texts),
        "greedy": decided,
        "texts": texts,
        "agrees": is_near and not texts and not decided and max(measures.values()) <= TOLERANCE,
    }


def _report(
    task: str, count: int, theirs: Mapping[str, Any], table: Sequence[Mapping[str, Any]]
) -> list[str]:
    measured = ", ".join(f"{name} {value:.4f}" for name, value in _measures(theirs).items())
    return [
        f"# Answers beside lm-evaluation-harness: {count:,} items of {task}",
        "",
        f"The harness's Hugging Face backend finds: {measured}.",
        "The largest differences to it, and the number of items with other greedy choices or texts",
        f"of {TOKENS} tokens:",
        "",
        "| layout | measures | log-likelihood of a choice (nats) | of a whole text | greedy "
        "choices | texts |",
        "|---|---:|---:|---:|---:|---:|",
        *(
            f"| {one['layout']} | {one['measures']:.1e} | {one['choices']:.1e} | "
            f"{one['whole']:.1e} | {one['greedy']} | {one['texts']} |"
            for one in table
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
