"""A rank of a training that notes its memory; started by benchmarks/teacher_memory.py."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch

from megatron_distill.commands.train import COMMAND
from megatron_distill.train.profile import StepProfiler

_train = COMMAND.script(__doc__)


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with the words behind the options of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, required=True, help="steps")
    parser.add_argument("--folder", type=Path, required=True, help="of a file for each rank")
    given, words = parser.parse_known_args(arguments)
    found: dict[int, dict[str, int]] = {}
    usual = StepProfiler.after_step

    def after_step(self: StepProfiler, step: int) -> None:
        usual(self, step)
        if step % given.every == 0:
            found[step] = _held()

    StepProfiler.after_step = after_step  # type: ignore[method-assign]
    status = _train(words)
    path = given.folder / f"{os.environ['RANK']}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    return status


def _held() -> dict[str, int]:
    """Return the bytes of living tensors, those that the C library has lent out, and the pages.

    torch takes the memory of tensors from the C library, and shared memory from the system.
    """
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {one.data_ptr(): one.nbytes() for one in map(torch.Tensor.untyped_storage, tensors)}
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = _MallocInfo
    info = library.mallinfo2()
    return {
        "tensors": sum(storages.values()),
        "allocated": info.uordblks + info.hblkhd,
        "resident": psutil.Process().memory_info().rss,
    }


if __name__ == "__main__":
    sys.exit(main())
