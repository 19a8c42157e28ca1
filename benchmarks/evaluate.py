"""Seconds of an MMLU-shaped task, beside lm-evaluation-harness with its Hugging Face backend.

python benchmarks/evaluate.py                  # 57 subjects, some minutes on one core
python benchmarks/evaluate.py --quick          # 8 subjects

Needs the extra `lm-eval`. Questions with four choices and five examples per subject, in local files
that are made here. One random model of the Llama family in fp32 on one thread; both read the same
folder and the same files, and must find the same accuracies.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.harness.environment import ROOT, describe, installed
from megatron_distill.runtime.launch import joined_world

SUBJECTS, QUESTIONS, SHOTS = 57, 40, 5
QUICK_SUBJECTS = 8
PEER_BATCH = 8  # sequences, of the peer
LETTERS = ("A", "B", "C", "D")
MODEL = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}  # fmt: skip
_QUESTION = (
    "{{ question.strip() }}\nA. {{ choices[0] }}\nB. {{ choices[1] }}\nC. {{ choices[2] }}\n"
    "D. {{ choices[3] }}\nAnswer:"
)
_NOTE = """\
Seconds are the CPU time of one thread, which other work on the machine disturbs less than the
clock; the shortest of the rounds. `whole` is from the files to the accuracies, `scores` the
log-likelihoods of encoded prompts alone. lm-evaluation-harness passes each question with its
examples through the model once, for all four choices; here the examples of a subject are passed
once. MMLU has 246 questions per subject, and the ratio grows with that number. `alone`: our scores
of some subjects, one question per call, so that each passes its examples again.
"""


@dataclass(frozen=True)
class Measured:
    """CPU seconds of the whole task and of its scores, and the accuracy of each subject."""

    whole: float
    scores: float
    accuracies: dict[str, float]


def main() -> int:
    """Measure, print, and save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SUBJECTS} subjects")
    parser.add_argument("--questions", type=int, default=QUESTIONS, help="of each subject")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if find_spec("lm_eval") is None:
        raise SystemExit("lm-evaluation-harness is not installed; install the extra `lm-eval`")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    subjects = QUICK_SUBJECTS if arguments.quick else SUBJECTS
    with (
        tempfile.TemporaryDirectory() as place,
        joined_world(device="cpu", backend="gloo", threads=1, timeout_seconds=600.0),
    ):
        torch.set_num_threads(1)
        line, tokens, saved = _compared(
            Path(place), subjects, arguments.questions, arguments.rounds
        )
    Console().print(line)
    Console().print(saved)
    environment = describe("benchmarks/evaluate.py", sys.argv[1:])
    text = "\n".join(
        [
            f"# An MMLU-shaped task: {subjects} subjects, {arguments.questions} questions each\n",
            _NOTE,
            *(f"* {name}: {value}" for name, value in environment.items()),
            f"* lm-eval: {installed('lm-eval')}, transformers: {installed('transformers')}",
            f"* prompts: {tokens:,.0f} tokens on average, of which the question is about a sixth",
            f"* {saved}",
            "",
            "| questions | ours, whole | lm-eval, whole | ratio | ours, scores | lm-eval, scores "
            "| ratio |",
            "|---|---|---|---|---|---|---|",
            line,
            "",
        ]
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "evaluate.md").write_text(text, encoding="utf-8")
    return 0


def _compared(place: Path, subjects: int, questions: int, rounds: int) -> tuple[str, float, str]:
    """Return the row of the table, the mean length of a prompt, and the gain of shared examples."""
    names = _write_files(place, subjects, questions)
    _save_model(place / "model", place)
    ours, together_and_alone, tokens = _ours(place)
    ways: dict[str, Callable[[], Measured]] = {"ours": ours, "lm-eval": _peer(place, names)}
    best: dict[str, Measured] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            found = way()
            Console().print(f"{name}: {found.whole:.1f} s, scores {found.scores:.1f} s")
            if name not in best or found.whole < best[name].whole:
                best[name] = found
    own, other = best["ours"], best["lm-eval"]
    assert own.accuracies.keys() == other.accuracies.keys()
    gaps = [abs(own.accuracies[name] - other.accuracies[name]) for name in own.accuracies]
    assert sum(gaps) * questions < 0.5, "the accuracies differ"
    cells = [
        f"{subjects * questions:,}",
        f"{own.whole:.1f} s", f"{other.whole:.1f} s", f"{other.whole / own.whole:.2f}x",
        f"{own.scores:.1f} s", f"{other.scores:.1f} s", f"{other.scores / own.scores:.2f}x",
    ]  # fmt: skip
    together, alone = map(min, zip(*(together_and_alone() for _ in range(rounds)), strict=True))
    saved = f"alone: {alone:.1f} s; together: {together:.1f} s; ratio {alone / together:.2f}x"
    return "| " + " | ".join(cells) + " |", tokens, saved


