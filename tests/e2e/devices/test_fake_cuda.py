"""On a GPU every tensor of a step is there, and between its batches and its report the host waits
twice: for the losses, and for the gradient's norm.

Without a GPU, on tensors that only claim to be on one (`tests.fake_cuda`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.processes import run_python
from tests.e2e.runs import CONTEXT, Inputs
from tests.fake_cuda.stub import COMPILER, compile_stub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device"),
]

STEPS = 2
SECONDS = 300
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=1")
TENSOR, SEQUENCE = "parallel.tensor=2", "parallel.sequence=true"
PIPELINE, VIRTUAL = "parallel.pipeline=2", "parallel.virtual_pipeline=2"
TERMS = """objective.terms=[
    {divergence: js_divergence, weight: 0.5, temperature: 2.0, scale_by_temperature_squared: true},
    {divergence: skewed_reverse_kl, skew_lambda: 0.3},
    {divergence: adaptive_kl, weight: 0.2},
    {divergence: forward_kl, top_k: 16, temperature: 2.0},
    {divergence: reverse_kl, top_k: 8, support: renormalized, weight: 0.1}]"""
STATES = """objective.features=[
    {student: 2, teacher: 1, loss: mse}, {match: uniform, loss: cosine, weight: 0.1}]"""
MAPS = "objective.features=[{student: 3, teacher: 2, loss: attention, weight: 2.0}]"
LINEAR = "objective.projector.kind=linear"
# One at rest in host memory; samples of a micro-batch have different ones.
SHAPE = """architecture:
    {num_layers: 2, hidden_size: 40, ffn_hidden_size: 64, num_attention_heads: 4}"""
SEVERAL = (
    "teacher=null",
    f"teachers={{a: {{offload: true, {SHAPE}}}, b: {{{SHAPE}}}}}",
    "objective.routing_weights={a: 1, b: 1}",
    """objective.terms=[{divergence: forward_kl}, {teachers: {a: 1, b: 2}, temperature: 2.0},
    {teachers: {a: 1, b: 2}, mixture: geometric}, {teachers: [a, b], mixture: lowest_loss}]""",
)
GEMMA = tuple(
    f"student.architecture.{key}"
    for key in (
        "norm=zero_centered_rmsnorm", "activation=geglu_tanh", "post_norms=true",
        "embedding_scale=5.657", "tied_embeddings=true", "sliding_window=6",
        "sliding_layers=[0, 1, 3]", "attention_softcap=1.5", "logit_softcap=3.0",
        "num_attention_heads=2", "num_kv_heads=1",  # FlexAttention takes heads of 16 and more
    )
)  # fmt: skip

# The flash kernel takes heads of eight numbers, and not the teacher's of ten.
BF16 = ("train.precision=bf16", "teacher.architecture.num_attention_heads=5")

# Configuration, rank, world, overrides.
CASES: dict[str, tuple[str, int, int, Sequence[str]]] = {
    "one rank": ("dense", 0, 1, ()),
    "bf16, recomputed": ("dense", 0, 1, (*BF16, "train.recompute=full")),
    "bf16 CP2": ("dense", 1, 2, (*BF16, CONTEXT)),
    "bf16 Gemma-like": ("dense", 0, 1, (*BF16, *GEMMA)),
    "bf16 experts": ("moe", 0, 1, BF16),
    "last stage, virtual": ("dense", 1, 2, (PIPELINE, VIRTUAL)),
    "last stage, states on the host": ("dense", 1, 2, (PIPELINE, "teacher.offload_hidden=true")),
    "weights at rest": ("dense", 0, 1, ("teacher.offload=true",)),
    "several teachers TP2+sequence": ("dense", 1, 2, (*SEVERAL, TENSOR, SEQUENCE)),
    "DP2, shards at rest": (
        "dense",
        1,
        2,
        ("teacher.shard_weights=true", "teacher.offload=true"),
    ),
    "GPT-like": ("gpt", 0, 1, ()),
    "Gemma-like": ("dense", 0, 1, GEMMA),
    "dropout": ("dense", 0, 1, ("student.architecture.hidden_dropout=0.1",)),
    "five terms TP2": ("dense", 1, 2, (TERMS, TENSOR)),
    "phases of all ranks": (
        "dense",
        1,
        2,
        ("logging.timers_interval=1", "logging.straggler_interval=2"),
    ),
    "states": ("dense", 1, 2, (STATES, LINEAR, TENSOR, SEQUENCE)),
    "states, first stage": ("dense", 0, 2, (STATES, LINEAR, PIPELINE)),
    "maps CP2": ("dense", 1, 2, (MAPS, CONTEXT)),
}
STEP_WAITS = {"step.py:train_step": STEPS, "clip_grads.py:get_grad_norm_fp32": STEPS}
# Made of plain numbers, once per schedule and just before the report is waited for.
COPIES = {"features.py:finish"}

PREVIOUS = "objective.balance.raw_losses=previous"
# Overrides, and what a step waits for besides.
BALANCED: dict[str, tuple[Sequence[str], dict[str, int]]] = {
    "magnitude": ((MAPS,), {"loss_sizes.py:agreed": STEPS}),
    # The first step is measured as well as remembered.
    "magnitude, previous": ((PREVIOUS,), {"loss_sizes.py:agreed": STEPS + 1}),
    "gradient_norm": ((STATES, LINEAR), {"loss_sizes.py:agreed": STEPS}),
    "magnitude, per micro-batch": (
        ("objective.balance.per_microbatch=true",),
        {"loss_sizes.py:local_loss_values": STEPS, "balancing.py:_mean": STEPS},
    ),
    "schedule": (("objective.terms.0.temperature_schedule={to: 3.0, steps: 10}",), {}),
}


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake device, compiled once."""
    return compile_stub(tmp_path_factory.mktemp("fake_cuda"))


