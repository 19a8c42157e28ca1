"""All-reduces of this node's ranks, alone and with each neighbour's, before those of a run start.

python -m megatron_distill.launching.checks.all_reduce, once per node. They show a GPU that CUDA
does not start, a broken NVLink, and an interface that other nodes do not reach, each of which a
run would find after minutes. A rank that hangs is killed, and the record has what was found.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.errors import TrainingError, counted
from megatron_distill.launching.checks.ring import TIMEOUT, NodeSums, ring, sums_file
from megatron_distill.launching.forked_ranks import ForkedRanks
from megatron_distill.launching.node import gpus_listed, node_name, ranks_here
from megatron_distill.launching.records import write_record

__all__ = ["main"]

_BYTES: Final = {"cuda": 2**26, "cpu": 2**22}
_REPEATS: Final = 3
_LEAST_SECONDS: Final = 12.0  # of all sums: with less, as after slow imports, none is tried
_LEAVE_SECONDS: Final = 2.0  # for a rank to tell of its own timeout before it is killed
# The cause at the end of a message of NCCL, or else of the last error.
_LAST_ERROR: Final = re.compile(r"Last error:\s*(\S.*)")
_ERROR: Final = re.compile(r"^[\w.]*(?:Error|Exception): *(\S.*)", re.MULTILINE)


@dataclass(frozen=True)
class _Meeting:
    """Where the ranks of one sum meet, and which of them are this node's.

    name: of this node, or of the neighbour. world: all ranks. first: the lowest of this node's.
    store: ADDRESS:PORT; None: that of torchrun's variables.
    """

    name: str
    world: int
    first: int
    store: str | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the sums of this node, record each, and return 0; raises OSError: there is no record."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--launch", required=True, type=Path, help="folder of the launch")
    parser.add_argument("--nodes", required=True, help="NAME,NAME: of all that sum")
    parser.add_argument("--stores", required=True, help="ADDRESS:PORT,ADDRESS:PORT: of each")
    parser.add_argument("--ranks-per-node", type=int, help="at most: one per GPU")
    parser.add_argument("--seconds", type=float, required=True, help="of all sums")
    given = parser.parse_args(arguments)
    deadline = time.monotonic() + given.seconds
    nodes, stores = given.nodes.split(","), given.stores.split(",")
    with ForkedRanks(_import) as forked, TemporaryDirectory() as scratch:
        forked.wait()
        if deadline - time.monotonic() < _LEAST_SECONDS:
            return 0
        gpus = gpus_listed()
        ranks = min(given.ranks_per_node or ranks_here(announce=False), gpus) if gpus else 1
        own = _OwnRanks(forked, given.launch, Path(scratch), node_name(), ranks, gpus > 0)
        place = nodes.index(own.node)
        pairs = [pair for pairs in ring(len(nodes)) for pair in pairs if place in pair]
        with _store(stores[place] if any(first == place for first, _ in pairs) else None):
            alone = _Meeting(own.node, ranks, 0)
            left = deadline - time.monotonic()
            if gpus and not own.succeeds(alone, left / (2 if pairs else 1)):
                return 0
            for number, pair in enumerate(pairs):
                name, first = nodes[sum(pair) - place], ranks * pair.index(place)
                left = deadline - time.monotonic()
                meeting = _Meeting(name, 2 * ranks, first, stores[pair[0]])
                own.succeeds(meeting, left / (len(pairs) - number))
    return 0


@contextmanager
def _store(address: str | None) -> Iterator[None]:
    """Hold a store at this address; None: there is none to hold."""
    store = None
    if address is not None:
        port = int(address.rpartition(":")[2])
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield
    del store


@dataclass(frozen=True)
class _OwnRanks:
    """The ranks of this node, which are started anew for each sum, and its record."""

    forked: ForkedRanks
    launch: Path
    scratch: Path
    node: str
    ranks: int
    on_gpus: bool
    begun: list[str] = field(default_factory=list)
    speeds: dict[str, float] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def succeeds(self, meeting: _Meeting, seconds: float) -> bool:
        """Sum within so many seconds, record how it went, and return whether it was right."""
        speed, output = self.scratch / "speed", self.scratch / "output"
        for file in (speed, output):
            file.unlink(missing_ok=True)
        self.begun.append(meeting.name)
        self._record()
        status = self.forked.run(
            _sum,
            meeting,
            speed,
            self.on_gpus,
            max(1.0, seconds - _LEAVE_SECONDS),
            ranks=self.ranks,
            threads=1,
            output=output,
            seconds=seconds,
        )
        if status == 0:
            self.speeds[meeting.name] = float(speed.read_text())
        elif (cause := _cause(output, status)) is not None:
            self.problems[meeting.name] = cause
        self._record()
        return status == 0

    def _record(self) -> None:
        file = sums_file(self.launch, self.node)
        write_record(file, NodeSums(self.node, self.begun, self.speeds, self.problems))


def _cause(output: Path, status: int) -> str | None:
    """Return why ranks with this output have failed; None: they have not ended, and were killed."""
    text = output.read_text(errors="replace") if output.exists() else ""
    found = _LAST_ERROR.findall(text) or _ERROR.findall(text)
    if found:
        return str(found[-1]).strip()
    if status == 1 or TIMEOUT.search(text):  # NCCL's watchdog aborts a rank
        return None
    return f"a rank ended with status {status}"


def _import() -> None:
    """Do nothing: this module's imports are all that the ranks need."""


def _sum(meeting: _Meeting, speed: Path, on_gpus: bool, seconds: float) -> None:
    """Sum a message over the ranks of a meeting; each node's first writes the GB/s of a link.

    Raises TrainingError: a wrong sum. Collective: all-reduce of the meeting's ranks, 64 MiB on
    GPUs, 4 MiB else, four times.
    """
    local, limit = int(os.environ["LOCAL_RANK"]), timedelta(seconds=seconds)
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    message = torch.ones(_BYTES[device.type] // 4, device=device)  # torch tells why it has no GPU
    address = meeting.store or "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
    dist.init_process_group(
        "nccl" if on_gpus else "gloo",
        store=store,
        rank=meeting.first + local,
        world_size=meeting.world,
        timeout=limit,
        device_id=device if on_gpus else None,
    )
    dist.all_reduce(message)  # the first one connects
    _wait_for(device)
    began = time.perf_counter()
    for _ in range(_REPEATS):
        dist.all_reduce(message)
    _wait_for(device)
    took = (time.perf_counter() - began) / _REPEATS
    expected = float(meeting.world) ** (1 + _REPEATS)
    wrong = int((message != expected).sum())
    if wrong:
        raise TrainingError(f"{counted(wrong, 'number')} of {message.numel()} are not {expected:g}")
    if local == 0:
        share = 2 * (meeting.world - 1) / meeting.world  # of the message, over each link
        speed.write_text(str(share * _BYTES[device.type] / took / 1e9))
    dist.destroy_process_group()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
