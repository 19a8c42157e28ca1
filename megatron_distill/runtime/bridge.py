"""The connection between the student's world and those of its teachers, within one launch.

Each role has its own default process group, so that Megatron-Core needs no change. The bridge is a
gloo group of all ranks over the same rendezvous, for messages between two ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch.distributed as dist
from torch import Tensor

from megatron_distill.runtime.lone_failure import host_key
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.runtime.shared_memory import memory_name

__all__ = ["Bridge", "Sending", "memory_key", "open_bridge"]

# A rank that waits longer than a collective's timeout has not failed here: a teacher waits while
# the student validates or saves. Its failure closes the connection.
_PATIENCE: Final = timedelta(days=30)
_STOP: Final = "teachers/ask-to-stop"
_FAILURE: Final = "failure"  # of a role


def memory_key(rank: int) -> str:
    """Return the name in the store of the memory that a rank of the launch can map."""
    return f"bridge/memory/{rank}"


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
    def role(self) -> Role:
        """This rank's role."""
        return self.roles.of(self.rank)

    @property
    def is_teacher(self) -> bool:
        """Whether this rank only runs a teacher."""
        return self.role != self.roles.student

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

    def nccl(self, name: str) -> dist.ProcessGroup:
        """Create an NCCL group of all ranks, for messages between two GPUs; once per name.

        Collective: the ranks that exchange messages, rendezvous of each pair.
        """
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout_seconds)  # noqa: SLF001 - has no other name
        place = dist.PrefixStore(f"bridge/nccl/{name}", self.store)
        group = dist.ProcessGroupNCCL(place, self.rank, self.roles.size, options)
        return cast(dist.ProcessGroup, group)  # the stubs know only its common base

    def ask_to_stop(self) -> None:
        """Let the student stop after its step; any rank of a teacher may ask."""
        self.store.set(_STOP, "asked")

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether a rank of a teacher has asked the student to stop."""
        found: bool = self.store.check([_STOP])
        return found

    def note_failure(self, text: str) -> None:
        """Note why this rank's teacher cannot answer any more."""
        self.store.set(f"{_FAILURE}/{self.role.name}", text)

    def failure(self, rank: int) -> str:
        """Return the note of the teacher on a rank, which has sent a header with `has_failed`."""
        return self.store.get(f"{_FAILURE}/{self.roles.of(rank).name}").decode()

    def host(self, rank: int) -> str:
        """Return the host of a rank of the launch."""
        return self.store.get(host_key(rank)).decode()

    def shares_memory(self, rank: int) -> bool:
        """Whether this rank and another one of the launch can map each other's memory."""
        own, other = (self.store.get(memory_key(one)) for one in (self.rank, rank))
        return bool(own) and own == other

    def publish(self, name: str, value: Any) -> None:
        """Make a value of JSON known to all ranks of the launch; once per name."""
        self.store.set(f"published/{name}", json.dumps(value))

    def published(self, name: str) -> Any:
        """Return a value that a rank has published before a meeting that this rank was in."""
        return json.loads(self.store.get(f"published/{name}"))

    def note(self, name: str, value: Any) -> None:
        """Replace a value of JSON that another rank may look at; no rank waits for it."""
        self.store.set(f"noted/{name}", json.dumps(value))

    def noted(self, names: Sequence[str]) -> list[Any] | None:
        """Return the newest values of some names; None while one of them has none.

        It takes two requests at the store, of any number of names.
        """
        keys = [f"noted/{name}" for name in names]
        if not self.store.check(keys):
            return None
        return [json.loads(value) for value in self.store.multi_get(keys)]


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
    store.set(memory_key(rank), memory_name())
    place = dist.PrefixStore("bridge", store)
    group = dist.ProcessGroupGloo(place, rank, roles.size, timeout=_PATIENCE)
    # The stubs do not know that it has the methods of any group.
    return Bridge(rank, roles, store, cast(dist.ProcessGroup, group), meet, timeout_seconds)
