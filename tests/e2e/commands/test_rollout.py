"""Texts for a file of prompts: the same in every layout, after any interruption, and trained on."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.hugging_face_models import save_model
from tests.distributed.pool import Pool
from tests.e2e.failing import Ending, call_script, message
from tests.e2e.processes import (
    ROOT,
    SIGNALLING_TORCHRUN,
    TORCHRUN,
    Hold,
    run_from_imports,
    torchrun,
)
from tests.e2e.runs import SECONDS
from tests.support.chat_fixtures import chat_tokenizer

SCRIPT = ROOT / "launch" / "rollout.py"
TRAIN = ROOT / "launch" / "pretrain_distill.py"
QUESTIONS = ("Is it sunny?", "what is the weather", "say hello", "in Paris?", "hello", "there is")
SAMPLED = ("--samples", 2, "--tokens", 12, "--part-rows", 2, "--temperature", 0.9, "--top-k", 40)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template."""
    folder = tmp_path_factory.mktemp("rollout") / "hf"
    tokenizer = chat_tokenizer("qwen25").hugging_face
    save_model(folder, "llama2", vocab_size=len(tokenizer), max_position_embeddings=160)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(model: Path) -> Path:
    """Conversations, one of them with a response already."""
    path = model.parent / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    rows[1]["messages"].append({"role": "assistant", "content": "rain"})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def rollout(pool: Pool, *words: object, world: int = 1) -> list[Ending]:
    """Call the command on every rank."""
    texts = [str(word) for word in words]
    return pool.run(world, call_script, SCRIPT, texts, timeout=SECONDS)


def check_of(output: Path) -> dict[str, Any]:
    """The comparison with the forward pass of training."""
    found: dict[str, Any] = json.loads((output / "rollouts.json").read_text())["log_prob_check"]
    return found


def parts(output: Path) -> list[list[dict[str, Any]]]:
    """The rows of each part."""
    files = sorted(output.glob("part-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.fixture(scope="module")
def alone(pool: Pool, model: Path, prompts: Path) -> Path:
    """The texts of one rank, at once."""
    output = model.parent / "alone"
    words = ("--hf", model, "--prompts", prompts, "--output", output, *SAMPLED)
    (ending,) = rollout(pool, *words)
    assert ending.status == 0, ending.stderr
    assert f"{output}: 12 texts, " in ending.stderr
    assert re.search(
        r"log-probabilities of \d+ tokens of 8 texts and those of the forward pass of training "
        r"differ by \d\.\de-\d\d nats per token, at most \d\.\de-\d\d\n",
        ending.stderr,
    )
    return output


def test_each_prompt_has_its_samples_as_conversations(alone: Path) -> None:
    found = parts(alone)
    assert [len(part) for part in found] == [4, 4, 4]
    rows = [row for part in found for row in part]
    assert [(row["row"], row["sample"]) for row in rows] == [
        (row, sample) for row in range(1, 7) for sample in range(2)
    ]
    for row in rows:
        question, answer = row["messages"]
        assert question == {"role": "user", "content": QUESTIONS[row["row"] - 1]}
        assert answer["role"] == "assistant"
        assert 1 <= row["tokens"] <= 12
        assert row["log_prob"] < 0
        assert row["ended"] in ("stop_token", "length")
        assert row["ended"] == "stop_token" or row["tokens"] == 12
    pairs = zip(rows[::2], rows[1::2], strict=True)
    assert any(one["messages"] != other["messages"] for one, other in pairs)
    totals = json.loads((alone / "rollouts.json").read_text())["totals"]
    assert totals["texts"] == 12
    assert totals["tokens"] == sum(row["tokens"] for row in rows)
    assert totals["truncated"] == sum(row["ended"] == "length" for row in rows)
    assert totals["log_prob"] == pytest.approx(sum(row["log_prob"] for row in rows), abs=1e-3)
    # Drawn at temperature 0.9 from 40 tokens; compared at temperature one from all of them.
    check = check_of(alone)
    assert (check["texts"], check["tokens"]) == (8, sum(row["tokens"] for row in rows[:8]))
    assert 0 < check["mean_difference"] <= check["max_difference"] <= 1e-5


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, ()),
        pytest.param(2, ("parallel.tensor=2",), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.pipeline=2",), marks=pytest.mark.slow),
        pytest.param(2, ("parallel.context=2",), marks=pytest.mark.slow),
        pytest.param(4, ("parallel.tensor=2", "parallel.pipeline=2"), marks=pytest.mark.slow),
    ],
    ids=["DP2", "TP2", "PP2", "CP2", "TP2xPP2"],
)
def test_texts_are_the_same_in_every_layout(
    pool: Pool, alone: Path, model: Path, prompts: Path, tmp_path: Path, world: int,
    layout: tuple[str, ...],
) -> None:  # fmt: skip
    words = ("--hf", model, *layout, "--prompts", prompts, "--output", tmp_path / "a", *SAMPLED)
    endings = rollout(pool, *words, world=world)
    assert [one.status for one in endings] == [0] * world, endings[0].stderr
    for mine, other in zip(parts(tmp_path / "a"), parts(alone), strict=True):
        for row, expected in zip(mine, other, strict=True):
            assert row.pop("log_prob") == pytest.approx(expected.pop("log_prob"), abs=2e-3)
            assert row == expected
    check = check_of(tmp_path / "a")
    assert check["tokens"] == check_of(alone)["tokens"]
    assert check["max_difference"] <= 1e-5


