"""A run that stops and goes on is the run that never stopped."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    EXPERT,
    PIPELINE,
    SECONDS,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Inputs,
    assert_same_course,
    checkpoints,
    course,
    failure,
    quick_and_slow,
    records,
    resumed,
    run,
    train_here,
    validations,
)

STEPS = 6
STOP = 4
COMMON = (
    f"train.steps={STEPS}",
    "checkpoint.save=true",
    "validation.samples=8",
    "validation.interval=3",
    "data.validation_fraction=0.2",
)
DROPOUT = tuple(f"student.architecture.{kind}_dropout=0.1" for kind in ("attention", "hidden"))

SAME: dict[str, tuple[str, int, Sequence[str]]] = {
    "DP2, parameters gathered late": ("dense", 2, ("optimizer.overlap_param_gather=true",)),
    "DP2, saved meanwhile": ("dense", 2, ("checkpoint.asynchronous=true", "checkpoint.interval=2")),
    "DP2 in bf16": ("dense", 2, ("train.precision=bf16",)),
    "TP2xPP2+sequence+virtual, dropout, recompute": (
        "dense", 4, (TENSOR, SEQUENCE, PIPELINE, VIRTUAL, "train.recompute=full", *DROPOUT),
    ),
    "CP2, dropout": ("dense", 2, (CONTEXT, *DROPOUT)),
    "experts EP2": ("moe", 2, (EXPERT,)),
    "two tokenizers, read by workers": (
        "aligned", 2, (TENSOR, "data.workers=2", "data.shuffle_samples=12"),
    ),
}  # fmt: skip


# One of each kind; the others take minutes and run with the slow tests.
QUICK_SAME = ("DP2, saved meanwhile",)


def data_place(output: Path, step: int) -> dict[str, Any]:
    """Where a checkpoint goes on in the first data source.

    It reads from a `document` of an `epoch` on, where a window of shuffled samples begins, of which
    `given` were trained on.
    """
    path = output / "checkpoints" / f"step_{step:07d}" / "description.json"
    state = json.loads(path.read_text())["data"]["source"]["sources"][0]
    return {"given": state["given"], **state["source"]}


@pytest.mark.parametrize("case", quick_and_slow(SAME, QUICK_SAME))
def test_in_the_same_layout_every_bit_is_the_same(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, world, layout = SAME[case]
    config = inputs.folder / f"{name}.yaml"
    after, expected = resumed(pool, world, config, tmp_path, *COMMON, *layout, stop_after=STOP)
    assert course(after) == course(expected)
    # It stopped inside an epoch and inside a window; small windows begin inside an epoch too.
    stop, end = data_place(tmp_path / "cut", STOP), data_place(tmp_path / "whole", STEPS)
    assert stop["given"] > 0
    assert end["epoch"] == 0
    if name == "aligned":
        assert (stop["block"], stop["document"]) > (0, 0)
    held_out = validations(tmp_path / "cut")
    assert held_out == validations(tmp_path / "whole")
    assert [record["step"] for record in held_out] == [3, 6]


class _KilledError(Exception):
    """Ends a run as a kill does."""


def killed_beside_a_validation(
    rank: int, world: int, config_path: Path, overrides: Sequence[str], step: int, place: str
) -> None:
    """Train until a signal in `step`; a kill ends its validation, or what follows it."""
    from megatron_distill.train import loop
    from megatron_distill.train.run_state import RunState

    def end(*_: Any) -> Any:
        raise _KilledError

    with pytest.MonkeyPatch.context() as patch:
        if place == "in it":
            patch.setattr(loop, "_validation", end)
        else:
            noted = RunState.note_best
            patch.setattr(
                RunState,
                "note_best",
                lambda state, *others: (end if state.step == step else noted)(state, *others),
            )
        with pytest.raises(_KilledError):
            train_here(rank, world, config_path, overrides, step)


def test_a_step_with_a_signal_is_saved_before_it_is_validated(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    words = [f"output={tmp_path}", *COMMON]
    pool.run(1, killed_beside_a_validation, dense, words, 3, "in it", timeout=SECONDS)
    assert checkpoints(tmp_path) == ["step_0000003"]


@pytest.mark.slow
@pytest.mark.parametrize(("place", "logged"), [("in it", []), ("after it", [3])])
def test_a_validation_that_a_kill_ended_is_made_up_by_the_next_start(
    pool: Pool, dense: Path, tmp_path: Path, place: str, logged: list[int]
) -> None:
    """A signal saves the step first; its validation is the best, which no checkpoint knows."""
    best = "checkpoint.keep_best={metric: validation.ce_loss, mode: max}"
    words = (*COMMON, *DROPOUT, best, "checkpoint.keep=1")
    expected = run(pool, 1, dense, tmp_path / "whole", *words)
    cut = tmp_path / "cut"
    arguments = [f"output={cut}", *words]
    pool.run(1, killed_beside_a_validation, dense, arguments, 3, place, timeout=SECONDS)
    assert checkpoints(cut) == ["step_0000003"]
    assert [record["step"] for record in validations(cut)] == logged
    assert course(run(pool, 1, dense, cut, *words)) == course(expected)
    assert validations(cut) == validations(tmp_path / "whole")
    assert [record["step"] for record in validations(cut)] == [3, 6]
    held = ["best.json", "step_0000003", "step_0000006"]
    assert checkpoints(cut) == checkpoints(tmp_path / "whole") == held


@pytest.mark.slow
def test_dropout_is_drawn(pool: Pool, dense: Path, tmp_path: Path) -> None:
    # Else the cases above say nothing about random states.
    short = ("train.steps=2", "schedule.warmup_steps=0")
    plain = run(pool, 1, dense, tmp_path / "plain", *short)
    dropped = run(pool, 1, dense, tmp_path / "dropped", *short, *DROPOUT)
    assert plain[0]["ce_loss"] != pytest.approx(dropped[0]["ce_loss"], rel=1e-4)


# Every weight and moment in every layout: test_sharded_saves.py.
OTHER: dict[str, tuple[str, tuple[int, Sequence[str]], tuple[int, Sequence[str]]]] = {
    "PP2 to DP2": ("dense", (2, (PIPELINE,)), (2, ())),
    "mixture EP2xPP2 to TP2xEP2": (
        "mixture", (4, (EXPERT, PIPELINE)), (4, (TENSOR, SEQUENCE, EXPERT)),
    ),
    "two tokenizers, CP2 to TP2xPP2": (
        "aligned", (2, (CONTEXT,)), (4, (TENSOR, PIPELINE, "data.workers=2")),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHER)
def test_in_another_layout_the_losses_are_the_same(
    pool: Pool, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, first, second = OTHER[case]
    config = inputs.folder / f"{name}.yaml"
    expected = run(pool, first[0], config, tmp_path / "whole", *COMMON, *first[1])
    cut = tmp_path / "cut"
    run(pool, first[0], config, cut, *COMMON, *first[1], stop_after=STOP)
    after = run(pool, second[0], config, cut, *COMMON, *second[1])
    assert len(after) == STEPS
    names = ("ce_loss", "kd_loss", "learning_rate", "tokens")
    assert_same_course(after, expected, names, first=1e-5, last=1e-5)


@pytest.mark.parametrize("asynchronous", [pytest.param("false", marks=pytest.mark.slow), "true"])
def test_the_newest_remain_and_leftovers_go(
    pool: Pool, dense: Path, tmp_path: Path, asynchronous: str
) -> None:
    saving = ("checkpoint.interval=2", "checkpoint.keep=2", "validation.samples=0")
    overrides = [*COMMON, *saving, "validation.interval=0"]
    overrides.append(f"checkpoint.asynchronous={asynchronous}")
    leftover = tmp_path / "checkpoints" / "step_0000099.partial"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_bytes(b"half a file")
    (tmp_path / "checkpoints" / "step_0000098.old.partial").mkdir()
    run(pool, 2, dense, tmp_path, *overrides, stop_after=3)
    assert checkpoints(tmp_path) == ["step_0000002", "step_0000003"]
    shutil.copytree(tmp_path / "checkpoints" / "step_0000003", leftover)
    (leftover / "description.json").write_text('{"step": 99}')
    found = run(pool, 2, dense, tmp_path, *overrides)
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    assert checkpoints(tmp_path) == ["step_0000004", "step_0000006"]


@pytest.fixture(scope="module")
def saved(pool: Pool, inputs: Inputs) -> Path:
    """A run with one checkpoint, not to be changed."""
    output = inputs.folder / "saved"
    config = inputs.folder / "dense.yaml"
    run(pool, 1, config, output, "train.steps=2", "schedule.warmup_steps=1", "checkpoint.save=true")
    return output


CONTINUED = ("train.steps=3", "schedule.warmup_steps=1", "checkpoint.save=true")


def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy of the saved run that a test may damage."""
    return shutil.copytree(saved, tmp_path / "copy")


