"""On a GPU every tensor of a step is there, and the host waits three times, after the launch of its
update: for the losses and the gradient's norm, all ranks' vote, the last event of the timers.

Without a GPU, on tensors that only claim to be on one (`tests.fake_cuda`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu
from benchmarks.steps.cases import Case, Ranks
from tests.distributed.pool import Pool
from tests.e2e.captures import run_in, write_capture
from tests.e2e.runs import CONTEXT, MEANS_TERMS, Inputs
from tests.fake_cuda.forks import FakeDevice
from tests.fake_cuda.stub import COMPILER, compile_stub

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real device"),
]

STEPS = 2
SECONDS = 300
MICRO_BATCHES = 2  # of a step of one data-parallel rank
SHORT = (f"train.steps={STEPS}", "schedule.warmup_steps=1",
         f"train.global_batch_size={2 * MICRO_BATCHES}", "objective.chunk_tokens=40")  # fmt: skip
TWO_REPLICAS = f"train.global_batch_size={4 * MICRO_BATCHES}"
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
    {teachers: {a: 1, b: 2}, mixture: geometric}, {teachers: [a, b], mixture: lowest_loss},
    {teachers: {a: 1, b: 2}, score: entropy, score_alpha: 4}]""",
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
        ("teacher.shard_weights=true", "teacher.offload=true", TWO_REPLICAS),
    ),
    "GPT-like": ("gpt", 0, 1, ()),
    "Gemma-like": ("dense", 0, 1, GEMMA),
    "dropout": ("dense", 0, 1, ("student.architecture.hidden_dropout=0.1",)),
    "five terms TP2": ("dense", 1, 2, (TERMS, TENSOR)),
    "phases of all ranks": (
        "dense",
        1,
        2,
        ("logging.timers_interval=1", "logging.straggler_interval=2", TWO_REPLICAS),
    ),
    "states": ("dense", 1, 2, (STATES, LINEAR, TENSOR, SEQUENCE)),
    "states, first stage": ("dense", 0, 2, (STATES, LINEAR, PIPELINE)),
    "states, first stage, on the host": (
        "dense",
        0,
        2,
        (STATES, LINEAR, PIPELINE, "teacher.offload_hidden=true"),
    ),
    "maps of a layout of its own, on the host": (
        "dense",
        1,
        2,
        (MAPS, PIPELINE, "teacher.offload_hidden=true", "teacher.parallel={pipeline: 1}"),
    ),
    "maps CP2": ("dense", 1, 2, (MAPS, CONTEXT)),
}
# One copy of the losses and the norm, after the update was launched.
STEP_WAITS = {"step.py:train_step": STEPS}
# With the end of a step: the vote has waited for the events of the timers.
LOOP_WAITS = {
    **STEP_WAITS,
    "collectives.py:highest": STEPS,
    "phase_timers.py:wait": STEPS,
}

# The means over two intervals of a step and over one of two, and the names of the hosts.
REPORT_WAITS = {"phase_report.py:_gather": STEPS + 1, "phase_report.py:_after_stragglers": 1}

PREVIOUS = "objective.balance.raw_losses=previous"
ON_HOST = "teacher.offload_hidden=true"
BALANCED: dict[str, Sequence[str]] = {
    "magnitude": (MAPS, TERMS),
    # The first step is measured as well as remembered.
    "magnitude, previous": (PREVIOUS,),
    "magnitude, clamped mean": ("objective.balance.ema=0.7", "objective.balance.clamp=4"),
    "gradient_norm": (STATES, LINEAR),
    # The student runs twice, and the teacher once, before it.
    "magnitude, states on the host": (ON_HOST,),
    "magnitude, maps on the host": (MAPS, ON_HOST),
    "magnitude, per micro-batch": ("objective.balance.per_microbatch=true", STATES, LINEAR),
    "schedule": ("objective.terms.0.temperature_schedule={to: 3.0, steps: 10}",),
}


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDevice]:
    """The fake device, compiled and started once."""
    folder = tmp_path_factory.mktemp("fake_cuda")
    found = FakeDevice.start(compile_stub(folder), folder)
    yield found
    found.end()


def train(
    device: FakeDevice,
    inputs: Inputs,
    output: Path,
    name: str,
    rank: int,
    world: int,
    *overrides: str,
) -> dict[str, Any]:
    """Train as one rank on the fake device; returns what was seen."""
    config = inputs.folder / f"{name}.yaml"
    words = (f"output={output}", *SHORT, *overrides)
    found = seen_of(device, "train", rank, world, config, *words)
    assert found["is_done"]
    return found


