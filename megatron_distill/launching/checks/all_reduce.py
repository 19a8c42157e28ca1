"""All-reduces of this node's ranks, alone and with each neighbour's, before those of a run start.

python -m megatron_distill.launching.checks.all_reduce, once per node. They show a GPU that CUDA
does not start, a broken NVLink, and an interface that other nodes do not reach, each of which a
run would find after minutes. A rank that hangs is killed, and the record has what was found.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from megatron_distill.errors import TrainingError, counted
from megatron_distill.launching.checks.pairs import (
    NodeSums,
    is_timeout,
    is_wait,
    round_ends,
    rounds,
    sums_file,
)
from megatron_distill.launching.forked_ranks import TIME_LIMIT, ForkedRanks
from megatron_distill.launching.node import HIDDEN_GPUS, gpus_listed, node_name, ranks_here
from megatron_distill.launching.records import write_record

__all__ = ["main"]

_BYTES: Final = {"cuda": 2**26, "cpu": 2**22}
_REPEATS: Final = 3
_LEAST_SECONDS: Final = {"cuda": 10.0, "cpu": 4.0}  # with less, a sum is not tried
_LEAVE_SECONDS: Final = 1.0  # for a rank to tell of its own timeout before it is killed
# The cause at the end of a message of NCCL, whose other lines are of its kind alone, or the text of
# an exception.
_ERROR: Final = re.compile(
    r"Last error:[ \t]*\n?[ \t]*(?!Process |Traceback)(\S.*)"
    r"|^(?!nccl)[\w.]*(?:Error|Exception): *(?!NCCL error)(\S.*)",
    re.MULTILINE,
)
_OF_NCCL: Final = re.compile(r"^nccl\w*Error: *(\S.*)", re.MULTILINE)
_SPEED: Final = re.compile(r"^(\S+) GB/s$", re.MULTILINE)


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
    given = _parse(arguments)
    if given.ranks == 0:  # of a node whose GPUs torch is not built for
        return 0
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    nodes, stores = given.nodes.split(","), given.stores.split(",")
    place = nodes.index(node_name())
    own = [[pair for pair in pairs if place in pair] for pairs in rounds(len(nodes))]
    until = min(given.until, time.time() + given.seconds)  # of a clock that is late
    first_end, *ends = round_ends(len(own), seconds=given.seconds, until=until)
    # Forked before anything starts a thread or CUDA: the imports of this process are the ranks'.
    with ForkedRanks(_import, method="fork") as forked:
        if given.stops_with_input:
            threading.Thread(target=_stop_at_end_of_input, args=(forked,), daemon=True).start()
        sums = _Sums(forked, given.launch, NodeSums(nodes[place]), given.ranks, given.on_gpus)
        alone = _Meeting(nodes[place], given.ranks, 0)
        if given.on_gpus and not sums.succeeds(alone, first_end):
            return 0
        hosts = any(pair[0] == place for pairs in own for pair in pairs)
        with _store(stores[place] if hosts else None):
            for pairs, end in zip(own, ends, strict=True):
                for pair in pairs:
                    name, first = nodes[sum(pair) - place], given.ranks * pair.index(place)
                    meeting = _Meeting(name, 2 * given.ranks, first, stores[pair[0]])
                    sums.succeeds(meeting, end)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the words, with the ranks of this node, and whether they are on GPUs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--launch", required=True, type=Path, help="folder of the launch")
    parser.add_argument("--nodes", required=True, help="NAME,NAME: of all that sum")
    parser.add_argument("--stores", required=True, help="ADDRESS:PORT,ADDRESS:PORT: of each")
    parser.add_argument("--ranks-per-node", type=int, help="at most: one per GPU")
    parser.add_argument("--seconds", type=float, required=True, help="for all sums")
    parser.add_argument("--until", type=float, required=True, help="their end, since the epoch")
    parser.add_argument("--always", action="store_true", help="on nodes without GPUs, too")
    parser.add_argument("--stops-with-input", action="store_true")
    given = parser.parse_args(arguments)
    gpus = gpus_listed()
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN_GPUS
    given.on_gpus = gpus > 0 and (given.always or (bool(torch.version.cuda) and not hides_gpus))
    given.ranks = int(given.always)
    if given.on_gpus:
        given.ranks = min(given.ranks_per_node or ranks_here(announce=False), gpus)
    return given


def _stop_at_end_of_input(forked: ForkedRanks) -> None:
    # Not through sys.stdin, whose lock would be held when the interpreter ends.
    while os.read(0, 4096):
        pass
    forked.stop()
    os._exit(1)


@contextmanager
def _store(address: str | None) -> Iterator[None]:
    """Hold a store at this address; None: there is none to hold."""
    store = None
    if address is not None:
        port = int(address.rpartition(":")[2])
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    yield
    del store


@dataclass
class _Sums:
    """The ranks of this node, which are started anew for each sum, and its record."""

    forked: ForkedRanks
    launch: Path
    record: NodeSums
    ranks: int
    on_gpus: bool

    def succeeds(self, meeting: _Meeting, until: float) -> bool:
        """Sum until then, since the epoch, and record it; return whether it was tried and right.

        The output of the ranks stays beside the record.
        """
        name, seconds = meeting.name, until - time.time()
        if seconds < _LEAST_SECONDS["cuda" if self.on_gpus else "cpu"]:
            return False
        file = sums_file(self.launch, self.record.node)
        output = file.with_name(f"{self.record.node[:100]}-with-{name[:100]}.txt")
        self._add("begun", name, time.time())
        status = self.forked.run(
            _sum,
            meeting,
            self.on_gpus,
            until - _LEAVE_SECONDS,
            ranks=self.ranks,
            threads=1,
            output=output,
            seconds=seconds,
        )
        text = output.read_text(errors="replace") if output.exists() else ""
        speed = _SPEED.search(text)
        cause = _cause(text, status)
        if status == 0 and speed is not None:
            self._add("speeds", name, float(speed[1]))
        elif cause is not None:
            self._add("problems", name, cause)
        self._add("ended", name, time.time())
        return status == 0

    def _add(self, kind: str, name: str, value: float | str) -> None:
        changed: dict[str, Any] = {kind: {**getattr(self.record, kind), name: value}}
        self.record = replace(self.record, **changed)
        write_record(sums_file(self.launch, self.record.node), self.record)


def _cause(text: str, status: int) -> str | None:
    """Return why ranks with this output have failed; None: they have not ended, and were killed.

    The first to fail makes the others fail, whose errors may come before its own.
    """
    found = [(one or other).strip() for one, other in _ERROR.findall(text)]
    found = found or _OF_NCCL.findall(text)
    told = next((one for one in found if not is_wait(one)), None)
    if found:
        return found[-1] if told is None else told
    if status == TIME_LIMIT or is_timeout(text):  # or killed by the watchdog of NCCL
        return None
    return f"a rank ended with status {status}"


def _import() -> None:
    """Do nothing: this module's imports are all that the ranks need."""


def _sum(meeting: _Meeting, on_gpus: bool, until: float) -> None:
    """Sum a message over the ranks of a meeting; each node's first writes the GB/s of a link.

    until: seconds since the epoch.
    Raises TrainingError: a wrong sum. Collective: all-reduce of the meeting's ranks, 64 MiB on
    GPUs, 4 MiB else, four times.
    """
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    message = torch.ones(_BYTES[device.type] // 4, device=device)  # torch tells why it has no GPU
    address = meeting.store or "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=max(1.0, until - time.time()))
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
        sys.stdout.write(f"{share * _BYTES[device.type] / took / 1e9:g} GB/s\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    sys.exit(main())
