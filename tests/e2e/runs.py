"""Small whole runs: one configuration on disk, trained in the pool's workers or under torchrun."""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch

from megatron_distill import log
from megatron_distill.config import RunConfig, check_layout, load_config, teacher_ranks
from megatron_distill.errors import MegatronDistillError
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.runtime.termination import TerminationRequest
from tests.distributed.pool import Pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark import ParameterSet

    from megatron_distill.train.loop import LoopInputs

STEPS = 20
SECONDS = 300.0  # of one run; only a hang takes that long

SAVE = "checkpoint.save=true"
TENSOR, FOUR = "parallel.tensor=2", "parallel.tensor=4"
SEQUENCE = "parallel.sequence=true"
PIPELINE, VIRTUAL = "parallel.pipeline=2", "parallel.virtual_pipeline=2"
CONTEXT = "parallel.context=2"
EXPERT = "parallel.expert=2"
QUANTITIES = ("ce_loss", "kd_loss", "grad_norm")

Course = list[dict[str, Any]]


def layout(name: str) -> tuple[int, tuple[str, ...]]:
    """Ranks and overrides of a layout such as "TP2xPP2+virtual"; behind a comma is a remark.

    DP2 sets nothing: ranks beyond the sizes that are set replicate the model.
    """
    sizes, *more = name.partition(",")[0].split("+")
    if sizes in ("1", "one rank"):
        return 1, ()
    keys = {"TP": "tensor", "PP": "pipeline", "CP": "context", "EP": "expert"}
    parts = [(part[:2], int(part[2:])) for part in sizes.split("x")]
    changes = [f"parallel.{keys[kind]}={size}" for kind, size in parts if kind != "DP"]
    flags = {"sequence": SEQUENCE, "virtual": VIRTUAL}
    return math.prod(size for _, size in parts), (*changes, *(flags[one] for one in more))


STUDENT = """\
student:
  architecture:
    num_layers: 4
    hidden_size: 32
    ffn_hidden_size: 48
    num_attention_heads: 4
    num_kv_heads: 2
    norm: rmsnorm
    activation: swiglu
    positions: rope
    init_std: 0.1
"""
GPT_LIKE = """\
student:
  architecture:
    num_layers: 4
    hidden_size: 32
    ffn_hidden_size: 64
    num_attention_heads: 4
    norm: layernorm
    activation: gelu
    positions: learned
    qkv_bias: true
    linear_bias: true
    init_std: 0.1
"""
MOE = (
    STUDENT
    + """\
    moe:
      num_experts: 4
      top_k: 2
      ffn_hidden_size: 24
"""
)
# A dense first layer, a shared expert, sigmoid scores with groups and a bias that moves.
MIXTURE = (
    MOE
    + """\
      dense_layers: [0]
      shared_ffn_hidden_size: 40
      shared_gate: true
      score: sigmoid
      correction_bias: true
      bias_update_rate: 0.01
      groups: 2
      groups_per_token: 1
      weight_scale: 1.5
"""
)
# Far from uniform, so that the distillation term is as large as the cross-entropy.
TEACHER = """\
teacher:
  architecture:
    num_layers: 2
    hidden_size: 40
    ffn_hidden_size: 64
    num_attention_heads: 4
    norm: rmsnorm
    activation: swiglu
    positions: rope
    init_std: 0.2
"""
COMMON = """\
seed: 7
data:
  sources:
    - {{format: jsonl, paths: {corpus}}}
  tokenizer: {{path: {tokenizer}}}
  sequence_length: 32
  validation_fraction: 0.1
  shuffle_buffer: 16
  shuffle_samples: 40
objective:
  terms:
{terms}
  chunk_tokens: 24
optimizer:
  learning_rate: 0.003
schedule:
  decay: cosine
  warmup_steps: 4
train:
  steps: {steps}
  global_batch_size: 8
  micro_batch_size: 2
checkpoint:
  save: false
logging:
  progress: false
runtime:
  timeout_seconds: 240
  threads: 1
"""