def train(
    stub: Path, inputs: Inputs, output: Path, name: str, rank: int, world: int, *overrides: str
) -> dict[str, Any]:
    """Train as one rank on the fake device; returns what was seen."""
    words = [str(stub), str(rank), str(world), str(inputs.folder / f"{name}.yaml")]
    words += [f"output={output}", *SHORT, *overrides]
    printed = run_python("-m", "tests.fake_cuda", *words, seconds=SECONDS)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert found["is_done"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_step_stays_on_its_device_and_waits_twice(
    stub: Path, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, rank, world, overrides = CASES[case]
    seen = train(stub, inputs, tmp_path, name, rank, world, *overrides)
    assert seen["waits"] == STEP_WAITS
    assert seen["from_host"] == {}
    assert set(seen["copies"]) <= COPIES
    assert all(count == STEPS for count in seen["copies"].values())
    # The flash kernel in 16 bits; soft caps in blocks of documents.
    expected = {"blocked"}
    if "bf16" in case:
        expected = {"varlen", "flex"} if "Gemma" in case else {"varlen"}
    assert set(seen["attention"]) == expected
    is_last_stage = "first stage" not in case
    assert (seen["kernels"] != {}) == is_last_stage


@pytest.mark.parametrize("case", BALANCED)
def test_a_balanced_step_waits_for_its_ratios_too(
    stub: Path, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    overrides, waits = BALANCED[case]
    mode = f"objective.balance.mode={case.split(',')[0]}"
    seen = train(stub, inputs, tmp_path, "dense", 0, 1, mode, *overrides)
    assert seen["waits"] == {**STEP_WAITS, **waits}
    assert seen["from_host"] == {}


@pytest.mark.parametrize("mode", ["top_k", "sampled"])
def test_a_stored_teacher_is_asked_once_whether_it_failed(
    pool: Pool, stub: Path, inputs: Inputs, tmp_path: Path, mode: str
) -> None:
    config, store = write_capture(inputs, "fake", samples=16), tmp_path / "store"
    kept = () if mode == "top_k" else ("store.mode=sampled", "store.temperatures=[]")
    assert run_in(pool, 1, config, store, *kept) is True
    stored = (f"teacher.store={store}", "teacher.architecture=null")
    seen = train(stub, inputs, tmp_path / "run", "dense", 0, 1, *stored)
    assert seen["waits"] == {**STEP_WAITS, "collectives.py:highest": STEPS}
    assert seen["copies"].keys() == {"collectives.py:highest"}  # records come from pinned memory
    assert seen["from_host"] == {}
