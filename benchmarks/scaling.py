"""Arithmetic of a large run, not a measurement: memory, time and exposed communication per GPU.

    python benchmarks/scaling.py            # writes benchmarks/results/scaling.md
    python benchmarks/scaling.py --measure  # also rates of this machine: results/scaling_start.json

A 70B teacher and an 8B student on H100s. docs/internals/scaling.md explains the terms.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness.environment import describe
from benchmarks.workers.start import created_groups, drawn_weights, store_requests

RESULT = Path(__file__).parent / "results" / "scaling.md"
RATES = RESULT.with_name("scaling_start.json")

# One H100 SXM: peak and sustained rates in FLOP/s and bytes/s.
PEAK = 989e12
PRODUCTS = 600e12
FLASH_FORWARD, FLASH_BACKWARD = 450e12, 350e12
FP8_SPEEDUP = 1.65  # of products, with the conversion of their operands
MEMORY = 3.35e12
NVLINK = 370e9  # bus rate of an all-gather inside a node
NETWORK = 45e9  # of one GPU between nodes
# Backward of flash attention recomputes the scores: five products where forward has two.
FLASH_BACKWARD_FACTOR = 2.5
GB = 1e9

# Of a start, and of the work beside the steps: bytes/s.
SHARED_DISK = 20e9
HOST_COPY = 25e9  # from a GPU to page-locked memory
GLOO = 3e9  # of one connection
PAGE_CACHE = 0.91e9  # a rank that reads Hugging Face files, results/convert.md
TOKENISED, LOADED = 508_820, 5_231_102  # tokens/s of one core, results/data.md
BATCH_BYTES = 8  # of a token in the broadcast
SAVED_BYTES = 14  # of a parameter in bf16 training
WATCH_SECONDS = 5.0  # runtime/lone_failure.py
# At the store: of one look for a failed rank, and with teachers on ranks of their own.
LOOK_REQUESTS, LOOK_REQUESTS_OF_ROLES = 1, 5
BARRIER_REQUESTS = 3  # of a rank at a new group, with TORCH_DIST_INIT_BARRIER=1


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int = 128_256

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's products."""
        qkv = self.hidden * self.hidden * (1 + 2 * self.kv_heads / self.heads)
        return int(qkv + self.hidden**2 + 3 * self.hidden * self.ffn)

    @property
    def parameters(self) -> int:
        """All weights, embedding and untied head included."""
        return self.layers * self.layer_parameters + 2 * self.vocab * self.hidden

    def product_flops(self) -> float:
        """Forward FLOPs of one token in products, the head included."""
        return 2.0 * (self.layers * self.layer_parameters + self.vocab * self.hidden)

    def attention_flops(self, length: int) -> float:
        """Forward FLOPs of one token in causal attention over documents of ``length`` tokens."""
        return 2.0 * length * self.hidden * self.layers

    def activation_bytes(self) -> float:
        """Bytes per token and layer that backward needs, bf16, without recomputation."""
        ratio = self.kv_heads / self.heads
        return 2.0 * self.hidden * (5 + (1 + 2 * ratio) + (1 + ratio)) + 6.0 * self.ffn


