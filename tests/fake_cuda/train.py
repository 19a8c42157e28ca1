"""A training of one rank, watched from each step's batches to its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_distill.config import RunConfig, load_config
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.runtime.termination import TerminationRequest
from tests.fake_cuda.cuda_names import look_at_attention, look_at_kernels, pretend_cuda
from tests.fake_cuda.host_side import (
    agree_with_itself,
    mesh_on_the_host,
    read_on_the_host,
    run_on_the_host,
)
from tests.fake_cuda.watching_mode import Seen, WatchingMode

CUDA = Device("cuda", "nccl", torch.device("cuda", 0))


def main(rank: int, world: int, path: str, overrides: Sequence[str]) -> None:
    """Train as this rank of a world whose other ranks are not there, and print what was seen."""
    config = load_config(path, overrides)
    pretend_cuda()
    prepare_megatron_core(on_cuda=True)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    agree_with_itself()
    launched = look_at_kernels()
    seen = Seen()
    attention = look_at_attention()
    is_done = _train(config, seen)
    counts = {"waits": seen.waits, "copies": seen.copies, "from_host": seen.from_host}
    print(json.dumps({"is_done": is_done, "kernels": launched, "attention": attention, **counts}))  # noqa: T201


def _train(config: RunConfig, seen: Seen) -> bool:
    # Only now: these import Megatron-Core, which had to be prepared first.
    from megatron_distill.train import loop
    from megatron_distill.train.assemble import data as assemble_data
    from megatron_distill.train.assemble import distillation as opening
    from megatron_distill.train.assemble import run as assembly
    from megatron_distill.train.teachers.stored import HostBatch

    mode = WatchingMode(seen)
    for operator in (flex_attention, flex_attention_backward):
        operator.py_impl(WatchingMode)(operator.python_key_table[FakeTensorMode])
    read_on_the_host(mode)
    for module in (assemble_data, assembly):
        patch.object(module, "on_first_rank", lambda work, **_: work()).start()
        run_on_the_host(module, "on_first_rank")
    run_on_the_host(opening, "open_tokenizer")
    run_on_the_host(assembly, "keep_assets")
    patch.object(assembly, "exchange_group", lambda **_: None).start()
    run_on_the_host(HostBatch, "of")
    patch.object(DeviceMesh, "from_group", mesh_on_the_host(DeviceMesh.from_group)).start()
    distil = loop._distil

    def watched(*given: Any) -> Any:
        seen.is_watching = True
        try:
            return distil(*given)
        finally:
            seen.is_watching = False

    patch.object(loop, "_distil", watched).start()
    patch.object(torch.cuda.Event, "synchronize", lambda _: seen.note(seen.waits)).start()
    with mode:
        return assembly.run_training(config, CUDA, TerminationRequest())
