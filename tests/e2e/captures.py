"""Small whole captures: one configuration on disk, run in the pool's workers or under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_distill.config import load_capture_config
from megatron_distill.errors import MegatronDistillError
from tests.distributed.pool import Pool
from tests.e2e.failing import file_size_limit
from tests.e2e.processes import ROOT
from tests.e2e.runs import CPU, SECONDS, TEACHER, Inputs, StopAfter, configure

SCRIPT = ROOT / "launch" / "cache_teacher.py"
SAMPLES = 43
PER_SHARD = 5
CAPTURE = """\
seed: 7
store:
  path: stores/nowhere
  samples: {samples}
  k: 12
  codec: f32
  temperatures: [0.5, 2.0]
  samples_per_shard: {per_shard}
capture:
  micro_batch_size: 2
  micro_batches: 2
  chunk_tokens: 24
data:
  sources:
    - {{format: jsonl, paths: {corpus}}}
  tokenizer: {{path: {tokenizer}}}
  sequence_length: 32
  validation_fraction: 0.1
  shuffle_buffer: 16
  shuffle_samples: 40
runtime:
  timeout_seconds: 240
  threads: 1
"""


def write_capture(
    inputs: Inputs, name: str, *, samples: int = SAMPLES, per_shard: int = PER_SHARD
) -> Path:
    """Write the configuration of a capture of the session's corpus."""
    sections = CAPTURE.format(
        corpus=inputs.corpus, tokenizer=inputs.tokenizer, samples=samples, per_shard=per_shard
    )
    path = inputs.folder / f"{name}.yaml"
    path.write_text(TEACHER + sections)
    return path


def capture_here(
    rank: int,
    world: int,
    path: Path,
    overrides: Sequence[str],
    stop_after: int | None = None,
    limits: dict[int, int] | None = None,
) -> bool | str:
    """Run one capture in a pool worker; returns what it returns, or the error's kind and text."""
    config = configure(rank, path, overrides, world, load_capture_config)
    from megatron_distill.train.assemble.capture import run_capture

    try:
        with file_size_limit((limits or {}).get(rank)):
            return run_capture(config, CPU, StopAfter(stop_after))
    except MegatronDistillError as error:
        return f"{type(error).__name__}: {error}"


def run_in(
    pool: Pool,
    world: int,
    path: Path,
    store: Path,
    *overrides: str,
    stop_after: int | None = None,
    limits: dict[int, int] | None = None,
) -> bool | str:
    """Capture in `world` pool workers; returns what all of them return."""
    given = [f"store.path={store}", *overrides]
    text = pool.run(world, capture_here, path, given, stop_after, limits, timeout=SECONDS)
    assert len(set(text)) == 1, text
    result: bool | str = text[0]
    return result


class KnownStores:
    """Stores of one configuration of a capture; the same request is captured once."""

    def __init__(self, pool: Pool, inputs: Inputs, label: str, config: Path, *common: str) -> None:
        self._pool, self._inputs, self._label = pool, inputs, label
        self._config, self._common = config, common
        self._known: dict[tuple[Any, ...], Path] = {}

    def __call__(self, *overrides: str, world: int = 1) -> Path:
        """Return the folder of the store."""
        key = (world, *overrides)
        if key not in self._known:
            folder = self._inputs.folder / f"{self._label}-{len(self._known)}"
            changes = (*self._common, *overrides)
            assert run_in(self._pool, world, self._config, folder, *changes) is True
            self._known[key] = folder
        return self._known[key]


def shards_of(store: Path) -> list[str]:
    """Names of the shards that are there."""
    return sorted(path.stem for path in (store / "shards").glob("logits-*.json"))


def has_shards(store: Path, number: int) -> Callable[[], bool]:
    return lambda: len(shards_of(store)) >= number


def partial_files(store: Path) -> list[Path]:
    """Whatever was left half done."""
    return [path for path in store.rglob("*") if ".partial" in path.name]