@dataclass(frozen=True)
class Run:
    """A run's layout and batch."""

    gpus: int
    tensor: int
    pipeline: int
    length: int
    document: int  # tokens of a document, at most the length
    sequences: int  # global batch
    overlap: bool = False  # runtime.tp_comm_overlap
    fp8_teacher: bool = False  # teacher.fp8

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one sequence on each rank."""
        return self.sequences // self.data


TEACHER = Shape(80, 8192, 28_672, 64, 8)
STUDENT = Shape(32, 4096, 14_336, 32, 8)
RUNS = (
    Run(64, 8, 1, 8192, 8192, 1024),
    Run(256, 8, 1, 8192, 8192, 1024),
    Run(1024, 8, 1, 8192, 8192, 1024),
    Run(1024, 8, 4, 8192, 8192, 1024),
    Run(64, 8, 1, 32_768, 32_768, 256),
    Run(64, 8, 1, 32_768, 2048, 256),
    Run(64, 8, 1, 8192, 8192, 1024, overlap=True),
    Run(64, 8, 1, 8192, 8192, 1024, fp8_teacher=True),
    Run(64, 8, 1, 8192, 8192, 1024, overlap=True, fp8_teacher=True),
    Run(1024, 8, 8, 8192, 8192, 1024),
)
STARTS = RUNS[:3]
USER_BUFFERS = 12  # of each model, with the overlap


def micro_batch_seconds(run: Run) -> dict[str, float]:
    """Seconds of one micro-batch on all stages of a replica, by part, as if PP were one."""
    tokens, split = run.length, run.tensor
    attention = {model: model.attention_flops(run.document) for model in (TEACHER, STUDENT)}
    student_attention = attention[STUDENT] * (
        1 / FLASH_FORWARD + FLASH_BACKWARD_FACTOR / FLASH_BACKWARD
    )
    message = {model: tokens * model.hidden * 2 * (split - 1) / split for model in attention}
    # Per layer: two gathers and two scatters forward; the same and two gathers again backward.
    teacher_messages, student_messages = 4 * TEACHER.layers, 10 * STUDENT.layers
    if run.overlap:
        # All of the student's behind products; of the teacher's, without gradients, the scatters.
        teacher_messages, student_messages = 2 * TEACHER.layers, 0
    # Transformer Engine's layers are in FP8, the head is not.
    teacher_layers = 2.0 * TEACHER.layers * TEACHER.layer_parameters
    saved = teacher_layers * (1 - 1 / FP8_SPEEDUP) if run.fp8_teacher else 0.0
    return {
        "teacher products": tokens * (TEACHER.product_flops() - saved) / split / PRODUCTS,
        "teacher attention": tokens * attention[TEACHER] / split / FLASH_FORWARD,
        "student products": 3 * tokens * STUDENT.product_flops() / split / PRODUCTS,
        "student attention": tokens * student_attention / split,
        "TP messages": (message[TEACHER] * teacher_messages + message[STUDENT] * student_messages)
        / NVLINK,
        # Logits of both models are read and written a few times in bf16.
        "losses": tokens * TEACHER.vocab / split * 10 / MEMORY,
        "norms, RoPE, activations": tokens
        * (TEACHER.layers * TEACHER.hidden + 3 * STUDENT.layers * STUDENT.hidden)
        * 24
        / split
        / MEMORY,
    }


def step_seconds(run: Run) -> dict[str, float]:
    """Seconds of a step, by part."""
    each = sum(micro_batch_seconds(run).values()) / run.pipeline
    weights = STUDENT.parameters / run.tensor / run.pipeline
    return {
        "compute": each * run.micro_batches,
        "bubble": each * (run.pipeline - 1),
        # Both are hidden but for one bucket: behind backward, and behind the teacher's next pass.
        "gradients and weights": 2 * max(40e6, 1e6 * run.data) * 6 / NETWORK,
        "optimizer": weights / run.data * 16 / MEMORY + 0.02,
    }


def memory_bytes(run: Run) -> dict[str, float]:
    """Bytes of one GPU, by part; the largest stage."""
    stage = run.tensor * run.pipeline
    in_flight = min(run.pipeline, run.micro_batches)
    activations = STUDENT.activation_bytes() * STUDENT.layers / run.pipeline * in_flight
    hidden = run.length * TEACHER.hidden * 2 / run.tensor
    return {
        # FP8 copies of the layers' weights are held beside those in bf16.
        "teacher": (
            TEACHER.parameters * 2 + run.fp8_teacher * TEACHER.layers * TEACHER.layer_parameters
        )
        / stage,
        "student, gradients": STUDENT.parameters * 6 / stage,
        "optimizer": STUDENT.parameters * 12 / stage / run.data,
        "activations": activations * run.length / run.tensor,
        # One micro-batch inside the student's forward step; all of them with stages.
        "teacher's hidden states": hidden * (1 if run.pipeline == 1 else run.micro_batches),
        "logits of a chunk": 2 * 2**28 * 2,
        "user buffers": run.overlap
        * (USER_BUFFERS * run.length * (TEACHER.hidden + STUDENT.hidden) * 2),
    }


def utilisation(run: Run) -> float:
    """Model FLOPs per second over the peak, the teacher's forward pass included."""
    per_token = TEACHER.product_flops() + TEACHER.attention_flops(run.document)
    per_token += 3 * (STUDENT.product_flops() + STUDENT.attention_flops(run.document))
    tokens = run.sequences * run.length
    return tokens * per_token / (sum(step_seconds(run).values()) * run.gpus * PEAK)


def _named(run: Run) -> str:
    layout = f"{run.gpus} GPUs, TP{run.tensor} PP{run.pipeline} DP{run.data}"
    documents = "" if run.document == run.length else f", documents of {run.document:,}"
    overlap = ", tp_comm_overlap" if run.overlap else ""
    fp8 = ", teacher.fp8" if run.fp8_teacher else ""
    return f"{layout}, {run.length:,}{documents}{overlap}{fp8}"


