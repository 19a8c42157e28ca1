"""The last words of a rank that fails alone, where the process has no memory for anything more."""

from __future__ import annotations

import subprocess
import sys

from tests.guards.source_tree import ROOT

# An allocation that is refused by the system, as by torch on a host without memory. No thread can
# start then either, since its stack needs memory too.
EXHAUSTED = """
import resource
import torch
import torch.distributed as dist
from megatron_distill.runtime.lone_failure import LoneFailure
from megatron_distill.runtime.roles import Roles

alone = LoneFailure(1, Roles(2, (("teacher", 1),)), dist.HashStore())
alone.progress.begin(7)
with alone:
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    torch.empty(1 << 40, dtype=torch.uint8)
"""


def test_exhausted_memory_is_named_with_role_and_step() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXHAUSTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: teacher.0 on "), done.stderr
    assert " failed at step 7: RuntimeError: " in last
    assert "can't allocate memory: you tried to allocate 1099511627776 bytes" in last