PLAIN_TERMS = "    - {divergence: forward_kl, weight: 1.0}"
# Between two tokenizers: for the teacher of `SECOND_TEACHER`.
ALIGNED_TERMS = """\
    - {alignment: likelihood, divergence: js_divergence, temperature: 6.0}
    - {alignment: common, weight: 0.5, temperature: 2.0, scale_by_temperature_squared: true}
    - {alignment: common, divergence: reverse_kl, weight: 0.25, top_k: 8}"""
# Losses on chunk means, between the same two models.
MEANS_TERMS = """objective.terms=[
    {alignment: projection, divergence: js_divergence, top_k: 8},
    {alignment: projection, published: true, weight: 0.1, temperature: 2.0},
    {alignment: gold, weight: 0.5, temperature: 2.0, uncommon_top_k: 32},
    {alignment: gold, divergence: reverse_kl, partition: relaxed, weight: 0.2},
    {alignment: uld, weight: 0.25, uncommon_top_k: 32}]"""
MEANS_NAMES = (
    "projection_js_divergence_top8",
    "projection_forward_kl_published_t2",
    "gold_forward_kl_uncommon32_t2",
    "gold_reverse_kl_relaxed",
    "uld_uncommon32",
    "topk_mass",
)
SECOND_TEACHER = (
    TEACHER
    + """\
  sequence_length: 24
  tokenizer: {{path: {tokenizer}}}
"""
)
SECOND_SIZES = (283, 421)


@dataclass(frozen=True)
class Inputs:
    """Inputs of all runs of a test session: a corpus, a tokenizer, initial weights."""

    folder: Path

    @property
    def corpus(self) -> Path:
        """JSON lines, documents from a few tokens to several sequences long."""
        return self.folder / "corpus.jsonl"

    @property
    def tokenizer(self) -> Path:
        """A byte-level BPE whose size is not a multiple of any padding unit."""
        return self.folder / "tokenizer"

    def second_tokenizer(self, size: int) -> Path:
        """A BPE of other merges, of fewer or more ids than the first: see `SECOND_SIZES`."""
        return self.folder / f"tokenizer-{size}"

    def write(
        self,
        name: str,
        *sections: str,
        steps: int = STEPS,
        terms: str = PLAIN_TERMS,
        changes: dict[str, str] | None = None,
    ) -> Path:
        """Write a configuration of these sections and the common ones, with changes of its text."""
        common = COMMON.format(
            corpus=self.corpus, tokenizer=self.tokenizer, steps=steps, terms=terms
        )
        for old, new in (changes or {}).items():
            assert old in common
            common = common.replace(old, new)
        path = self.folder / f"{name}.yaml"
        path.write_text("".join(sections) + common)
        return path


def one_of_several(name: str, *, width: int = 40) -> str:
    """The teacher of `TEACHER` as an entry of `teachers`, with a hidden size of its own."""
    text = TEACHER.removeprefix("teacher:\n").replace("hidden_size: 40", f"hidden_size: {width}", 1)
    return f"  {name}:\n" + "".join(f"  {line}\n" for line in text.splitlines())


def write_corpus(path: Path) -> None:
    """Write functions of Python's own `json` and `string` as documents of very different length."""
    import argparse
    import json.decoder
    import string

    pieces: list[str] = []
    for module in (json.decoder, string, argparse):
        assert module.__file__ is not None
        pieces += Path(module.__file__).read_text(encoding="utf-8").split("\n\n")[:150]
    path.write_text("".join(json.dumps({"text": piece}) + "\n" for piece in pieces if piece))


def train_tokenizer(rank: int, world_size: int, inputs: Inputs) -> int:
    """Train the session's tokenizers; to be called in a pool worker."""
    from megatron_distill.data.tokenizers.open import train_bpe

    texts = [json.loads(line)["text"] for line in inputs.corpus.read_text().splitlines()]
    tokenizer = train_bpe(texts, vocab_size=301)
    tokenizer.save(inputs.tokenizer)
    lines = [line[::-1].upper() for text in texts for line in text.splitlines()]
    for size in SECOND_SIZES:
        train_bpe([*texts[::3], *lines], vocab_size=size).save(inputs.second_tokenizer(size))
    return tokenizer.vocab_size