def _write_files(place: Path, subjects: int, questions: int) -> list[str]:
    """Write examples and questions of all subjects as JSON lines; returns the subjects."""
    source = random.Random(7)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er")]
    words = ["".join(source.choices(syllables, k=source.randint(1, 3))) for _ in range(1500)]
    names = [f"subject_{number}" for number in range(subjects)]

    def row(subject: str) -> str:
        question = " ".join(source.choices(words, k=source.randint(25, 50)))
        choices = [" ".join(source.choices(words, k=source.randint(3, 10))) for _ in LETTERS]
        right = source.randrange(len(LETTERS))
        return json.dumps(
            {"subject": subject, "question": f"{question}?", "choices": choices, "answer": right}
        )

    for split, count in (("dev", SHOTS), ("test", questions)):
        (place / split).mkdir()
        for name in names:
            lines = [row(name) for _ in range(count)]
            (place / split / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return names


def _save_model(folder: Path, place: Path) -> None:
    """Save a random model, with a tokenizer of the questions' words."""
    import transformers

    from megatron_distill.data.tokenizers.hugging_face import train_bpe

    texts = [path.read_text(encoding="utf-8") for path in sorted(place.glob("*/*.jsonl"))]
    # As in the vocabularies of published models, a letter after a space is one token.
    texts += [f"Answer: {letter}\n\n" * 1000 for letter in LETTERS]
    tokenizer = train_bpe(texts, vocab_size=4096)
    for ids in tokenizer.encode_batch([f" {letter}" for letter in LETTERS]):
        assert len(ids) == 1, "a choice is not one token"
    tokenizer.hugging_face.save_pretrained(folder)
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        **MODEL, "vocab_size": tokenizer.vocab_size, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_id, "pad_token_id": None,
    }  # fmt: skip
    config = transformers.LlamaConfig(**shape)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def _ours(
    place: Path,
) -> tuple[Callable[[], Measured], Callable[[], tuple[float, float]], float]:
    """Return two measurements, and the mean length of a prompt.

    The second one: seconds of the first subjects' scores together, and of each question alone.
    """
    from megatron_distill.data.tokenizers.open import load_tokenizer
    from megatron_distill.evaluation.tasks.prepared import prepare_task
    from megatron_distill.evaluation.tasks.record import load_task
    from megatron_distill.evaluation.tasks.results import task_result
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.models.hugging_face.description import describe as read
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.models.weights import fill
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything
    from megatron_distill.train.evaluation.scoring import ModelScorer

    groups = create_groups(Layout(), timeout_minutes=10)
    seed_everything(1, groups)
    device, folder = torch.device("cpu"), place / "model"
    shape = read(folder).architecture
    chunks = build_gpt(shape, groups=groups, execution=Execution(torch.float32, device), seed=None)
    fill(chunks, HuggingFaceWeights(folder, read(folder)), groups=groups)
    tokenizer = load_tokenizer(folder)
    model = CachedGPT(chunks, shape, groups, device, vocab_size=tokenizer.vocab_size)
    scorer = ModelScorer(model, model.positions, 8192)
    files = {"folder": str(place), "files": ["test/*.jsonl"], "shot_files": ["dev/*.jsonl"]}

    def measure() -> Measured:
        began = time.process_time()
        task = prepare_task(load_task("mmlu", files), tokenizer, positions=scorer.positions)
        prepared = time.process_time()
        scores = scorer.score(task.requests)
        scored = time.process_time()
        found = task_result(task, scores)["groups"]
        accuracies = {name: one["acc"] for name, one in found.items()}
        return Measured(time.process_time() - began, scored - prepared, accuracies)

    task = prepare_task(load_task("mmlu", files), tokenizer, positions=scorer.positions)
    lengths = [len(request.context) for request in task.requests]
    questions = [
        list(same) for _, same in groupby(task.requests, key=lambda one: one.context.tobytes())
    ]
    subjects = len(list((place / "test").iterdir()))
    some = questions[: len(questions) * min(QUICK_SUBJECTS, subjects) // subjects]

    def together_and_alone() -> tuple[float, float]:
        began = time.process_time()
        scorer.score([request for question in some for request in question])
        between = time.process_time()
        for question in some:
            scorer.score(question)
        return between - began, time.process_time() - between

    return measure, together_and_alone, sum(lengths) / len(lengths)


def _peer(place: Path, names: Sequence[str]) -> Callable[[], Measured]:
    """Return the measurement of lm-evaluation-harness: one task per subject, as in its MMLU."""
    import lm_eval
    import yaml
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    os.environ["HF_DATASETS_CACHE"] = str(place / "cache")
    tasks = place / "tasks"
    tasks.mkdir()
    for name in names:
        record = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {
                    split: str(place / split / f"{name}.jsonl") for split in ("dev", "test")
                }
            },
            "test_split": "test", "fewshot_split": "dev",
            "fewshot_config": {"sampler": "first_n"}, "num_fewshot": SHOTS,
            "output_type": "multiple_choice",
            "description": "The following are multiple choice questions (with answers) about "
            f"{name.replace('_', ' ')}.\n\n",
            "doc_to_text": _QUESTION, "doc_to_choice": list(LETTERS), "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }  # fmt: skip
        (tasks / f"{name}.yaml").write_text(yaml.safe_dump(record), encoding="utf-8")
    model = HFLM(
        pretrained=str(place / "model"), device="cpu", dtype="float32", batch_size=PEER_BATCH
    )
    spent = [0.0]
    score = model.loglikelihood

    def timed(*given: Any, **named: Any) -> Any:
        began = time.process_time()
        found = score(*given, **named)
        spent[0] += time.process_time() - began
        return found

    model.loglikelihood = timed

    def measure() -> Measured:
        spent[0] = 0.0
        began = time.process_time()
        found = lm_eval.simple_evaluate(
            model=model,
            tasks=list(names),
            task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            bootstrap_iters=0,
            log_samples=False,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
        accuracies = {name: found["results"][name]["acc,none"] for name in names}
        return Measured(time.process_time() - began, spent[0], accuracies)

    return measure


if __name__ == "__main__":
    sys.exit(main())
