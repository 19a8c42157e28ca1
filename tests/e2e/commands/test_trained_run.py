"""Commands on a run after its training, in another layout than it was trained in."""

from __future__ import annotations

import argparse
import json
import math
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_distill.errors import CheckpointError, ConfigError, DataError
from megatron_distill.models.generation import Sampling, Stops, WriteRow
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.train.assemble.trained_config import (
    STUDENT_ALONE,
    add_run_arguments,
    load_trained_run,
    load_weights,
    run_and_overrides,
)
from tests.distributed.pool import Pool
from tests.e2e.converting import convert
from tests.e2e.failing import call_alone, call_script
from tests.e2e.processes import ROOT, SIGNALLING_TORCHRUN, run_from_imports
from tests.e2e.runs import CPU, VIRTUAL, records, run

PROMPT = "def __init__(self"
EVALUATE, GENERATE = (ROOT / "launch" / name for name in ("evaluate.py", "generate.py"))


@pytest.fixture(scope="module")
def trained(pool: Pool, dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher, and a student of its that was trained in another layout."""
    folder = tmp_path_factory.mktemp("trained")
    shared = ("train.steps=6", "schedule.warmup_steps=1", "checkpoint.save=true")
    validated = ("validation.samples=8", "validation.interval=0")
    run(pool, 1, dense, folder / "teacher", *shared, "teacher=null", "objective.terms=[]")
    run(
        *(pool, 4, dense, folder / "student", *shared, *validated),
        *("parallel.tensor=2", "parallel.pipeline=2", "teacher.architecture=null"),
        f"teacher.checkpoint={folder / 'teacher'}",
    )
    return folder


def _evaluate(rank: int, world: int, folder: str, overrides: list[str]) -> dict[str, Any]:
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.assemble.trained_run import evaluate

    config = load_trained_run(folder, overrides, world_size=world)
    return evaluate(config, CPU, teacher_text=True, drafts=[2])


@pytest.fixture(scope="module")
def on_one_rank(pool: Pool, trained: Path) -> dict[str, Any]:
    """The figures that the command writes of the student, on one rank."""
    figures = trained / "figures.json"
    options = ("--teacher-text", "--speculative", 2, "--json", figures)
    ending = call_alone(pool, EVALUATE, trained / "student", *options)
    assert ending.status == 0, ending.stderr
    found: dict[str, Any] = json.loads(figures.read_text())
    return found


def test_an_evaluation_repeats_the_runs_own_validation(
    trained: Path, on_one_rank: dict[str, Any]
) -> None:
    expected: Any = records(trained / "student")[-1]["validation"]
    assert on_one_rank.keys() >= expected.keys() >= {"ce_loss", "kd_loss", "top1_agreement"}
    for name, value in expected.items():
        assert on_one_rank[name] == pytest.approx(value, rel=2e-6, abs=1e-7), name
    compared = on_one_rank["comparison"]
    assert compared["label_nll"] == pytest.approx(expected["ce_loss"], rel=2e-6)
    assert compared["top1_agreement"] == pytest.approx(expected["top1_agreement"], rel=2e-6)
    assert compared["forward_kl"] == pytest.approx(expected["forward_kl"], rel=1e-5)
    assert sum(row["share"] for row in compared["calibration"]) == pytest.approx(1.0, rel=1e-6)
    tokens = list(compared["tokens_per_verification"].values())
    # Blocks of one draft begin at every label, as the mean over labels does.
    assert tokens[0] == pytest.approx(1.0 + compared["acceptance"], rel=1e-6)
    assert tokens == sorted(tokens)
    assert len(tokens) == 8
    assert compared["texts"] == 8
    errors = compared["tokens_per_verification_stderr"]
    assert errors["1"] == pytest.approx(compared["acceptance_stderr"], rel=1e-6)
    on_own = on_one_rank["comparison_on_teacher_text"]
    assert on_own.keys() == compared.keys()
    for one in (compared, on_own):
        best, cost = one["best_draft"], one["draft_cost"]
        per_check = one["tokens_per_verification"][str(best)]
        assert one["expected_speedup"] == pytest.approx(per_check / (best * cost + 1))
        assert 0 < one["js_divergence"] < math.log(2)
        assert 0 <= one["top5_overlap"] <= 1
        assert 0 <= one["top20_overlap"] <= 1
    for name in ("label_nll", "label_nll_stderr", "text_hash"):
        assert on_own[name] != compared[name]
    sampled = on_one_rank["speculative"]["sampled"]["2"]
    gap = sampled["tokens_per_verification"] - sampled["expected"]
    assert abs(gap) < 4 * sampled["stderr"]
    speedup = sampled["tokens_per_verification"] / (2 * sampled["draft_cost"] + 1)
    assert sampled["expected_speedup"] == pytest.approx(speedup)
    assert on_one_rank["speculative"]["greedy"]["2"]["blocks"] > 10


def test_drafts_beyond_the_positions_are_refused(pool: Pool, trained: Path) -> None:
    ending = call_alone(pool, EVALUATE, trained / "student", "--speculative", 2, 5000)
    assert ending.status == 1
    assert "--speculative 5000: no held-out prompt leaves room for such a draft" in ending.stderr
    assert "positions of both models; give " in ending.stderr


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallel.tensor=2", "parallel.sequence=true"], marks=pytest.mark.slow),
        ["parallel.pipeline=2"],
        # The student's stages have two chunks each, and the teacher's one.
        pytest.param(["parallel.pipeline=2", VIRTUAL], marks=pytest.mark.slow),
        ["parallel.context=2"],
        pytest.param([], marks=pytest.mark.slow),
    ],
    ids=lambda layout: "+".join(layout) or "data",
)
def test_an_evaluation_is_the_same_in_every_layout(
    pool: Pool, trained: Path, on_one_rank: dict[str, Any], layout: list[str]
) -> None:
    expected, digests = _without_digests(_flat(on_one_rank))
    assert len(digests) == 4, "of the samples, the teacher's texts, and the prompts of both rules"
    for one in pool.run(2, _evaluate, str(trained / "student"), layout):
        found, own = _without_digests(_flat(one))
        assert own == digests
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-6)


def _without_digests(flat: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    digests = {name: value for name, value in flat.items() if name.endswith("_hash")}
    return {name: value for name, value in flat.items() if name not in digests}, digests


def _flat(figures: Any, name: str = "") -> dict[str, Any]:
    """The figures by their paths."""
    if isinstance(figures, dict):
        entries = figures.items()
    elif isinstance(figures, list):
        entries = enumerate(figures)
    else:
        return {name: figures}
    return {
        key: one for word, part in entries for key, one in _flat(part, f"{name}/{word}").items()
    }


def test_a_student_drafts_for_itself_without_a_rejection(pool: Pool, trained: Path) -> None:
    own = [f"teacher.checkpoint={trained / 'student'}", "teacher.architecture=null"]
    (found,) = pool.run(1, _evaluate, str(trained / "student"), own)
    compared = found["comparison"]
    assert compared["acceptance"] == pytest.approx(1.0, abs=1e-6)
    assert compared["forward_kl"] == pytest.approx(0.0, abs=1e-9)
    assert compared["entropy_gap"] == pytest.approx(0.0, abs=1e-7)
    assert compared["js_divergence"] == pytest.approx(0.0, abs=1e-9)
    assert compared["top5_overlap"] == compared["top20_overlap"] == 1.0
    # A draft by the teacher's equal costs as much as it saves.
    assert (compared["draft_cost"], compared["best_draft"]) == (1.0, 1)
    assert compared["expected_speedup"] == pytest.approx(1.0, rel=1e-6)
    for name in ("acceptance", "forward_kl", "entropy_gap", "top1_agreement"):
        assert compared[f"{name}_stderr"] == pytest.approx(0.0, abs=1e-7)
    drafts = compared["tokens_per_verification"]
    assert drafts == pytest.approx({str(g): g + 1.0 for g in range(1, 9)}, rel=1e-6)
    assert found["comparison_on_teacher_text"]["acceptance"] == pytest.approx(1.0, abs=1e-6)
    for rule in ("sampled", "greedy"):
        measured = found["speculative"][rule]["2"]
        assert measured["blocks"] > 10
        assert measured["tokens_per_verification"] == 3.0


def _write(rank: int, world: int, folder: str, overrides: list[str]) -> list[int]:
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.assemble.trained_run import text_writer

    plain = ["teacher=null", "objective.terms=[]"]
    config = load_trained_run(folder, [*plain, *overrides], world_size=world)
    with text_writer(config, CPU) as found:
        rows = [WriteRow((5, 17, 40), 0, 12)]
        sampling = Sampling(temperature=0.8, seed=3)
        (text,) = found.build().write(rows, sampling=sampling, stops=Stops())
        return list(text.ids)


def test_the_text_is_the_same_on_every_rank_of_every_layout(pool: Pool, trained: Path) -> None:
    (expected,) = pool.run(1, _write, str(trained / "student"), [])
    assert len(expected) == 12
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    found = pool.run(4, _write, str(trained / "student"), layout)
    assert found == [expected] * 4


def _written(pool: Pool, *words: object, world: int = 1) -> str:
    """The text that the script prints, on the first rank alone."""
    given = [str(word) for word in words]
    first, *others = pool.run(world, call_script, GENERATE, given)
    assert [one.status for one in (first, *others)] == [0] * world, first.stderr
    assert not any(one.stdout for one in others)
    text: str = first.stdout
    return text


def test_the_script_writes_text_that_the_seed_fixes(
    pool: Pool, trained: Path, tmp_path: Path
) -> None:
    """The same to a file and to the terminal, on one rank and on two."""
    student, text = trained / "student", tmp_path / "sample.txt"
    options = ("--prompt", PROMPT, "--tokens", 5, "--seed", 4)
    _written(pool, "--run", student, *options, "--text", text)
    assert text.read_text().startswith(PROMPT)
    assert len(text.read_text()) > len(PROMPT)
    found = _written(pool, student, "parallel.tensor=2", *options, world=2)
    assert found == text.read_text() + "\n"


def test_a_text_that_fills_the_positions_says_so(pool: Pool, trained: Path) -> None:
    words = ("--run", trained / "student", "--prompt", PROMPT, "--tokens", 5000, "--temperature", 0)
    (found,) = pool.run(1, call_script, GENERATE, [str(word) for word in words])
    assert found.status == 0, found.stderr
    told = re.search(r"(\d+) tokens up to the last of the model's (\d+) positions", found.stderr)
    assert told is not None, found.stderr
    assert 0 < int(told[2]) - int(told[1]) < 20


def test_a_text_ends_where_transformers_ends_it(pool: Pool, trained: Path, tmp_path: Path) -> None:
    """At any token of the folder's generation settings, in both programs of the command."""
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_distill.data.tokenizers.open import load_tokenizer

    folder = tmp_path / "student"
    words = ("export", "--checkpoint", trained / "student", "--hf", folder)
    assert [one.status for one in convert(pool, *words)] == [0, 0]
    prompt = ("--prompt", PROMPT, "--tokens", 12, "--temperature", 0)
    tokenizer = load_tokenizer(folder)
    given = torch.tensor([tokenizer.encode_batch([PROMPT])[0].tolist()])

    def ids() -> list[int]:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (written,) = model.generate(given, max_new_tokens=12, do_sample=False)
        return [int(one) for one in written[given.shape[1] :]]

    whole = ids()
    end = max(whole, key=whole.count)
    assert whole.index(end) < 11
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [tokenizer.eos_id, end]})
    )
    ended = ids()
    assert ended == whole[: whole.index(end) + 1]
    expected = PROMPT + tokenizer.decode(ended[:-1]) + "\n"
    assert _written(pool, "--hf", folder, *prompt) == expected
    assert _written(pool, "--hf", folder, "--transformers", *prompt) == expected
    # Also where the tokenizer is another folder's, without such settings.
    other = ("--tokenizer", trained / "student" / "hugging_face")
    assert not (other[1] / "generation_config.json").exists()
    assert _written(pool, "--hf", folder, *other, *prompt) == expected


