"""lm-evaluation-harness over the scorer, against its own backend on the exported model."""

from __future__ import annotations

import copy
import importlib.metadata
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from jinja2 import Environment

from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.requests import GREEDY
from megatron_distill.evaluation.tasks.encode import TextEncoder
from megatron_distill.evaluation.tasks.record import load_task
from megatron_distill.train.assemble.trained_config import STUDENT_ALONE
from tests.distributed.pool import Pool
from tests.e2e.conversion.test_hugging_face import export
from tests.e2e.evaluation.test_evaluation import WORDS, _results, configure_evaluation
from tests.e2e.failing import call_alone
from tests.e2e.processes import ROOT
from tests.e2e.runs import CPU, run
from tests.e2e.runs import layout as layout_of
from tests.support.chat_fixtures import chat_tokenizer
from tests.unit.evaluation.tasks.test_prompts import CASES, EXAMPLES, GOLDEN, items, lines

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: make peers")

pytestmark = pytest.mark.slow

PROSE = "def parse(text):\n    return [line.strip() for line in text.splitlines() if line]\n"
EDGES = ("", "retu", "for line in ", "import  ")
ENDS = ("rn line", " text", "in", "")
CHOICES: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{q}}:",
    "doc_to_choice": "{{options}}",
    "doc_to_target": "right",
    "metric_list": [{"metric": "acc"}],
}
ANSWERS: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_text": "{{q}}",
    "doc_to_target": "{{q}}",
    "metric_list": [{"metric": "exact_match"}],
}
TASKS: dict[str, dict[str, Any]] = {
    "own_choices": {
        **CHOICES,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}, {"metric": "mcc"}],
    },
    "own_shots": {
        **CHOICES,
        "num_fewshot": 2,
        "fewshot_split": "test",
        "fewshot_config": {"sampler": "first_n"},
        "fewshot_delimiter": "\n",
    },
    # Nothing before the answer, spaces at its end, and tokens over the boundary.
    "own_edges": {
        **CHOICES,
        "target_delimiter": "",
        "doc_to_text": "{{before}}",
        "doc_to_choice": "{{after}}",
    },
    "own_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "own_answers": {
        **ANSWERS,
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 9, "do_sample": False},
    },
    # The length under the name of transformers, greedy without saying so, and the prompts cut.
    "own_lengths": {
        **ANSWERS,
        "doc_to_text": "{{text}}{{q}}",
        "generation_kwargs": {"until": ["\n"], "max_new_tokens": 9},
    },
}
SAMPLED: dict[str, Any] = {
    **ANSWERS,
    "repeats": 2,
    "filter_list": [{"name": "all", "filter": [{"function": "take_first_k", "k": 2}]}],
    "generation_kwargs": {"until": ["e"], "max_gen_toks": 9, "temperature": 0.9, "top_p": 0.9},
}


def write_tasks(folder: Path) -> None:
    """Write tasks of the harness, and one of ours with the prompts of `own_choices`."""
    rows = [
        {
            "q": f"def f{n}", "options": WORDS, "right": n % 4,
            "text": PROSE * (1 + n % 3) + str(n),
            "before": EDGES[n % len(EDGES)],
            "after": [f"{end}{n}" for end in ENDS],
        }
        for n in range(14)
    ]  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    for name, task in {**TASKS, "own_sampled": SAMPLED}.items():
        common = {"task": name, "dataset_path": "json", "dataset_kwargs": files}
        found = {**common, "test_split": "test", **task}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(found))
    (folder / "ours").mkdir()
    (folder / "ours" / "own_choices.yaml").write_text(
        "kind: multiple_choice\nquestion: '{{ q }}:'\nchoices: options\nanswer: right\n"
        f"folder: {folder}\nfiles: [rows.jsonl]\n"
    )


def _ours(rank: int, world: int, folder: str, layout: list[str], include: str) -> dict[str, Any]:
    """The results of the adapter, with every request's; in a pool worker."""

    config = configure_evaluation(rank, world, folder, [*STUDENT_ALONE, *layout])
    from megatron_distill.train.assemble.harness import evaluate_by_harness

    names = [*TASKS, "own_sampled"]
    found = evaluate_by_harness(config, CPU, names, include=include, limit=None, samples=True)
    assert found is not None
    return {**_plain(found), "truncated": found["truncated"], "cut": found["cut"]}


