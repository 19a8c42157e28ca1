"""One conversion, timed in a separate process; started by benchmarks/convert.py."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.anonymous_memory import AnonymousPeak
from megatron_distill.runtime.launch import Launch, joined_world

_LOOK_SECONDS = 0.002


def main() -> None:
    """Run the requested conversion, and write its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--subject", choices=("copy", "import", "export", "read"), required=True)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    launch = Launch.from_environment()
    with joined_world(
        device="cpu", backend="gloo", threads=None, timeout_seconds=1800.0, launch=launch
    ):
        work, own_bytes = _SUBJECTS[given.subject](given.source, given.output)
        dist.barrier()
        start = time.perf_counter()
        with AnonymousPeak(_LOOK_SECONDS) as peak:
            work()
            dist.barrier()
        found: dict[str, Any] = {"seconds": time.perf_counter() - start}
        ranks: list[Any] = [None] * launch.size
        dist.all_gather_object(ranks, {"peak": peak.bytes, "own": own_bytes()})
        if launch.rank == 0:
            given.result.write_text(json.dumps({**found, "ranks": ranks}), encoding="utf-8")


Subject = tuple[Callable[[], None], Callable[[], int]]


def _copy(source: Path, output: Path) -> Subject:
    from safetensors.torch import load_file, save_file

    def work() -> None:
        output.mkdir()
        for path in sorted(source.glob("*.safetensors")):
            save_file(load_file(path), output / path.name, metadata={"format": "pt"})
            descriptor = os.open(output / path.name, os.O_RDONLY)
            os.fsync(descriptor)  # as the conversion does
            os.close(descriptor)

    return work, _nothing


def _import(source: Path, output: Path) -> Subject:
    from megatron_distill.train.convert.convert import import_checkpoint

    def work() -> None:
        import_checkpoint(source, output, dtype=None, overwrite=False)

    return work, _nothing


def _export(source: Path, output: Path) -> Subject:
    from megatron_distill.train.convert.convert import export_checkpoint

    def work() -> None:
        export_checkpoint(
            str(source),
            output,
            dtype=None,
            max_shard_size="1GB",
            family=None,
            tokenizer=None,
            overwrite=False,
        )

    return work, _nothing


def _read(source: Path, output: Path) -> Subject:  # noqa: ARG001
    """Read the folder into this rank's part of a model, as `student.hf` does."""
    from megatron_distill.models.execution import Execution
    from megatron_distill.models.gpt import build_gpt
    from megatron_distill.models.hugging_face.description import describe
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.models.weights import fill
    from megatron_distill.runtime.groups import Layout, create_groups, seed_everything

    groups = create_groups(Layout(tensor=dist.get_world_size()), timeout_minutes=10)
    seed_everything(1, groups)
    described = describe(source)
    execution = Execution(torch.bfloat16, torch.device("cpu"))
    # Built before the clock: the first touch of every parameter's memory is here.
    chunks = build_gpt(described.architecture, groups=groups, execution=execution, seed=None)
    own = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())

    def work() -> None:
        weights = HuggingFaceWeights(source, described)
        weights.check()
        fill(chunks, weights, groups=groups)

    return work, lambda: own


def _nothing() -> int:
    return 0


_SUBJECTS: dict[str, Callable[[Path, Path], Subject]] = {
    "copy": _copy,
    "import": _import,
    "export": _export,
    "read": _read,
}

if __name__ == "__main__":
    main()