@pytest.mark.slow
def test_an_evaluation_under_the_wrapper_has_the_figures_of_the_run(trained: Path) -> None:
    """With two processes, the words as a user types them."""
    words = [*SIGNALLING_TORCHRUN, "--standalone", "--nproc-per-node", "2", "launch/evaluate.py"]
    run_words = ["--run", str(trained / "student"), "parallel.tensor=2"]
    found = json.loads(run_from_imports(*words, *run_words, seconds=300).stdout)
    assert set(found) >= {"ce_loss", "kd_loss", "top1_agreement"}
    validation: Any = records(trained / "student")[-1]["validation"]
    assert found["ce_loss"] == pytest.approx(validation["ce_loss"], rel=2e-6)


def test_the_run_is_the_first_word_or_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["runs/lr=1", "a=1", "b=2"], ["--run", "runs/lr=1", "a=1", "b=2"]):
        parser = argparse.ArgumentParser()
        add_run_arguments(parser, example="")
        parsed = parser.parse_intermixed_args(words)
        assert run_and_overrides(parsed) == ("runs/lr=1", ["a=1", "b=2"])
    for script, text in (("evaluate.py", "first"), ("generate.py", "first, or --hf DIR")):
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(ROOT / "launch" / script))["main"]([])
        last_line = f"give the output folder of a run, e.g. runs/{text}\n"
        assert capsys.readouterr().err.endswith(last_line)