def uncounted_downloads() -> Any:
    """Keep the harness from telling a server of the local files that it reads, as ours does."""
    import datasets

    return patch.object(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", new=False)


def _theirs(folder: Path, include: Path) -> dict[str, Any]:
    """The results of the harness's own backend, with every request's."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    # As many resamples in this process give the same errors of what is no mean.
    with patch.dict(os.environ, DISABLE_MULTIPROC="1"), uncounted_downloads():
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4),
            tasks=list(TASKS),
            task_manager=TaskManager(include_path=str(include), include_defaults=False),
            bootstrap_iters=200,
        )
    return _plain(found)


def _plain(found: dict[str, Any]) -> dict[str, Any]:
    """Measures by task, and the answers of the model by task and item."""
    names = ("acc", "acc_norm", "exact_match", "mcc")
    both = [f"{name}{kind},none" for name in names for kind in ("", "_stderr")]
    return {
        "measures": {
            task: {name: own[name] for name in both if name in own}
            for task, own in found["results"].items()
        },
        "answers": {
            task: [one["filtered_resps"] for one in sorted(own, key=lambda one: one["doc_id"])]
            for task, own in found["samples"].items()
        },
        "form": {
            name: sorted(own) if isinstance(own, dict) else None for name, own in found.items()
        },
        "names": {task: sorted(own) for task, own in found["results"].items()},
    }


def test_answers_equal_those_of_the_harness_s_own_backend(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    """The exported student on the same task files, on one rank, in DP2, CP2 and TP2 x PP2."""
    output, folder = tmp_path / "run", tmp_path / "tasks"
    folder.mkdir()
    write_tasks(folder)
    run(pool, 1, dense, output, "train.steps=2", "checkpoint.save=true")
    pool.run(1, export, output, tmp_path / "exported")
    theirs = _theirs(tmp_path / "exported", folder)
    _same_form(pool, output, folder, theirs)
    sampled: list[list[str]] = []
    for named in ("one rank", "DP2", "CP2", "TP2xPP2"):
        world, layout = layout_of(named)
        for ours in pool.run(world, _ours, str(output), list(layout), str(folder)):
            del ours["measures"]["own_sampled"]
            assert ours["measures"] == theirs["measures"]
            choices = ours["measures"]["own_choices"]
            assert choices["acc_stderr,none"] > 0
            assert choices["acc_norm_stderr,none"] > 0
            assert choices["mcc_stderr,none"] == 0, "this model gives one answer"
            answers = ours["answers"]
            assert answers["own_answers"] == theirs["answers"]["own_answers"]
            assert len({text for (text,) in answers["own_answers"]}) > 1
            assert answers["own_lengths"] == theirs["answers"]["own_lengths"]
            assert ours["truncated"] == {"own_shots": 34, "own_lengths": 14}
            assert 0 < ours["cut"]["own_lengths"] <= 14, "a model of random weights goes on"
            drawn = [pair for (pair,) in answers["own_sampled"]]
            assert sum(first != second for first, second in drawn) > 7, "repeats are other draws"
            assert drawn == (sampled or drawn), "the draws of any layout"
            sampled = drawn
            for task in ("own_choices", "own_shots", "own_edges"):
                assert len(answers[task]) == 14
                for own, other in zip(answers[task], theirs["answers"][task], strict=True):
                    assert [greedy for _, greedy in own] == [greedy for _, greedy in other]
                    values = [value for value, _ in own], [value for value, _ in other]
                    assert values[0] == pytest.approx(values[1], abs=1e-4, rel=0)
            flat = [[one for (one,) in found["answers"]["own_texts"]] for found in (ours, theirs)]
            assert flat[0] == pytest.approx(flat[1], abs=1e-4, rel=0)
    task = str(folder / "ours" / "own_choices.yaml")
    (found,) = pool.run(1, _results, str(output), [], [task], False)
    for name in ("acc", "acc_norm"):
        measured = found["student"]["own_choices"][name]
        assert measured == theirs["measures"]["own_choices"][f"{name},none"], name


def _same_form(pool: Pool, output: Path, folder: Path, theirs: dict[str, Any]) -> None:
    """The file of the command has what `simple_evaluate` returns, and three keys of its own."""
    script, written = ROOT / "launch" / "evaluate.py", folder / "results.json"
    words = ("--include", folder, "--json", written, "--items", folder / "items.json")
    words += ("--limit", 3, "--num-fewshot", 1)
    ending = call_alone(pool, script, output, "--lm-eval", *TASKS, *words)
    assert ending.status == 0, ending.stderr
    logged = "--lm-eval own_lengths: longer than the model's 32 positions, and cut on the left"
    assert f"{logged}: 3 of 3 requests" in ending.stderr
    found = json.loads(written.read_text(), parse_constant=pytest.fail)
    assert set(found) - set(theirs["form"]) == {"model", "truncated", "cut"}
    assert set(theirs["form"]) - set(found) == {"samples"}
    for name, keys in theirs["form"].items():
        if name not in ("samples", "config") and keys is not None:
            assert sorted(found[name]) == keys, name
    assert {task: sorted(own) for task, own in found["results"].items()} == theirs["names"]
    assert set(found["config"]) <= set(theirs["form"]["config"])
    assert found["config"]["model_sha"].startswith("v2:")
    assert {task: own["effective"] for task, own in found["n-samples"].items()} == dict.fromkeys(
        TASKS, 3
    )
    assert found["n-shot"]["own_shots"] == 1
    samples = json.loads((folder / "items.json").read_text())["samples"]
    assert [one["doc_id"] for one in samples["own_choices"]] == [0, 1, 2], "the first ones"


def test_a_task_that_is_not_there_is_named(tmp_path: Path) -> None:
    from megatron_distill.evaluation.lm_eval_model import harness_tasks

    write_tasks(tmp_path)
    assert len(harness_tasks(["own_choices", "own_texts"], include=str(tmp_path))) == 2
    with pytest.raises(ConfigError, match="--lm-eval own_nothing: neither the harness nor"):
        harness_tasks(["own_choices", "own_nothing"], include=str(tmp_path))
    text = (tmp_path / "own_choices.yaml").read_text().replace("own_choices", "own_column")
    (tmp_path / "own_column.yaml").write_text(text.replace("{{q}}", "{{query}}"))
    with pytest.raises(
        ConfigError, match="own_column: doc_to_text does .* 'query' is undefined .*; correct"
    ):
        harness_tasks(["own_column"], include=str(tmp_path))
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ConfigError, match="--lm-eval own_choices: FileNotFoundError"):
        harness_tasks(["own_choices"], include=str(tmp_path))


NEEDY = {
    "own_import": "import missing_tokens\n\n\ndef rows(data):\n    return data\n",
    "own_told": (
        "try:\n    import missing_langdetect.parts\nexcept ModuleNotFoundError as error:\n"
        "    raise ModuleNotFoundError('install the extra\\n[missing]') from error\n"
    ),
    "own_later": (
        "def rows(data):\n    return data\n\n\ndef judge(doc, results):\n    import neologdn\n"
    ),
}


def _harness_error(rank: int, world: int, folder: str, task: str, include: str) -> str:
    """The error of an evaluation by the harness, in a pool worker."""

    config = configure_evaluation(rank, world, folder, STUDENT_ALONE)
    from megatron_distill.train.assemble.harness import evaluate_by_harness

    try:
        evaluate_by_harness(config, CPU, [task], include=include, limit=2)
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_a_package_that_a_task_needs_is_named(pool: Pool, dense: Path, tmp_path: Path) -> None:
    """Where the task's code imports it at once, where it tells in its own words, and later."""
    folder, output = tmp_path / "tasks", tmp_path / "run"
    folder.mkdir()
    write_tasks(folder)
    for name, code in NEEDY.items():
        (folder / f"{name}_code.py").write_text(code)
        text = (folder / "own_answers.yaml").read_text().replace("own_answers", name)
        text += f"process_docs: !function {name}_code.rows\n"
        if name == "own_later":
            text += f"process_results: !function {name}_code.judge\n"
        (folder / f"{name}.yaml").write_text(text)
    run(pool, 1, dense, output, "train.steps=1", "checkpoint.save=true")

    def error(name: str) -> str:
        (text,) = pool.run(1, _harness_error, str(output), name, str(folder))
        return text

    needs = "--lm-eval {}: the task needs the package {}, which is not installed"
    leave = "`, or leave the task out"
    assert error("own_import") == (
        needs.format("own_import", "missing_tokens") + f"; run `pip install 'missing_tokens'{leave}"
    )
    assert error("own_told") == (
        needs.format("own_told", "missing_langdetect")
        + f" (install the extra [missing]); run `pip install 'missing_langdetect'{leave}"
    )
    # One of the harness's own extras, with its version there.
    expected = re.escape(needs.format("own_later", "neologdn"))
    assert re.fullmatch(
        rf"{expected}; run `pip install 'neologdn==[0-9.]+'{leave}", error("own_later")
    )


def _without_template(rank: int, world: int, folder: str, include: str) -> str:
    """The error of chats before a model is built, in a pool worker."""
    config = configure_evaluation(rank, world, folder, STUDENT_ALONE)
    from megatron_distill.train.assemble import harness

    chats = {"limit": 2, "apply_chat_template": True}
    with patch.object(harness.Resolved, "built", side_effect=AssertionError("a model is built")):
        try:
            harness.evaluate_by_harness(config, CPU, ["own_choices"], include=include, **chats)
        except DataError as error:
            return str(error)
    return "accepted"


def test_chats_without_a_template_are_refused_before_the_model_is_built(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    write_tasks(tmp_path)
    run(pool, 1, dense, tmp_path / "run", "train.steps=1", "checkpoint.save=true")
    for text in pool.run(2, _without_template, str(tmp_path / "run"), str(tmp_path)):
        assert re.match("--apply-chat-template: .* has no chat template; add", text), text


PUBLISHED = {
    "mmlu": "mmlu/default/mmlu_abstract_algebra.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "mmlu_pro": "leaderboard/mmlu_pro/mmlu_pro.yaml",
    "mmlu_pro_cot": "mmlu_pro/mmlu_pro_math.yaml",
    "hendrycks_math": "hendrycks_math/hendrycks_math_algebra.yaml",
    "minerva_math": "minerva_math/minerva_math_algebra.yaml",
    "math_500": "hendrycks_math/hendrycks_math500.yaml",
}
# Those whose examples are drawn, unless one asks for the first.
DRAWN = ("arc_challenge", "arc_easy", "gsm8k", "hellaswag")


@contextmanager
def antlr_of_minerva_math() -> Iterator[None]:
    """Its code asks for version 4.11 by name, which excludes that of the extra `math`."""
    import math_verify  # noqa: F401 - it checks the version of its own when it is imported

    actual = importlib.metadata.version
    importlib.metadata.version = lambda name: "4.11.0" if "antlr4" in name else actual(name)
    try:
        yield
    finally:
        importlib.metadata.version = actual


def harness_prompts(
    folder: Path, named: str, rows: list[dict[str, Any]], shots: int, **chat: Any
) -> list[list[list[str]]]:
    """The texts of each row's requests, as the harness's own task makes them."""
    from lm_eval.tasks import TaskManager

    from megatron_distill.evaluation.lm_eval_settings import writing_settings

    file = lines(folder / "rows.jsonl", rows)
    splits = dict.fromkeys(("train", "validation", "dev", "test"), file)
    splits["train"] = lines(folder / "train.jsonl", EXAMPLES.get(named, rows))
    task = {
        "include": str(Path(lm_eval.__file__).parent / "tasks" / PUBLISHED[named]),
        "task": "golden",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": splits, "cache_dir": str(folder / "cache")},
        "num_fewshot": shots,
    }
    if named in DRAWN:
        task["fewshot_config"] = {"sampler": "first_n"}
    (folder / "golden.yaml").write_text(yaml.safe_dump(task))
    with antlr_of_minerva_math(), uncounted_downloads():
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        golden = manager.load(["golden"])["tasks"]["golden"]
    golden.build_all_requests(rank=0, world_size=1, **chat)
    found: dict[int, list[list[str]]] = {}
    for request in golden.instances:
        is_generated = request.request_type == "generate_until"
        if is_generated:  # with the stops and the length of the task that we ship
            (stops, limit, sampling), ours = writing_settings(request.args[1], 0), load_task(named)
            assert stops == ours.stops
            # Models that reason at length are compared by the 500 problems.
            assert limit == (256 if named == "math_500" else ours.max_new_tokens)
            assert sampling == GREEDY
        texts = request.args[:1] if is_generated else request.args[:2]
        found.setdefault(request.doc_id, []).append(list(texts))
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(("named", "rows", "shots"), CASES, ids=lambda one: str(one)[:20])
def test_golden_prompts_are_those_of_the_harness(
    tmp_path: Path, named: str, rows: list[dict[str, Any]], shots: int
) -> None:
    assert harness_prompts(tmp_path, named, rows, shots) == GOLDEN[f"{named}_{shots}"]


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("named", "rows", "shots"), CASES, ids=lambda one: str(one)[:20])
def test_prompts_in_a_chat_template_are_those_of_the_harness(
    tmp_path: Path, named: str, rows: list[dict[str, Any]], shots: int
) -> None:
    """Descriptions are the system's message, and each example is two turns."""
    folders = tmp_path / "harness", tmp_path / "ours"
    for folder in folders:
        folder.mkdir()
    template = Environment(keep_trailing_newline=True).from_string(CHATML)
    theirs = harness_prompts(
        folders[0],
        named,
        rows,
        shots,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        chat_template=lambda messages, add_generation_prompt=True: template.render(
            messages=messages, add_generation_prompt=add_generation_prompt
        ),
        tokenizer_name="chatml",
    )
    tokens = copy.copy(chat_tokenizer("plain"))  # which other tests have as it is
    tokens.chat_template = CHATML
    encoder = TextEncoder.of(tokens, chat=True, named=named)
    ours = [
        encoder.rendered(one.prompt, named=named) for one in items(folders[1], named, rows, shots)
    ]
    assert ours == [requests[0][0] for requests in theirs]
