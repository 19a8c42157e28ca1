"""A published model through conversion and evaluation, against the figures of its author.

    python benchmarks/published.py --weights stories260K.bin --pieces tok512.bin \\
        --page doc/stories260K.md
    ... --shard TinyStories_all_data/data00.json    # the validation loss too

The model is stories260K of llama2.c (MIT), its page and the shard's archive are on
https://github.com/karpathy/llama2.c and https://huggingface.co/datasets/roneneldan/TinyStories.
Nothing is downloaded. The files become a Hugging Face folder; `megatron-distill evaluate --hf`
grades the greedy text, and the text of a seed is drawn again from all probabilities that the scorer
of `evaluate` gives, in one process and in TP2. Where one figure of the page is not reproduced,
nothing is written and the status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml
from rich.console import Console

from benchmarks.harness.children import run_child
from benchmarks.harness.environment import ROOT, describe, installed
from benchmarks.published_models.llama2c import Page, read_page, write_folder
from megatron_distill.runtime.torchrun import run_child as run_command
from megatron_distill.runtime.torchrun import threads_per_process, torchrun_command

LAYOUTS: Final[Mapping[str, int]] = {"one process": 1, "TP2": 2}  # ranks
TOLERANCE: Final = 0.01  # nats per token, of other windows than the author's
_SECONDS: Final = 1200
_TASK: Final = "published_text"
_NOTE: Final = """\
stories260K of llama2.c by Andrej Karpathy (MIT) is a Llama of 260 thousand parameters with a
SentencePiece vocabulary of its own. Its page has a greedy text and a text drawn at temperature {t}
from the likeliest tokens with a mass of {p}, seed {s}. Its files become a Hugging Face folder,
which is read into Megatron in fp32. The page is in https://github.com/karpathy/llama2.c; weights
and pieces are in https://huggingface.co/karpathy/tinyllamas and in
https://github.com/ytmytm/llama2.c64.

* greedy text: the grader `exact` of `megatron-distill evaluate --hf` on {steps} tokens from the
  begin-of-text token alone.
* drawn text: each token is drawn by the generator of llama2.c's `run` from the probabilities of all
  tokens, scored by the scorer of `evaluate`. One wrong probability moves the bounds of all less
  likely tokens, and another token changes all that follow. `closest draw` is the smallest
  distance, as a probability, of a draw to another token.