def test_a_checkpoint_brings_the_tokenizer_of_its_run(tmp_path: Path) -> None:
    own = tmp_path / "run" / "hugging_face"
    own.mkdir(parents=True)
    step = tmp_path / "run" / "checkpoints" / "step_0000002"
    for path in (tmp_path / "run", step.parent, step):
        config = load_weights({"checkpoint": str(path)}, [], world_size=1)
        assert config.data.tokenizer.path == str(own)
    named = load_weights({"checkpoint": str(step)}, ["data.tokenizer.path=mine"], world_size=1)
    assert named.data.tokenizer.path == "mine"
    with pytest.raises(ConfigError, match=r"none: no tokenizer is there; name one, data\.tok"):
        load_weights({"checkpoint": str(tmp_path / "none")}, [], world_size=1)


def test_a_run_has_its_tokenizer_where_the_named_one_is_gone(trained: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "moved"
    shutil.copytree(trained / "student" / "hugging_face", run_folder / "hugging_face")
    content = yaml.safe_load((trained / "student" / "config.yaml").read_text())
    for named, expected in ((str(tmp_path), tmp_path), ("gone", run_folder / "hugging_face")):
        content["data"]["tokenizer"] = {"path": named}
        (run_folder / "config.yaml").write_text(yaml.safe_dump(content))
        found = load_trained_run(str(run_folder), [], world_size=1, own=STUDENT_ALONE)
        assert found.data.tokenizer.path == str(expected)
    mine = ["data.tokenizer.path=mine"]
    found = load_trained_run(str(run_folder), mine, world_size=1, own=STUDENT_ALONE)
    assert found.data.tokenizer.path == "mine"


def test_a_folder_that_is_not_a_model_is_named_by_its_option(tmp_path: Path) -> None:
    from megatron_distill.data.tokenizers.open import load_tokenizer
    from megatron_distill.evaluation.generate import write_text

    text = re.escape(
        f"--hf {tmp_path / 'none'}: no config.json is there; give a Hugging Face folder"
    )
    with pytest.raises(CheckpointError, match=text):
        write_text(tmp_path / "none", "a", Sampling(), tokens=1)
    with pytest.raises(
        DataError, match=r"set --hf to a folder with a tokenizer\.json.*`hf download"
    ):
        load_tokenizer(tmp_path / "none", named="--hf")


def test_the_layout_of_the_training_is_not_taken_over(trained: Path) -> None:
    alone = load_trained_run(str(trained / "student"), [], world_size=1)
    assert (alone.parallel.tensor, alone.parallel.pipeline) == (1, 1)
    assert alone.student.checkpoint == str(trained / "student")
    with pytest.raises(ConfigError, match=r"parallel\.tensor"):
        load_trained_run(str(trained / "student"), ["parallel.tensor=3"], world_size=2)