def test_a_finished_run_stays_as_it_is(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path
) -> None:
    output = copied(saved, tmp_path)
    before = records(output)
    run(pool, 2, dense, output, "train.steps=2", "schedule.warmup_steps=1")
    assert records(output) == before
    assert checkpoints(output) == ["step_0000002"]


def test_a_checkpoint_of_another_model_is_refused_by_its_differences(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path
) -> None:
    output = copied(saved, tmp_path)
    changes = ["student.architecture.hidden_size=48", "student.architecture.qk_norm=true"]
    text = failure(pool, 2, dense, output, *CONTINUED, *changes)
    assert text.startswith("CheckpointError: ")
    for part in (
        str(output / "checkpoints" / "step_0000002"),
        "hidden_size 32 vs 48",
        "head_size 8 vs 12",
        "qk_norm False vs True",
        "`output`",
    ):
        assert part in text
    assert checkpoints(output) == ["step_0000002"]


def test_initial_weights_of_another_model_are_refused(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path
) -> None:
    text = failure(
        pool, 2, dense, tmp_path,
        f"teacher.checkpoint={saved}", "train.steps=1", "schedule.warmup_steps=0",
    )  # fmt: skip
    assert "num_layers 4 vs 2" in text
    assert str(saved) in text


def test_another_tokenizer_is_refused(
    pool: Pool, inputs: Inputs, saved: Path, tmp_path: Path
) -> None:
    output = copied(saved, tmp_path)
    tokenizer = shutil.copytree(inputs.tokenizer, tmp_path / "tokenizer")
    file = tokenizer / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"][-2:] = content["model"]["merges"][:-3:-1]
    file.write_text(json.dumps(content))
    text = failure(
        pool, 2, inputs.folder / "dense.yaml", output,
        f"data.tokenizer.path={tokenizer}", *CONTINUED,
    )  # fmt: skip
    assert "another tokenizer" in text
    assert "data.tokenizer.path" in text


DAMAGES = ("truncate", "flip", "flip TP2", "remove", "description", "no description", ".metadata")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_an_error_on_all_ranks(
    pool: Pool, dense: Path, saved: Path, tmp_path: Path, damage: str
) -> None:
    output = copied(saved, tmp_path)
    folder = output / "checkpoints" / "step_0000002"
    shard = folder / "__0_0.distcp"
    if damage == "truncate":
        shard.write_bytes(shard.read_bytes()[:1000])
    elif damage.startswith("flip"):
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    elif damage == "remove":
        shard.unlink()
    elif damage == "description":
        (folder / "description.json").write_text("{")
    else:
        (folder / damage.replace("no description", "description.json")).unlink()
    layout = ("parallel.tensor=2",) if "TP2" in damage else ()
    text = failure(pool, 2, dense, output, *CONTINUED, *layout)
    assert text.startswith("CheckpointError: ")
    places = {"description": "description.json", "no description": "", ".metadata": damage}
    assert str(folder / places.get(damage, shard.name)) in text
    found = {"no description": "it has no description.json", ".metadata": "is missing"}
    assert found.get(damage, "damaged") in text
    assert text.endswith(f"; remove or rename {folder} to start from step 0")
    assert "\n" not in text
