"""A process that opens a world of the fake device, and what was seen of its work."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from tests.fake_cuda.cuda_names import look_at_attention, look_at_kernels, pretend_cuda
from tests.fake_cuda.host_side import agree_with_itself, mesh_on_the_host
from tests.fake_cuda.watching_mode import Seen, WatchingMode

CUDA = Device("cuda", "nccl", torch.device("cuda", 0))


@dataclass(frozen=True)
class Opened:
    """A world whose other ranks are not there."""

    seen: Seen
    kernels: Counter[str]
    attention: Counter[str]

    @contextmanager
    def mode(self) -> Iterator[WatchingMode]:
        """Fake tensors in the block."""
        mode = WatchingMode(self.seen)
        for operator in (flex_attention, flex_attention_backward):
            operator.py_impl(WatchingMode)(operator.python_key_table[FakeTensorMode])
        mesh = mesh_on_the_host(DeviceMesh.from_group)
        for kind in (torch.cuda.Event, torch.cuda.Stream):
            patch.object(kind, "synchronize", lambda _: self.seen.note(self.seen.waits)).start()
        for name in ("synchronize", "empty_cache"):  # memory is freed when the device is idle
            patch.object(torch.cuda, name, lambda *_: self.seen.note(self.seen.waits)).start()
        with patch.object(DeviceMesh, "from_group", mesh), mode:
            yield mode

    def watched(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Return work during which waits count."""

        def run(*given: Any, **named: Any) -> Any:
            self.seen.is_watching = True
            try:
                return work(*given, **named)
            finally:
                self.seen.is_watching = False

        return run

    def print_seen(self, **more: Any) -> None:
        """Print it as a line of JSON."""
        found = {"kernels": self.kernels, "attention": self.attention}
        found |= {**self.seen.counts, **more}
        print(json.dumps(found))  # noqa: T201


def open_world(rank: int, world: int) -> Opened:
    """Open the world of a rank, for the rest of the process."""
    pretend_cuda()
    prepare_megatron_core(on_cuda=True)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    agree_with_itself()
    return Opened(Seen(), look_at_kernels(), look_at_attention())
