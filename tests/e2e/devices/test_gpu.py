"""A run on a GPU equals that on a CPU: in fp32 to rounding, in bf16 nearly; it can be resumed.

With two GPUs a run on both, over NCCL, equals that on one. Two ranks on one GPU, over gloo, do too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.devices.test_fake_cuda import GEMMA, LINEAR, MAPS, STATES, TERMS
from tests.e2e.processes import ROOT, SCRIPT, run_python
from tests.e2e.runs import (
    CONTEXT,
    EXPERT,
    PIPELINE,
    SAVE,
    SEQUENCE,
    TENSOR,
    VIRTUAL,
    Course,
    Inputs,
    assert_same_course,
    step_records,
)

pytestmark = pytest.mark.gpu

GPU = "cuda"
SECONDS = 600
FIRST, LAST = 1e-5, 2e-3
STEPS, ROWS = 20, 8

Runner = Callable[..., Course]

CASES: dict[str, tuple[str, Sequence[str]]] = {
    "dense": ("dense", ()),
    "recomputed": ("dense", ("train.recompute=full",)),
    "documents see each other": ("dense", ("data.isolate_documents=false",)),
    "GPT-like": ("gpt", ()),
    "experts": ("moe", ()),
    "Gemma-like": ("dense", GEMMA),
    "five terms": ("dense", (TERMS,)),
    "states, balanced": ("dense", (STATES, LINEAR, "objective.balance.mode=gradient_norm")),
    "maps, balanced": ("dense", (MAPS, "objective.balance.mode=magnitude")),
}


@pytest.fixture(scope="module")
def train(inputs: Inputs) -> Runner:
    """Train in a process of its own on a device; the same request runs once."""

    @cache
    def trained(device: str, name: str, *overrides: str, folder: Path | None = None) -> Course:
        output = folder or inputs.folder / f"gpu-{trained.cache_info().misses}"
        words = ["--config", str(inputs.folder / f"{name}.yaml"), f"output={output}"]
        words += [f"runtime.device={device}", *overrides]
        run_python(str(SCRIPT), *words, seconds=SECONDS)
        return step_records(output)

    return trained


@pytest.mark.parametrize("case", CASES)
def test_in_fp32_a_course_is_that_of_a_cpu(train: Runner, case: str) -> None:
    name, overrides = CASES[case]
    expected = train("cpu", name, *overrides)
    assert len(expected) == STEPS
    assert_same_course(train(GPU, name, *overrides), expected, first=FIRST, last=LAST)


@pytest.mark.parametrize("case", ["dense", "Gemma-like", "five terms", "experts"])
def test_in_bf16_a_course_is_close_to_that_of_a_cpu(train: Runner, case: str) -> None:
    name, overrides = CASES[case]
    exact = train("cpu", name, *overrides)
    rounded = train(GPU, name, "train.precision=bf16", *overrides)
    assert exact[0]["ce_loss"] != rounded[0]["ce_loss"]
    for ours, other in zip(rounded, exact, strict=True):
        for quantity, tolerance in (("ce_loss", 0.01), ("kd_loss", 0.03), ("grad_norm", 0.15)):
            assert ours[quantity] == pytest.approx(other[quantity], rel=tolerance), ours["step"]


def test_a_stored_teacher_is_read_onto_the_device(
    pool: Pool, inputs: Inputs, tmp_path: Path, train: Runner
) -> None:
    config, store = write_capture(inputs, "gpu", samples=STEPS * ROWS), tmp_path / "store"
    assert run_in(pool, 1, config, store) is True
    stored = (f"teacher.store={store}", "teacher.architecture=null")
    expected = train("cpu", "dense", *stored)
    assert_same_course(train(GPU, "dense", *stored), expected, first=FIRST, last=LAST)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_a_run_that_is_started_again_goes_on(train: Runner, tmp_path: Path, name: str) -> None:
    saving = ("checkpoint.save=true", "checkpoint.interval=5")
    train(GPU, name, "train.steps=10", "schedule.decay_steps=20", *saving, folder=tmp_path)
    resumed = train(GPU, name, "schedule.decay_steps=20", *saving, folder=tmp_path)
    whole = train(GPU, name, "schedule.decay_steps=20")
    assert [record["step"] for record in resumed] == list(range(1, STEPS + 1))
    # Sums of atomics have no order.
    assert_same_course(resumed, whole, first=FIRST, last=1e-4)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Two GPUs: configuration and overrides. Without overrides both have different data.
LAYOUTS: dict[str, tuple[str, Sequence[str]]] = {
    "DP2": ("dense", ("optimizer.overlap_grad_reduce=true", "optimizer.overlap_param_gather=true")),
    "TP2+sequence": ("dense", (TENSOR, SEQUENCE)),
    "PP2": ("dense", (PIPELINE,)),
    "PP2+virtual": ("dense", (PIPELINE, VIRTUAL)),
    "CP2": ("dense", (CONTEXT,)),
    "EP2": ("moe", (EXPERT,)),
    "sharded teacher": ("dense", ("teacher.shard_weights=true",)),
    "teacher's layout": ("dense", ("teacher.parallel={tensor: 2}",)),
    "teacher's rank": ("dense", ("teacher.ranks=1",)),
}
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def train_on_two_ranks(config: Path, output: Path, *overrides: str) -> Course:
    """Train by torchrun; returns the records of the steps."""
    words = ["--config", str(config), f"output={output}", f"runtime.device={GPU}", *overrides]
    run_python(*TORCHRUN, str(SCRIPT), *words, seconds=SECONDS)
    return step_records(output)


@two_gpus
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_course_on_two_gpus_is_that_on_one(
    inputs: Inputs, train: Runner, tmp_path: Path, layout: str
) -> None:
    name, overrides = LAYOUTS[layout]
    found = train_on_two_ranks(inputs.folder / f"{name}.yaml", tmp_path, *overrides)
    assert_same_course(found, train(GPU, name), first=FIRST, last=LAST)


# The two ranks copy norms from each other when they resume, or the tied embedding.
COPIED: dict[str, Sequence[str]] = {
    "TP2": (TENSOR,),
    "tied PP2": (PIPELINE, "student.architecture.tied_embeddings=true"),
}


@two_gpus
@pytest.mark.parametrize("layout", COPIED)
def test_a_run_on_two_gpus_that_is_started_again_goes_on(
    dense: Path, tmp_path: Path, layout: str
) -> None:
    saving = ("schedule.decay_steps=20", "checkpoint.save=true", "checkpoint.interval=5")
    both = (*COPIED[layout], *saving)
    half = f"train.steps={STEPS // 2}"
    assert len(train_on_two_ranks(dense, tmp_path / "resumed", *both, half)) == STEPS // 2
    resumed, whole = (
        train_on_two_ranks(dense, tmp_path / name, *both) for name in ("resumed", "whole")
    )
    assert [record["step"] for record in resumed] == list(range(1, STEPS + 1))
    assert_same_course(resumed, whole, first=FIRST, last=1e-4)


IPC, SENT = "teacher.transfer.backend=ipc", "teacher.transfer={what: top_k, k: 8, backend: ipc}"
# Settings of both runs, and of that on two GPUs.
BY_IPC: dict[str, tuple[Sequence[str], str]] = {
    "hidden states": ((), IPC),
    "layers": ((STATES,), IPC),
    "queries and keys": ((MAPS,), IPC),
    "top-k": (("objective.terms=[{top_k: 8}]",), SENT),
    "top-k and layers": (("objective.terms=[{top_k: 8}]", STATES), SENT),
}


@two_gpus
@pytest.mark.parametrize("case", BY_IPC)
def test_answers_by_cuda_ipc_give_the_course_of_one_gpu(
    dense: Path, train: Runner, tmp_path: Path, case: str
) -> None:
    both, own = BY_IPC[case]
    found = train_on_two_ranks(dense, tmp_path, "teacher.ranks=1", own, *both)
    assert_same_course(found, train(GPU, "dense", *both), first=FIRST, last=LAST)


@pytest.mark.parametrize("backend", ["ipc", "gloo"])
def test_a_teacher_on_a_rank_of_its_own_may_share_the_gpu(
    dense: Path,
    train: Runner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
) -> None:
    # Each rank takes the only GPU that it sees. NCCL refuses that, and gloo reduces no shards.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible.split(",")[0])
    own = ("runtime.backend=gloo", "optimizer.distributed=false", "teacher.ranks=1")
    found = train_on_two_ranks(dense, tmp_path, *own, f"teacher.transfer.backend={backend}")
    assert_same_course(found, train(GPU, "dense"), first=FIRST, last=LAST)


@two_gpus
@pytest.mark.parametrize("stages", [(PIPELINE,), (PIPELINE, VIRTUAL)], ids=str)
def test_text_of_two_stages_on_two_gpus_is_that_of_one(
    train: Runner, tmp_path: Path, stages: Sequence[str]
) -> None:
    train(GPU, "dense", SAVE, folder=tmp_path)
    script = str(ROOT / "launch" / "generate.py")
    words = [str(tmp_path), "--prompt", "def ", "--tokens", "24", "--temperature", "0"]
    alone = run_python(script, *words, seconds=SECONDS)
    assert alone.startswith("def ")
    assert alone in run_python(*TORCHRUN, script, *words, *stages, seconds=SECONDS)