def quick_and_slow(cases: Iterable[str], quick: Collection[str]) -> list[ParameterSet]:
    """Return a test's cases, those that are not quick marked as slow."""
    cases = list(cases)
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [pytest.param(case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def configure(
    rank: int,
    config_path: Path,
    overrides: Sequence[str],
    world: int,
    load: Callable[..., Any] = load_config,
) -> Any:
    """Prepare a pool worker as the entry script prepares a rank; returns the configuration."""
    log.configure(rank, other_ranks_level=40)
    config = load(config_path, overrides)
    check_layout(config, world, teachers=teacher_ranks(config, ranks_per_node=world))
    prepare_megatron_core(on_cuda=False)
    torch.set_num_threads(1)
    return config


CPU = Device("cpu", "gloo", torch.device("cpu"))


class StopAfter(TerminationRequest):
    """A termination request that arrives during the n-th step."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self._left = steps

    @property
    def received(self) -> bool:
        """Whether the step has come; the loop asks once per step."""
        if self._left is not None:
            self._left -= 1
        return self._left == 0


def train_here(
    rank: int,
    world: int,
    config_path: Path,
    overrides: Sequence[str],
    stop_after: int | None = None,
) -> bool:
    """Run one training in a pool worker; returns whether it reached its last step."""
    config = configure(rank, config_path, overrides, world)
    from megatron_distill.train.assemble.run import run_training

    return run_training(config, CPU, StopAfter(stop_after))


def failure_here(
    rank: int,
    world: int,
    config_path: Path,
    overrides: Sequence[str],
    train: Callable[..., bool] = train_here,
) -> str:
    """Run one training that must fail in a pool worker; returns the error's kind and message."""
    try:
        train(rank, world, config_path, overrides)
    except MegatronDistillError as error:
        return f"{type(error).__name__}: {error}"
    return "no failure"


@contextmanager
def assembled(
    rank: int, world: int, config_path: Path, overrides: Sequence[str]
) -> Iterator[tuple[RunConfig, LoopInputs]]:
    """Everything a training works with, for a test that looks inside; in a pool worker."""
    from contextlib import ExitStack

    config = configure(rank, config_path, overrides, world)
    from megatron_distill.train.assemble.models import job_groups
    from megatron_distill.train.assemble.run import _assemble

    with (
        job_groups(config.parallel, config.runtime, seed=config.seed, trains=True) as groups,
        ExitStack() as resources,
    ):
        yield config, _assemble(config, CPU, groups, resources)[0]


def train_parts(config: RunConfig, parts: LoopInputs) -> str:
    """Train what was assembled; returns the message of the error that ended it, if any did."""
    from megatron_distill.errors import TrainingError
    from megatron_distill.train.assemble.run import loop_plan
    from megatron_distill.train.loop import train
    from megatron_distill.train.start_clock import StartClock

    try:
        train(parts, loop_plan(config), TerminationRequest(), StartClock(None))
    except TrainingError as error:
        return str(error)
    return ""


def run(
    pool: Pool,
    world: int,
    config_path: Path,
    output: Path,
    *overrides: str,
    stop_after: int | None = None,
) -> list[dict[str, Any]]:
    """Train in `world` pool workers and return the records of the steps."""
    arguments = [f"output={output}", *overrides]
    finished = pool.run(world, train_here, config_path, arguments, stop_after, timeout=SECONDS)
    assert finished == [stop_after is None] * world
    return step_records(output)


def evaluate_here(
    rank: int, world: int, folder: Path, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Evaluate a run in a pool worker, as launch/evaluate.py does."""
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.train.assemble.trained_config import load_trained_run
    from megatron_distill.train.assemble.trained_run import evaluate

    return evaluate(load_trained_run(str(folder), overrides, world_size=world), CPU)


class KnownRuns:
    """Runs of the session's configurations; the same request is trained once."""

    def __init__(
        self, pool: Pool, inputs: Inputs, label: str, *common: str, validations: bool = False
    ) -> None:
        self._pool, self._inputs, self._label, self._common = pool, inputs, label, common
        self._read = records if validations else step_records
        self._known: dict[tuple[Any, ...], Course] = {}

    def __call__(self, name: str, world: int, *overrides: str) -> Course:
        """Return the records of the steps, or all of them."""
        key = (name, world, *overrides)
        if key not in self._known:
            config, changes = self._inputs.folder / f"{name}.yaml", (*self._common, *overrides)
            output = self._inputs.folder / f"{self._label}-{len(self._known)}"
            run(self._pool, world, config, output, *changes)
            self._known[key] = self._read(output)
        return self._known[key]


def resumed(
    pool: Pool, world: int, config: Path, folder: Path, *overrides: str, stop_after: int
) -> tuple[Course, Course]:
    """Train with checkpoints, once with a stop in `cut` and once through in `whole`."""
    saved = ("checkpoint.save=true", *overrides)
    whole = run(pool, world, config, folder / "whole", *saved)
    run(pool, world, config, folder / "cut", *saved, stop_after=stop_after)
    return run(pool, world, config, folder / "cut", *saved), whole


@contextmanager
def log_of(rank: int) -> Iterator[io.StringIO]:
    """Let the log of this rank go into the stream in the block, whoever configures it."""
    stream, configure_log = io.StringIO(), log.configure
    with patch.object(log, "configure", lambda *_, **__: configure_log(rank, stream=stream)):
        yield stream


def logged(rank: int, world: int, config_path: Path, overrides: Sequence[str]) -> str:
    """Train in a pool worker; returns the log of this rank."""
    with log_of(rank) as stream:
        train_here(rank, world, config_path, overrides)
    return stream.getvalue()


def failure(pool: Pool, world: int, config_path: Path, output: Path, *overrides: str) -> str:
    """Train in `world` pool workers and return the error that must come out on all of them."""
    arguments = [f"output={output}", *overrides]
    text = pool.run(world, failure_here, config_path, arguments, timeout=SECONDS)
    assert len(set(text)) == 1, text
    return text[0]


def checkpoints(output: Path) -> list[str]:
    """Return the names in a run's folder of checkpoints."""
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def records(output: Path) -> list[dict[str, Any]]:
    """Return every record of a run's log."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def step_records(output: Path) -> list[dict[str, Any]]:
    """Return the records of steps, which are not those of validations."""
    others = {"validation", "evaluation"}
    return [record for record in records(output) if not others & set(record)]


def validations(output: Path) -> list[dict[str, Any]]:
    """Return the records of validations, without the time that they took."""
    found = [record for record in records(output) if "validation" in record]
    assert all(record.pop("validation_seconds") > 0 for record in found)
    return found


def course(found: Sequence[dict[str, Any]]) -> list[tuple[float, ...]]:
    """Reduce records to what must be bit-identical between two runs that are the same."""
    names = ("step", "tokens", "ce_loss", "kd_loss", "total_loss", "grad_norm", "learning_rate")
    return [tuple(record[name] for name in names) for record in found]


def assert_same_course(
    found: Course,
    expected: Course,
    quantities: Sequence[str] = QUANTITIES,
    *,
    first: float = 1e-6,
    last: float = 1e-4,
) -> None:
    """Compare every step, the first one to rounding and the last one to what Adam makes of it.

    Figures of teachers agree within ten times that.
    """
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for ours, other in zip(found, expected, strict=True):
        tolerance = first if ours["step"] == 1 else last
        for name in quantities:
            assert ours[name] == pytest.approx(other[name], rel=tolerance), (ours["step"], name)
        for name, figures in other.get("teachers", {}).items():
            assert ours["teachers"][name] == pytest.approx(figures, rel=10 * tolerance), name


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a torchrun on a shared machine."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, **changes}
