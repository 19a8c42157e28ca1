"""The connection between the student's world and a teacher's, within one launch.

Each role has its own default process group, so that Megatron-Core needs no change. The bridge is a
gloo group of all ranks over the same rendezvous, for messages between two ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.lone_failure import host_key
from megatron_distill.runtime.roles import Roles

__all__ = ["Bridge", "Sending", "open_bridge"]

# A rank that waits longer than a collective's timeout is no failure here: a teacher waits while
# the student validates or saves. Its failure closes the connection.
_PATIENCE: Final = timedelta(days=30)
_STOP: Final = "teacher/asks-to-stop"
_FAILURE: Final = "teacher/failure"


class Sending(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Wait until the tensor may be read, or overwritten by its sender."""
        ...


@dataclass(frozen=True)
class Bridge:
    """Messages between ranks of a launch, which are numbered as torchrun does.

    Attributes:
        meet: a block by name that ends on all ranks of the launch together, with one outcome.
        timeout_seconds: longest wait for a message that is due.
    """

    rank: int
    roles: Roles
    store: dist.Store
    group: dist.ProcessGroup
    meet: Callable[[str], AbstractContextManager[None]]
    timeout_seconds: float

    @property
    def is_teacher(self) -> bool:
        """Whether this rank only runs the teacher."""
        return self.rank >= self.roles.teacher.first

    def send(self, tensor_host: Tensor, to: int, *, tag: int) -> Sending:
        """Begin to send a contiguous tensor in host memory; messages of a tag stay in order.

        Collective: the bridge, one message of the tensor's bytes.
        """
        assert tensor_host.is_contiguous()
        return self.group.send([tensor_host], to, tag)

    def receive(self, tensor_host: Tensor, source: int, *, tag: int) -> Sending:
        """Begin to receive into a contiguous tensor in host memory.

        Collective: the bridge, one message of the tensor's bytes.
        """
        assert tensor_host.is_contiguous()
        return self.group.recv([tensor_host], source, tag)

    def nccl(self) -> dist.ProcessGroup:
        """Create an NCCL group of all ranks, for messages between two GPUs.

        Collective: all ranks of the launch, rendezvous.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_seconds)  # noqa: SLF001 - has no other name
        place = dist.PrefixStore("bridge/nccl", self.store)
        group = dist.ProcessGroupNCCL(place, self.rank, self.roles.size, options)
        return cast(dist.ProcessGroup, group)  # the stubs know only its common base

    def ask_to_stop(self) -> None:
        """Let the student stop after its step; any rank of the teacher may ask."""
        self.store.set(_STOP, "asked")

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether a rank of the teacher has asked the student to stop."""
        found: bool = self.store.check([_STOP])
        return found

    def note_failure(self, text: str) -> None:
        """Note why the teacher cannot answer any more."""
        self.store.set(_FAILURE, text)

    def failure(self) -> str:
        """Return the note of a rank of the teacher; call it after it has said that it failed."""
        return self.store.get(_FAILURE).decode()

    def host(self, rank: int) -> str:
        """Return the host of a rank of the launch."""
        return self.store.get(host_key(rank)).decode()

    def publish(self, name: str, value: Any) -> None:
        """Make a value of JSON known to all ranks of the launch; once per name."""
        self.store.set(f"published/{name}", json.dumps(value))

    def published(self, name: str) -> Any:
        """Return a value that a rank has published before a meeting that this rank was in."""
        return json.loads(self.store.get(f"published/{name}"))


def open_bridge(
    rank: int,
    roles: Roles,
    store: dist.Store,
    *,
    meet: Callable[[str], AbstractContextManager[None]],
    timeout_seconds: float,
) -> Bridge:
    """Create the bridge; beside NCCL its connections are made when they are first used.

    Collective: all ranks of the launch, rendezvous.
    """
    place = dist.PrefixStore("bridge", store)
    group = dist.ProcessGroupGloo(place, rank, roles.size, timeout=_PATIENCE)
    # The stubs do not know that it has the methods of any group.
    return Bridge(rank, roles, store, cast(dist.ProcessGroup, group), meet, timeout_seconds)
