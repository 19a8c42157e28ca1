"""The last words of a rank that fails alone, also without memory, or that loses a silent peer."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_distill.runtime import heartbeats, lone_failure
from megatron_distill.runtime.lone_failure import LoneFailure, PeerWatch, Progress
from megatron_distill.runtime.roles import Roles
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


# Of the watching rank, with `runtime.timeout_seconds`: the patience and its name.
SILENT = {
    "it loads": (None, 600, 600.0, "runtime.timeout_seconds = 600 s"),
    "it trains": (7, 600, heartbeats.SILENT_SECONDS, "20 s"),
    "it trains with a short timeout": (7, 6, 6.0, "runtime.timeout_seconds = 6 s"),
}


@pytest.mark.parametrize("case", SILENT)
@pytest.mark.parametrize("rank", [0, 1], ids=["student", "teacher"])
def test_a_rank_without_signs_is_given_up_sooner_once_steps_run(
    case: str, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step, timeout, patience, name = SILENT[case]
    store, peer = dist.HashStore(), 1 - rank
    roles = Roles(2, (("teacher", 1),))
    watch = PeerWatch(
        LoneFailure(rank, roles, store, Progress(step)), patience_seconds=float(timeout)
    )
    store.set(lone_failure.host_key(peer), "node-b")
    heartbeats.give_sign(store, peer)  # its last one
    looks: list[float] = []
    monkeypatch.setattr(watch, "_ended", SimpleNamespace(wait=looks.append))
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit, match="1"):
        watch._watch()
    # The first look sees the sign. A launcher kills the stopped process 30 s later.
    assert patience <= sum(looks[1:]) < patience + lone_failure._WATCH_SECONDS
    assert step is None or sum(looks) + 30 < 60
    text = capsys.readouterr().err
    assert f"{roles.name(peer)} on node-b gave no sign of life for {name}, and " in text
    assert store.get("failed").decode() == str(peer)
