"""Saves and resumes of a student and its optimizer; started by benchmarks/checkpoint.py."""

from __future__ import annotations

import argparse
import ctypes
import json
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.anonymous_memory import AnonymousPeak
from megatron_distill.runtime.launch import joined_world

_LOOK_SECONDS = 0.002
_STEP = 3
_LEFT_BYTES = 2**24
SHAPE: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 512,
    "ffn_hidden_size": 1536,
    "num_attention_heads": 8,
    "num_kv_heads": 8,
    "head_size": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 512,
}
_PERIOD, _PART = 65521, 2**16
_VALUES = (torch.arange(_PERIOD + _PART) * 7919 % _PERIOD) / _PERIOD
MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 256}


def main() -> None:
    """Do the works in this layout, one after the other, and write every rank's figures of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--work", action="append", required=True, help=f"{', '.join(_WORK)}: a folder behind =",
    )  # fmt: skip
    for name in ("tensor", "pipeline", "virtual-pipeline", "context", "expert"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--moe", action="store_true", help="a mixture of experts")
    parser.add_argument("--whole", action="store_true", help="optimizer.distributed=false")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    with joined_world(device="cpu", backend="gloo", threads=1, timeout_seconds=900.0):
        student = _Student(given)
        works = []
        for work in given.work:
            name, _, folder = work.partition("=")
            found = _WORK[name](student, Path(folder))
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, found)
            works.append(ranks)
        if dist.get_rank() == 0:
            given.result.write_text(json.dumps(works), encoding="utf-8")


class _Student:
    """A bf16 model with its gradient buffers and Adam, every value known by its place."""

    def __init__(self, given: argparse.Namespace) -> None:
        from megatron_distill.config import OptimizerConfig, ScheduleConfig
        from megatron_distill.models.architecture import Architecture
        from megatron_distill.models.execution import Execution
        from megatron_distill.models.gpt import build_gpt
        from megatron_distill.runtime.groups import Layout, create_groups, seed_everything
        from megatron_distill.train.checkpoint.state import model_shards, optimizer_shards
        from megatron_distill.train.optimizer import build_optimizer, wrap_data_parallel

        layout = Layout(
            tensor=given.tensor,
            pipeline=given.pipeline,
            virtual_pipeline=given.virtual_pipeline if given.virtual_pipeline > 1 else None,
            context=given.context,
            expert=given.expert,
            sequence=given.moe and given.tensor > 1,
        )
        self.groups = create_groups(layout, timeout_minutes=10)
        seed_everything(1, self.groups)
        self.architecture = Architecture.from_dict(SHAPE | ({"moe": MOE} if given.moe else {}))
        execution = Execution(torch.bfloat16, torch.device("cpu"))
        self.chunks = build_gpt(
            self.architecture, groups=self.groups, execution=execution, seed=None
        )
        config = OptimizerConfig(learning_rate=1e-3, distributed=not given.whole)
        wrapped = wrap_data_parallel(self.chunks, config, groups=self.groups)
        self.optimizer = build_optimizer(
            wrapped, config, ScheduleConfig(decay="constant"), dtype=torch.bfloat16
        )
        self.weights = model_shards(self.chunks, self.groups)
        self.shards = self.weights + optimizer_shards(self.optimizer, self.chunks, self.groups)
        for shard in self.shards:
            shard.data.fill_(1)  # memory that was never touched is not there yet
        self.formula = sum(self._bytes_of(one, whole=given.whole) for one in self._parameters())
        self.anonymous = 0  # memory before the first work
        self.is_filled = False

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def _bytes_of(self, parameter: torch.nn.Parameter, *, whole: bool) -> float:
        """The share of a parameter: 2 B of weight, and 12 B of states over its replicas."""
        is_dense = getattr(parameter, "allreduce", True)
        replicas = self.groups.data_context if is_dense else self.groups.megatron.expt_dp
        return parameter.numel() * (2 + 12 / (1 if whole else replicas.size()))

    def fill(self) -> None:
        """Give every element its value; after a resume it has it."""
        if not self.is_filled:
            for part, known in self._values():
                part.copy_(known)
        self.is_filled = True

    def clear(self) -> None:
        """Give every element the value zero."""
        for shard in self.shards:
            shard.data.zero_()
        self.is_filled = False

    def check(self) -> None:
        """Raise SystemExit unless every element has its value."""
        for part, known in self._values():
            if not part.equal(known.to(part.dtype)):
                raise SystemExit("a resumed value differs from the saved one")
        self.is_filled = True

    def _values(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for shard in self.shards:
            for start in range(0, shard.data.numel(), _PART):
                part = shard.data[start : start + _PART]
                yield part, _known(shard, start, part.numel())

    def share(self) -> dict[str, float]:
        """The bytes of this rank's weights, of its optimizer's states, and of both by formula."""
        weights = sum(shard.data.nbytes for shard in self.weights)
        return {
            "weights": weights,
            "optimizer": sum(shard.data.nbytes for shard in self.shards) - weights,
            "formula": self.formula,
        }

    def measured(self, work: Callable[[], None]) -> dict[str, int]:
        """Return the peaks of this process during some work, above its state before.

        Raises SystemExit where memory of an earlier work is left, which this one could use unseen.
        """
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before, anonymous = _status("VmRSS"), _status("RssAnon")
        self.anonymous = self.anonymous or anonymous
        if anonymous > self.anonymous + _LEFT_BYTES:
            raise SystemExit(
                f"{(anonymous - self.anonymous) / 1e6:.0f} MB of a work before are left"
            )
        dist.barrier()
        with AnonymousPeak(_LOOK_SECONDS) as peak:
            work()
            dist.barrier()
        return {"anonymous": peak.bytes, "resident": _status("VmHWM") - before}


def _known(shard: Any, start: int, count: int) -> torch.Tensor:
    """Return the values of a part of a shard, which depend on their places in the whole tensor."""
    run = 1  # places side by side in the whole: along the last axes, as far as the shard has all
    for axis in reversed(range(len(shard.shape))):
        run *= shard.shape[axis]
        if shard.shape[axis] != shard.global_shape[axis]:
            break
    found = []
    at, stop = shard.first + start, shard.first + start + count
    while at < stop:
        end = min(stop, (at // run + 1) * run)
        index, place, stride = at, zlib.crc32(shard.key.encode()), 1
        for axis in reversed(range(len(shard.shape))):
            index, here = divmod(index, shard.shape[axis])
            place += (here + shard.offset[axis]) * stride
            stride *= shard.global_shape[axis]
        found.append(_VALUES[place % _PERIOD :][: end - at])
        at = end
    return torch.cat(found)


def _save(student: _Student, folder: Path) -> dict[str, int | float]:
    return _saves(student, folder, asynchronous=False)


def _save_meanwhile(student: _Student, folder: Path) -> dict[str, int | float]:
    return _saves(student, folder, asynchronous=True)


def _saves(student: _Student, folder: Path, *, asynchronous: bool) -> dict[str, int | float]:
    """Save twice: the second save has the first one's host memory."""
    from megatron_distill.train.checkpoint.description import Description
    from megatron_distill.train.checkpoint.folder import CheckpointFolder

    student.fill()
    description = Description(
        step=_STEP, tokens=0, bad_steps=0, architecture=student.architecture.as_dict(),
        tokenizer="", layout="", data={},
    )  # fmt: skip
    checkpoints = CheckpointFolder(folder, keep=1, asynchronous=asynchronous)
    checkpoints.prepare()
    blocked = []

    def work() -> None:
        for _ in range(2):
            started = time.perf_counter()
            checkpoints.save(student.shards, description)
            blocked.append(time.perf_counter() - started)
            checkpoints.finish()

    peaks = student.measured(work)
    checkpoints.close()
    written = (folder / f"step_{_STEP:07d}" / f"__{dist.get_rank()}_0.distcp").stat().st_size
    return {**student.share(), **peaks, "blocked": blocked[1], "file": written}