"""


def main() -> int:
    """Reproduce the page's figures, print, and save the record."""
    arguments = _arguments()
    page = read_page(arguments.page)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_folder(folder, arguments.weights, arguments.pieces, page)
        found = {
            name: {
                "greedy": _is_greedy_text(folder, Path(place), page, ranks),
                **_drawn(folder, arguments, ranks),
            }
            for name, ranks in LAYOUTS.items()
        }
    problems = [
        f"{name}: {problem}" for name, one in found.items() for problem in differences(one, page)
    ]
    if problems:
        Console(soft_wrap=True).print("\n".join(problems), markup=False)
        return 1
    files = {
        name: hashlib.sha256(getattr(arguments, name).read_bytes()).hexdigest()
        for name in ("weights", "pieces", "page", "shard")
        if getattr(arguments, name) is not None
    }
    record = {
        "environment": describe("benchmarks/published.py", sys.argv[1:])
        | {"transformers": installed("transformers")},
        "files": files,
        "figure": figure(found),
        "layouts": found,
    }
    lines = report(record, page)
    Console(soft_wrap=True).print("\n".join(lines), markup=False)
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1) + "\n"
    (arguments.output / "published.json").write_text(text, encoding="utf-8")
    (arguments.output / "published.md").write_text("\n".join([*lines, ""]), encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True, help="stories260K.bin")
    parser.add_argument("--pieces", type=Path, required=True, help="tok512.bin")
    parser.add_argument("--page", type=Path, required=True, help="llama2.c's doc/stories260K.md")
    parser.add_argument("--shard", type=Path, help="data00.json of TinyStories_all_data")
    parser.add_argument(
        "--windows", type=int, default=2000, help="of 512 tokens, at even distances over the shard"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    for name in ("weights", "pieces", "page", "shard"):
        path = getattr(arguments, name)
        if path is not None and not path.is_file():
            parser.error(f"--{name} {path}: there is no such file")
    return arguments


def _is_greedy_text(folder: Path, place: Path, page: Page, ranks: int) -> bool:
    """Whether `evaluate` finds that the model writes the greedy text."""
    row = {"asked": "", "text": page.greedy.text}
    task = {
        "kind": "generation",
        "files": [str(place / "rows.jsonl")],
        "question": "{{ asked }}",
        "answer": "text",
        "graders": ["exact"],
        "max_new_tokens": page.greedy.steps,
    }
    (place / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (place / f"{_TASK}.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")
    results = place / "results.json"
    script = str(ROOT / "launch" / "evaluate.py")
    words = [f"parallel.tensor={ranks}", "data.add_bos=true", "train.precision=fp32"]
    words += ["--hf", str(folder), "--tasks", str(place / f"{_TASK}.yaml"), "--json", str(results)]
    command = [sys.executable, script, *words]
    if ranks > 1:
        command = torchrun_command(script, words, processes=ranks)
    threads = str(threads_per_process(ranks))
    outcome = run_command(command, environment={**os.environ, "OMP_NUM_THREADS": threads})
    if outcome.status:
        raise SystemExit(f"{' '.join(command)} failed with exit status {outcome.status}")
    measured = json.loads(results.read_text(encoding="utf-8"))["results"]["student"][_TASK]
    return bool(measured["exact"] == 1)


def _drawn(folder: Path, arguments: argparse.Namespace, ranks: int) -> dict[str, Any]:
    words = [f"--folder={folder}", f"--page={arguments.page.resolve()}"]
    words += [f"--windows={arguments.windows}"]
    if arguments.shard is not None:
        words.append(f"--shard={arguments.shard.resolve()}")
    measured: dict[str, Any] = run_child(
        "published_models/worker.py",
        words,
        processes=ranks,
        name=f"drawn text in {ranks} ranks",
        seconds=_SECONDS,
    )
    return measured


def differences(found: Mapping[str, Any], page: Page) -> list[str]:
    """Return the figures of the page that a layout does not reproduce."""
    problems = []
    if not found["greedy"]:
        problems.append("the greedy text is not that of the page")
    text, wanted = found["sampled"], page.sampled.text
    if text != wanted:
        same = len(os.path.commonprefix([text, wanted]))
        problems.append(
            f"the drawn text leaves the page's at character {same}: {text[same : same + 40]!r} "
            f"instead of {wanted[same : same + 40]!r}"
        )
    unmoved = [name for name, place in found["first_other_token"].items() if place is None]
    problems += [f"the page's text is also drawn at temperature {name}" for name in unmoved]
    if "loss" in found and abs(found["loss"] - page.loss) > TOLERANCE:
        problems.append(
            f"the validation loss is {found['loss']:.4f} nats per token, {page.loss} on the page: "
            f"more than {TOLERANCE} apart"
        )
    return problems


def figure(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return what was reproduced, in one line."""
    draws = min(one["draws"] for one in found.values())
    loss = next((one["loss"] for one in found.values() if "loss" in one), None)
    more = "" if loss is None else f", and its validation loss ({loss:.4f} nats per token)"
    return (
        "stories260K of llama2.c: its published greedy text and its published text of a seed "
        f"({draws} draws from all probabilities), token for token, in {' and '.join(found)}{more}"
    )


def report(record: Mapping[str, Any], page: Page) -> list[str]:
    """Return the lines of the record."""
    run = page.sampled
    note = _NOTE.format(t=run.temperature, p=run.top_p, s=run.seed, steps=page.greedy.steps)
    lines = ["# Published figures, reproduced", "", note]
    lines += [f"* {name}: {value}" for name, value in record["environment"].items()]
    lines += [f"* {name}: sha256 {digest}" for name, digest in record["files"].items()]
    lines += ["", "| layout | greedy text | drawn text | draws | closest draw | validation loss |"]
    lines += ["|---|---|---|---:|---:|---|"]
    for name, one in record["layouts"].items():
        loss = f"not measured; {page.loss} on the page"
        if "loss" in one:
            loss = (
                f"{one['loss']:.4f} (standard error {one['loss_stderr']:.4f}) in "
                f"{one['windows']:,} windows; {page.loss} on the page"
            )
        lines.append(
            f"| {name} | equal | equal | {one['draws']} | {one['closest_draw']:.1e} | {loss} |"
        )
    controls = [
        f"at temperature {name} from token {place} on"
        for one in record["layouts"].values()
        for name, place in one["first_other_token"].items()
    ]
    lines += ["", f"Control: with the same seed another text is drawn {', '.join(controls)}."]
    if "shard" not in record["files"]:
        lines.append(
            "The validation loss is of a shard of TinyStories that was not at hand; `--shard` "
            "measures it."
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