def test_missing_parts_are_written_and_no_others(
    pool: Pool, alone: Path, model: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a"
    words = ("--hf", model, "--prompts", prompts, "--output", output, *SAMPLED)
    rollout(pool, *words)
    first, second, _ = sorted(output.glob("part-*.jsonl"))
    expected = second.read_bytes()
    second.unlink()
    first.write_text("kept\n")
    (ending,) = rollout(pool, *words, "--check-texts", 0)
    assert ending.status == 0
    assert check_of(output) == (written := check_of(alone)), "that of the first start stays"
    assert f"at most {written['max_difference']:.1e}" in ending.stderr
    assert first.read_text() == "kept\n"
    assert second.read_bytes() == expected == (alone / second.name).read_bytes()
    other = rollout(pool, *words, "--seed", 3)
    assert "its rollouts have seed = 0, not 3; name another folder" in message(other)
    assert "its rollouts have rows = 6, not 5 (rows of --prompts, at most --limit)" in message(
        rollout(pool, *words, "--limit", 5)
    )
    prompts_of_another = tmp_path / "b.jsonl"
    prompts_of_another.write_text('{"prompt": "hello"}\n')
    changed = (*words[:3], prompts_of_another, *words[4:])
    assert "its rollouts have prompts = sha256:" in message(rollout(pool, *changed))


def test_a_part_has_as_many_rows_for_each_data_rank_and_the_same_in_another_layout(
    pool: Pool, model: Path, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a"
    words = ("--hf", model, "--prompts", prompts, "--output", output, "--tokens", 2)
    for world, layout in ((2, ()), (1, ()), (2, ("parallel.tensor=2",))):
        endings = rollout(pool, *words, *layout, world=world)
        assert endings[0].status == 0, endings[0].stderr
        settings = json.loads((output / "rollouts.json").read_text())["settings"]
        assert settings["part_rows"] == 512, "that of the part that is there"
    refused = rollout(pool, *words, "--part-rows", 256)
    assert "its rollouts have part_rows = 512, not 256" in message(refused)
    (output / "part-00000.jsonl").unlink()
    rollout(pool, *words)
    settings = json.loads((output / "rollouts.json").read_text())["settings"]
    assert settings["part_rows"] == 256, "a start without a part binds nothing"


def test_texts_that_end_at_their_length_and_prompts_that_are_too_long_are_counted(
    pool: Pool, model: Path, tmp_path: Path
) -> None:
    path, output = tmp_path / "texts.jsonl", tmp_path / "a"
    path.write_text(json.dumps({"q": "hello " * 200}) + '\n{"q": "hello"}\n')
    words = ("--hf", model, "--prompts", path, "--key", "q", "--output", output, "--tokens", 1)
    (ending,) = rollout(pool, *words, "--drop-truncated")
    assert ending.status == 0, ending.stderr
    assert "1 prompt left out, first row 1: " in ending.stderr
    assert "the model has 160 positions" in ending.stderr
    assert f"{output}: 0 texts" in ending.stderr
    assert "1 text reached --tokens or the model's last position without an end: left out" in (
        ending.stderr
    )
    assert parts(output) == [[]]
    assert (check_of(output)["texts"], check_of(output)["tokens"]) == (1, 1), "left out later"


def test_a_run_trains_on_them(pool: Pool, alone: Path, model: Path, tmp_path: Path) -> None:
    """The student learns the responses of its own rollouts' model."""
    config = tmp_path / "run.yaml"
    config.write_text(
        f"student: {{hf: {model}}}\n"
        f"data: {{sources: [{{format: jsonl, paths: {alone}/part-*.jsonl, conversation: {{}}}}], "
        f"tokenizer: {{path: {model}}}, sequence_length: 128}}\n"
        "train: {steps: 2, global_batch_size: 2, micro_batch_size: 1}\n"
        "schedule: {warmup_steps: 0}\ncheckpoint: {save: false}\nruntime: {device: cpu}\n"
    )
    texts = [str(config), f"output={tmp_path / 'run'}"]
    (ending,) = pool.run(1, call_script, TRAIN, texts, timeout=SECONDS)
    assert ending.status == 0, ending.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["ce_loss"] for line in lines if '"ce_loss"' in line]
    assert len(losses) >= 2
    assert all(loss > 0 for loss in losses)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_an_interrupted_command_goes_on_to_the_same_bytes(
    number: signal.Signals, model: Path, prompts: Path, tmp_path: Path
) -> None:
    words = ["--hf", model, "--prompts", prompts, "--samples", 32, "--tokens", 80]
    words += ["--part-rows", 1, "--temperature", 1.3, "--min-p", 0.001]
    texts = [str(word) for word in words]
    launcher = SIGNALLING_TORCHRUN if number == signal.SIGTERM else TORCHRUN
    output = tmp_path / "a"
    command = [*texts, "--output", str(output)]
    hold = Hold(output / "part-00003.jsonl")
    with torchrun(tmp_path, command, script=SCRIPT, launcher=launcher, hold=hold) as started:
        started.wait_until((output / "part-00001.jsonl").is_file)
        if number == signal.SIGTERM:
            started.process.send_signal(number)
            assert started.wait() == 0, started.log.read_text()
            assert "stopped; the same command goes on" in started.log.read_text()
        else:
            started.ranks()[0].kill()
            assert started.wait() != 0
        started.wait_for_all()
    assert len(parts(output)) < len(QUESTIONS)
    for folder in (output, tmp_path / "whole"):
        again = [*texts, "--output", str(folder)]
        run_from_imports(sys.executable, str(SCRIPT), *again, seconds=SECONDS)
    for file in sorted((tmp_path / "whole").glob("part-*.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found = [json.loads(line) for line in (output / file.name).read_text().splitlines()]
        for row, expected in zip(found, rows, strict=True):
            assert row.pop("log_prob") == pytest.approx(expected.pop("log_prob"), abs=5e-3)
            assert row == expected