def _gathered(student: _Student, folder: Path) -> dict[str, int | float]:  # noqa: ARG001
    """Describe the optimizer's state in Megatron-Core's format for all layouts; write nothing."""
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": student.groups.data_context,
    }
    held: list[Any] = []

    def work() -> None:
        (chunk,) = student.chunks
        state = {"model": chunk.sharded_state_dict(metadata=metadata)}
        held.append(student.optimizer.sharded_state_dict(state, metadata=metadata))

    return {**student.share(), **student.measured(work), "blocked": 0.0, "file": 0}


def _resume(student: _Student, folder: Path) -> dict[str, int | float]:
    from megatron_distill.train.checkpoint.reader import MappedChunks, load_shards

    student.clear()
    read = 0

    def work() -> None:
        nonlocal read
        chunks = MappedChunks(folder / f"step_{_STEP:07d}")
        read = load_shards(student.shards, chunks, student.groups)

    started = time.perf_counter()
    peaks = student.measured(work)
    seconds = time.perf_counter() - started
    student.check()
    return {**student.share(), **peaks, "blocked": seconds, "file": read}


def _status(field: str) -> int:
    lines: Sequence[str] = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


_WORK: dict[str, Callable[[_Student, Path], dict[str, int | float]]] = {
    "save": _save,
    "save-asynchronously": _save_meanwhile,
    "gather": _gathered,
    "resume": _resume,
}

if __name__ == "__main__":
    main()