def seen_of(
    device: FakeDevice, program: str, rank: int, world: int, subject: str | Path, *overrides: str
) -> dict[str, Any]:
    """Run a program of `tests.fake_cuda`; returns what was seen."""
    return device.run(program, rank, world, str(subject), *overrides, seconds=SECONDS)


@pytest.mark.parametrize("case", CASES)
def test_a_step_stays_on_its_device_and_waits_no_more(
    device: FakeDevice, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, rank, world, overrides = CASES[case]
    seen = train(device, inputs, tmp_path, name, rank, world, *overrides)
    assert seen["waits"] == (LOOP_WAITS | REPORT_WAITS if "phases" in case else LOOP_WAITS)
    assert seen["from_host"] == seen["refused"] == {}
    assert seen["copies"] == seen["unpinned"] == {}
    # The flash kernel in 16 bits; soft caps in blocks of documents.
    expected = {"blocked"}
    if "bf16" in case:
        expected = {"varlen", "flex"} if "Gemma" in case else {"varlen"}
    assert set(seen["attention"]) == expected
    is_last_stage = "first stage" not in case
    assert (seen["kernels"] != {}) == is_last_stage
    assert (seen["to_host"] > 0) == ("on the host" in case)


# Transformer Engine's modules and kernels are stand-ins; heads are of eight numbers.
EIGHT = "teacher.architecture.num_attention_heads=5"
FP8 = (
    "train.fp8=hybrid", "teacher.fp8=e4m3", "teacher.architecture.hidden_size=64",
    "teacher.architecture.num_attention_heads=8",
)  # fmt: skip
OVERLAP = (TENSOR, SEQUENCE, "runtime.tp_comm_overlap=true")
_EXCHANGE = "token_dispatcher.py:_maybe_dtoh_and_synchronize"
# Its Adam cannot leave out an update that the device decides on: the host does.
ADAM_WAITS = {"optimizer.py:step_unless": STEPS}
# Configuration, world, overrides, what layers wait for, and the kernels of it alone.
FUSED: dict[str, tuple[str, int, Sequence[str], Sequence[str], set[str]]] = {
    "documents": ("dense", 1, (EIGHT,), (), set()),
    "windows, recomputed": (
        "dense",
        1,
        (EIGHT, "student.architecture.sliding_window=6", "train.recompute=full"),
        (),
        set(),
    ),
    "FP8": ("dense", 1, FP8, (), {"fp8"}),
    # Those of one rank are torch's, whose grouped product reads the rows of each on the device.
    "experts": ("moe", 1, (EIGHT,), (), set()),
    "experts of two ranks": (
        "moe",
        2,
        (EIGHT, "parallel.expert=2"),
        (_EXCHANGE,),
        {"grouped", "order"},
    ),
    # Its attention is torch's: that of the engine is in the other cases.
    "overlapped messages": (
        "dense",
        2,
        (
            "teacher.architecture.num_attention_heads=4",
            "teacher.architecture.head_size=8",
            *OVERLAP,
        ),
        (),
        {f"{name}_{part}" for name in ("qkv", "proj", "fc1", "fc2") for part in ("fprop", "dgrad")},
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_paths_wait_no_more(
    device: FakeDevice, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, world, overrides, waits, own = FUSED[case]
    config = inputs.folder / f"{name}.yaml"
    words = (f"output={tmp_path}", *SHORT, "train.precision=bf16", "train.micro_batch_size=1")
    seen = seen_of(device, "fused", world - 1, world, config, *words, *overrides)
    assert seen["is_done"]
    layers = STEPS * 2 * MICRO_BATCHES // world * 4  # of a micro-batch of one sample each
    assert seen["waits"] == LOOP_WAITS | ADAM_WAITS | dict.fromkeys(waits, layers)
    assert seen["from_host"] == seen["refused"] == seen["copies"] == seen["unpinned"] == {}
    calls = seen["attention"]
    if "messages" in case:
        assert set(calls) == {"varlen", "rope", "gradient", *own}
    else:
        assert set(calls) == {"thd", "rope", "gradient", *own}
        assert calls["rope"] == 2 * calls["thd"]  # queries and keys


@pytest.mark.parametrize("case", BALANCED)
def test_a_balanced_step_waits_no_more(
    device: FakeDevice, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    mode = f"objective.balance.mode={case.split(',')[0]}"
    seen = train(device, inputs, tmp_path, "dense", 0, 1, mode, *BALANCED[case])
    assert seen["waits"] == LOOP_WAITS
    assert seen["from_host"] == seen["refused"] == seen["copies"] == seen["unpinned"] == {}
    tensors = 3 if "maps" in case else 1  # queries and keys too
    assert seen["to_host"] == ("on the host" in case) * STEPS * MICRO_BATCHES * tensors


@pytest.mark.parametrize("mode", ["top_k", "sampled"])
def test_a_stored_teacher_is_asked_once_whether_it_failed(
    pool: Pool, device: FakeDevice, inputs: Inputs, tmp_path: Path, mode: str
) -> None:
    config, store = write_capture(inputs, "fake", samples=8), tmp_path / "store"
    kept = () if mode == "top_k" else ("store.mode=sampled", "store.temperatures=[]")
    assert run_in(pool, 1, config, store, *kept) is True
    stored = (f"teacher.store={store}", "teacher.architecture=null")
    seen = train(device, inputs, tmp_path / "run", "dense", 0, 1, *stored)
    assert seen["waits"] == {**LOOP_WAITS, "collectives.py:highest": 2 * STEPS}
    assert seen["copies"] == seen["unpinned"] == {}
    assert seen["from_host"] == {}


OF_TOP_K = (
    "objective.terms=[{top_k: 8}, {top_k: 4, support: renormalized, temperature: 2.0}]",
    "teacher.transfer={what: top_k, k: 8}", "teacher.parallel={tensor: 2}", TWO_REPLICAS,
)  # fmt: skip
# Configuration, rank, world, overrides, and what a step waits for besides.
FURTHER: dict[str, tuple[str, int, int, Sequence[str], dict[str, int]]] = {
    # Terms of a teacher with a tokenizer of its own.
    "tokens": ("aligned", 0, 1, (), {}),
    "tokens, balanced": ("aligned", 0, 1, ("objective.balance.mode=magnitude",), {}),
    "tokens, second stage": ("aligned", 1, 2, (PIPELINE,), {}),
    "tokens, second context rank": ("aligned", 1, 2, (CONTEXT,), {}),
    "means": ("aligned", 0, 1, (MEANS_TERMS,), {}),
    "tokens TP2": ("aligned", 0, 2, (TENSOR,), {}),
    "means, second tensor rank": ("aligned", 1, 2, (MEANS_TERMS, TENSOR, SEQUENCE), {}),
    # Both tensor ranks of the teacher have all of it, and two replicas of the student take it.
    "top-k of another layout": ("dense", 1, 2, OF_TOP_K, {}),
    # In each layer, for the sizes of their exchange.
    "experts of two ranks": (
        "moe", 1, 2, (*BF16, "parallel.expert=2", TWO_REPLICAS),
        {_EXCHANGE: STEPS * MICRO_BATCHES * 4},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FURTHER)
def test_tokenizers_layouts_and_experts_wait_for_these_and_no_more(
    device: FakeDevice, inputs: Inputs, tmp_path: Path, case: str
) -> None:
    name, rank, world, overrides, waits = FURTHER[case]
    seen = train(device, inputs, tmp_path, name, rank, world, *overrides)
    assert seen["waits"] == {**LOOP_WAITS, **waits}
    assert seen["from_host"] == seen["refused"] == seen["copies"] == seen["unpinned"] == {}


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_sent_top_k_becomes_a_signal_without_a_wait(device: FakeDevice, place: str) -> None:
    seen = seen_of(device, "sent_topk", 0, 1, place)
    assert seen["places"] == ["cuda:0"]
    assert seen["waits"] == seen["copies"] == seen["unpinned"] == {}


@pytest.mark.parametrize("kept", [(), ("capture.chunk_tokens=16",)], ids=["whole", "chunks"])
def test_a_capture_waits_once_per_step(
    device: FakeDevice, inputs: Inputs, tmp_path: Path, kept: tuple[str, ...]
) -> None:
    config = write_capture(inputs, "fake-capture", samples=8)
    seen = seen_of(device, "capture", 0, 1, config, f"store.path={tmp_path / 'store'}", *kept)
    (steps,) = seen["steps"]
    assert seen["records"] == 2 * steps  # of each micro-batch, for the thread that writes
    assert seen["waits"] == {"loop.py:_exchange": steps + 1}
    assert seen["from_host"] == seen["refused"] == seen["copies"] == seen["unpinned"] == {}


EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}
# Rank, world, layout, changes of the architecture, and samplings.
WRITERS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], Sequence[str]]] = {
    "one rank": (0, 1, {}, {}, ("greedy", "whole", "cut")),
    "windows": (0, 1, {}, {"sliding_window": 7, "sliding_layers": (0, 2)}, ("greedy",)),
    "soft caps": (0, 1, {}, {"attention_softcap": 1.5, "logit_softcap": 3.0}, ("greedy",)),
    "TP2": (1, 2, {"tensor": 2}, {}, ("greedy", "whole", "cut")),
    "first stage": (0, 2, {"pipeline": 2}, {}, ("cut",)),
    "last stage, virtual": (1, 2, {"pipeline": 2, "virtual_pipeline": 2}, {}, ("cut",)),
    "experts": (0, 1, {}, EXPERTS, ("greedy",)),
}


@pytest.mark.parametrize("case", WRITERS)
def test_a_model_that_writes_waits_for_tokens_drawn_a_step_ago(
    device: FakeDevice, case: str
) -> None:
    rank, world, layout, changes, samplings = WRITERS[case]
    words = (json.dumps(layout), json.dumps(changes), *samplings)
    seen = seen_of(device, "generate", rank, world, *words)
    groups = layout.get("pipeline", 1)
    for name, found in seen["requests"].items():
        assert found["from_host"] == found["copies"] == found["unpinned"] == {}, name
    for name in samplings:
        found = seen["requests"][f"write {name}"]
        assert found["lengths"] == [24, 12, 9, 20]
        # After steps 1 and 17, and where the longest row has its last id; a group of short rows
        # ends in step 11.
        looks = 3 if groups == 1 else found["waits"]["flight.py:finish_look"]
        assert found["waits"] == {"flight.py:finish_look": looks}, name
        assert looks <= 3 * groups
    asked = seen["requests"]["write until asked to stop"]["waits"]
    assert asked.keys() == {"flight.py:finish_look", "pace.py:finish"}
    assert asked["pace.py:finish"] == 3  # in steps 1 and 17, and at the end
    for name in ("score", "score after"):
        assert seen["requests"][name]["waits"] == {"scoring.py:shared_scores": 1}
    if "score by passes" in seen["requests"]:
        passes = seen["requests"]["score by passes"]["waits"]
        assert passes.keys() == {"collectives.py:highest", "pass_scoring.py:_shared"}
        assert passes["pass_scoring.py:_shared"] == 1


def test_experts_of_two_ranks_wait_for_their_rows_in_each_layer(device: FakeDevice) -> None:
    words = (json.dumps({"expert": 2}), json.dumps(EXPERTS), "greedy", "cut")
    seen = seen_of(device, "generate", 0, 2, *words)
    assert seen["from_host"] == seen["refused"] == seen["copies"] == seen["unpinned"] == {}
    of_experts, looks = "experts.py:_routed", {"flight.py:finish_look", "collectives.py:highest"}
    for name in ("greedy", "cut"):
        found = seen["requests"][f"write {name}"]
        assert found["lengths"] == [24, 9]  # of this rank's rows
        assert found["waits"].keys() == {of_experts, *looks}, name
        steps, rest = divmod(found["waits"][of_experts], 4)  # layers
        assert rest == 0
        assert 24 <= steps <= 41  # the end is read up to 17 steps late
        assert sum(found["waits"][look] for look in looks) <= 3 * steps / 16 + 3
    assert seen["requests"]["score"]["waits"].keys() == {of_experts, "scoring.py:shared_scores"}


# Of `benchmarks/gpu.py`: words of its workers, and what they wait for.
WORKERS: dict[str, tuple[Sequence[str], set[str]]] = {
    "steps.worker": (
        ("--case", "--subject=ours", "--warmup=1", "--steps=1"),
        {*STEP_WAITS, "phase_timers.py:wait"},
    ),
    "workers.capture": (("--case", "--repeats=1"), set()),
    "objectives.worker": (
        ("--tokens=64", "--vocab=499", "--precision=bf16", "--tensor=1", "--repeats=1"),
        {"workspace.py:of_weights"},
    ),
}


@pytest.mark.parametrize("worker", WORKERS)
def test_a_worker_of_the_benchmark_runs_on_a_device(
    device: FakeDevice, tmp_path: Path, worker: str
) -> None:
    words, waits = WORKERS[worker]
    case, result = tmp_path / "case.json", tmp_path / "result.json"
    small = Case(gpu.SMALL.workload, Ranks("TP1", 1), "bf16", chunk_tokens=32)
    case.write_text(json.dumps(small.as_dict()))
    given = [f"{word}={case}" if word == "--case" else word for word in words]
    seen = seen_of(device, "benchmark", 0, 1, worker, *given, f"--result={result}")
    assert seen["waits"].keys() == waits
    assert seen["from_host"] == seen["refused"] == seen["unpinned"] == {}
    assert seen["kernels"]["measure_rows"] > 0
    measured = json.loads(result.read_text())
    if worker == "objectives.worker":
        ours = [row for row in measured if row["subject"].startswith("ours")]
        assert len(ours) > 20
        assert all(math.isfinite(row["seconds"]) for row in ours), ours
