"""The lines that a run and a capture begin with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_distill.config import (
    RunConfig,
    load_capture_config,
    load_config,
    run_heading,
    run_rows,
    sources_in_words,
    step_sizes,
)
from megatron_distill.data.tokenizers.open import Vocabulary
from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.groups import Layout
from megatron_distill.runtime.launch import PRECISIONS
from megatron_distill.store import CaptureSettings, Identity, Plan
from megatron_distill.train.assemble.capture import capture_banner
from megatron_distill.train.assemble.models import read_model
from megatron_distill.train.reports.banner import run_banner, steps_row
from megatron_distill.train.throughput import MemoryOfRank, RankParameters, chunk_logits

CONFIGS = Path(__file__).parents[4] / "configs"
CPU = torch.device("cpu")
WORDS = Vocabulary(1000, "of a test")


def shapes(config: RunConfig) -> tuple[Architecture, Architecture | None]:
    student = read_model(config, "student", WORDS).architecture
    if config.teacher is None or config.teacher.store is not None:
        return student, None
    return student, read_model(config, "teacher", WORDS).architecture


def memory_of(config: RunConfig, own: RankParameters, world_size: int) -> MemoryOfRank:
    parallel = config.parallel
    tokens = config.train.micro_batch_size * config.data.sequence_length // parallel.context
    student, _ = shapes(config)
    return MemoryOfRank.of_run(
        own,
        dtype=PRECISIONS[config.train.precision],
        logits=chunk_logits(
            config.objective.chunk_tokens, tokens, student, tensor=parallel.tensor, device=CPU
        ),
        layout=Layout(**parallel.model_dump(exclude={"layers_per_stage"})),
        world_size=world_size,
        is_distributed=config.optimizer.distributed,
    )


def banner(name: str, *overrides: str, world_size: int = 1, pairs: int = 0, start: int = 0) -> str:
    config = load_config(CONFIGS / name, overrides)
    student, teacher = shapes(config)
    own = RankParameters(1_000_000, 0, 2_000_000 if teacher else 0)
    models = {"student": student} | ({"teacher": teacher} if teacher else {})
    layers = {role: shape.num_layers for role, shape in models.items()}
    rows = run_rows(config, world_size=world_size, feature_pairs=pairs)
    return run_banner(
        run_heading(config),
        models,
        sources_in_words(config.models, layers, stored_samples={"teacher": 2000}),
        [*rows, steps_row(**step_sizes(config), start_step=start)],
        memory_of(config, own, world_size),
        stages=config.parallel.pipeline,
    )


def test_tiny_is_described_in_aligned_lines() -> None:
    assert banner("tiny.yaml").splitlines() == [
        "distillation into runs/tiny",
        "  student    4 layers, hidden 64, ffn 160; 301k parameters; random weights",
        "  teacher    4 layers, hidden 96, ffn 256; 598k parameters; random weights",
        "  layout     1 rank; fp32",
        "  objective    1 x cross-entropy",
        "             + 1 x forward_kl, temperature 1, whole vocabulary",
        "  balance    fixed, alpha 1",
        "  data       python_stdlib 100.0%; 128 tokens a sample; 8 samples held out",
        "  steps      20; 8 samples = 1024 tokens each, 20.5k in all; micro-batch 1",
        "  memory     25 MB of a rank, without the layers' activations:",
        "             weights 4 MB, gradients 4 MB, optimizer 8 MB, teacher 8 MB, "
        "loss chunk 1.05 MB",
    ]


@pytest.mark.parametrize(
    ("overrides", "world", "optimizer", "gradients"),
    [
        ((), 1, 8_000_000, 4_000_000),
        (("train.precision=bf16",), 1, 12_000_000, 4_000_000),
        (("optimizer.distributed=true",), 4, 2_000_000, 4_000_000),
        (("optimizer.distributed=true", "parallel.tensor=2"), 4, 4_000_000, 4_000_000),
    ],
)
def test_memory_follows_precision_and_layout(
    overrides: tuple[str, ...], world: int, optimizer: int, gradients: int
) -> None:
    config = load_config(CONFIGS / "tiny.yaml", overrides)
    memory = memory_of(config, RankParameters(1_000_000), world)
    assert (memory.optimizer, memory.gradients) == (optimizer, gradients)


def test_experts_share_their_state_with_fewer_ranks() -> None:
    config = load_config(
        CONFIGS / "tiny_moe.yaml", ("optimizer.distributed=true", "parallel.expert=2")
    )
    memory = memory_of(config, RankParameters(student=1_000_000, experts=400_000), 4)
    assert memory.optimizer == 8 * (600_000 // 4 + 400_000 // 2)


def test_a_capture_names_the_stored_values() -> None:
    config = load_capture_config(CONFIGS / "cache.yaml", ("store.jobs=2", "parallel.tensor=2"))
    student, _ = shapes(load_config(CONFIGS / "tiny.yaml"))
    settings = CaptureSettings(
        k=64, vocab_size=1000, sequence_length=128, mode="top_k", codec="u8", top_p=None,
        temperatures=(), sampling_seed=None,
    )  # fmt: skip
    identity = Identity(teacher="t", tokenizer="w", dataset="d", settings={})
    text = capture_banner(
        config,
        student,
        Plan(settings, identity, 2000, 125),
        memory=MemoryOfRank.of_capture(
            RankParameters(teacher=150_000),
            dtype=torch.float32,
            logits=chunk_logits(
                config.capture.chunk_tokens,
                config.capture.micro_batch_size * config.data.sequence_length,
                student,
                tensor=config.parallel.tensor,
                device=CPU,
            ),
        ),
        world_size=4,
    )
    assert text.splitlines() == [
        "capture into stores/quickstart",
        "  teacher    4 layers, hidden 64, ffn 160; 301k parameters; runs/quickstart/teacher",
        "  layout     4 ranks = tensor 2 x data 2; fp32",
        "  data       python_stdlib 100.0%; 128 tokens a sample",
        "  store      top-64 u8; 2,000 samples = 256k tokens, 16 shards, job 0 of 2",
        "  memory     1.65 MB of a rank, without the layers' activations:",
        "             teacher 600 kB, loss chunk 1.05 MB",
    ]