def start_figures(run: Run, rates: dict[str, Any]) -> dict[str, str]:
    """Figures of a start and of the work beside the steps, by name."""
    ranks, stage = run.gpus, run.tensor * run.pipeline
    (groups,) = [one for one in rates["groups"] if one["ranks"] == ranks]
    capacity = rates["store"]["requests per second"]
    barriers = BARRIER_REQUESTS * ranks * groups["groups"]
    plain, of_roles = (
        count * ranks / WATCH_SECONDS for count in (LOOK_REQUESTS, LOOK_REQUESTS_OF_ROLES)
    )
    teacher = TEACHER.parameters * 2 / stage
    tokens = run.sequences * run.length
    speed = tokens / sum(step_seconds(run).values())
    batch, depth = BATCH_BYTES * tokens, math.ceil(math.log2(ranks))
    drawn = STUDENT.parameters / stage / rates["weights per second"]
    saved = SAVED_BYTES * STUDENT.parameters / ranks
    return {
        "process groups, those of one rank": f"{groups['groups']:,}, {groups['of a rank']}",
        "rendezvous store: requests/s of 200 clients, measured": f"{capacity:,.0f}",
        "rendezvous store: requests of a barrier per group; time (s)": f"{barriers / 1e6:.2f} M; "
        f"{barriers / capacity:.0f}",
        "gloo: pairs of ranks; connections of a broadcast": f"{ranks * (ranks - 1) // 2:,}; "
        f"{ranks - 1:,}",
        "teacher's files: GB of a rank; of all ranks": f"{teacher / GB:.1f}; "
        f"{teacher * ranks / GB:,.0f}",
        "teacher's files: from the page cache; a shared disk (s)": f"{teacher / PAGE_CACHE:.0f}; "
        f"{teacher * ranks / SHARED_DISK:.0f}",
        "random weights of the student (s)": f"{drawn:.0f}",
        "tokens/s; cores that tokenise; that load tokens": f"{speed:,.0f}; "
        f"{speed / TOKENISED:.2f}; {speed / LOADED:.2f}",
        "batch: MB; broadcast beside a step (s)": f"{batch / 1e6:.0f}; {batch * depth / GLOO:.2f}",
        "checkpoint: GB of a rank; a step waits (ms); written after (s)": f"{saved / GB:.2f}; "
        f"{1e3 * saved / HOST_COPY:.0f}; {saved * ranks / SHARED_DISK:.1f}",
        "failure watch: requests/s; of the store": f"{plain:,.0f}; {plain / capacity:.1%}",
        "failure watch with teachers on own ranks: requests/s; of the store": f"{of_roles:,.0f}; "
        f"{of_roles / capacity:.1%}",
    }


def starts() -> list[tuple[str, dict[str, str]]]:
    """The rows of the table of starts, with a column for each number of GPUs."""
    rates = json.loads(RATES.read_text(encoding="utf-8"))
    columns = {f"{run.gpus:,} GPUs": start_figures(run, rates) for run in STARTS}
    names = next(iter(columns.values()))
    return [(name, {gpus: found[name] for gpus, found in columns.items()}) for name in names]


def _table(title: str, rows: list[tuple[str, dict[str, str]]], first: str = "run") -> list[str]:
    names = list(rows[0][1])
    lines = [f"## {title}", "", f"| {first} | {' | '.join(names)} |"]
    lines.append("|---|" + "---:|" * len(names))
    lines += [f"| {name} | {' | '.join(cells.values())} |" for name, cells in rows]
    return [*lines, ""]


def report() -> str:
    """The four tables."""
    micro, steps, memory = [], [], []
    for run in RUNS:
        name = _named(run)
        parts = micro_batch_seconds(run)
        cells = {key: f"{value * 1e3:.0f}" for key, value in parts.items()}
        micro.append((name, {**cells, "sum": f"{sum(parts.values()) * 1e3:.0f}"}))
        times = step_seconds(run)
        total = sum(times.values())
        rate = run.sequences * run.length / total
        steps.append(
            (
                name,
                {
                    **{key: f"{value:.2f}" for key, value in times.items()},
                    "step": f"{total:.2f}",
                    "tokens/s": f"{rate:,.0f}",
                    "exposed messages": f"{parts['TP messages'] / sum(parts.values()):.0%}",
                    "MFU": f"{utilisation(run):.0%}",
                },
            )
        )
        held = memory_bytes(run)
        figures = {key: f"{value / GB:.1f}" for key, value in held.items()}
        memory.append((name, {**figures, "sum": f"{sum(held.values()) / GB:.1f}"}))
    heading = ["# Arithmetic of large runs", "", __doc__.splitlines()[0], ""]
    return "\n".join(
        [
            *heading,
            *_table("One micro-batch of one sequence on a TP group (ms)", micro),
            *_table("One step (s)", steps),
            *_table("Memory of a GPU (GB)", memory),
            *_table("A start, and work beside the steps (TP8 PP1)", starts(), "what"),
        ]
    )


def measured() -> dict[str, Any]:
    """Measure the rates of this machine, each in a process of its own."""
    environment = describe("benchmarks/scaling.py", sys.argv[1:])
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        groups = [
            pool.apply(partial(created_groups, ranks=run.gpus, tensor=run.tensor, pipeline=1))
            for run in STARTS
        ]
        weights = pool.apply(drawn_weights)
    store = store_requests(clients=200, processes=2)
    return {
        "environment": environment, "groups": groups, "weights per second": weights, "store": store,
    }  # fmt: skip


if __name__ == "__main__":
    if "--measure" in sys.argv[1:]:
        RATES.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    RESULT.write_text(report(), encoding="utf-8")
