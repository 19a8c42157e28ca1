"""Imports of a rank before its first step, and the state that they do not change."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from megatron_distill.runtime.imports import hidden, uncollected_import
from tests.guards.source_tree import ROOT

PROGRAM = """
import gc, sys
from importlib.util import find_spec
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
had = find_spec("wandb") is not None
prepare_megatron_core(on_cuda=False)
import megatron_distill.train.assemble.run
print(*sorted({"wandb", "torch._dynamo", "megatron.core"} & set(sys.modules)))
print(gc.isenabled(), had == (find_spec("wandb") is not None), gc.get_freeze_count() > 100_000)
"""


@pytest.mark.slow
def test_a_rank_on_a_cpu_loads_neither_a_tracker_nor_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert not done.stderr
    assert done.stdout.split("\n")[:2] == ["megatron.core", "True True True"]


def test_a_package_is_missing_within_the_block_alone() -> None:
    with hidden("wave_of_no_file"), pytest.raises(ModuleNotFoundError, match="import of"):
        import wave_of_no_file  # type: ignore[import-not-found] # noqa: F401
    assert "wave_of_no_file" not in sys.modules
    with hidden("json"):
        import json
    assert sys.modules["json"] is json


def test_only_objects_of_a_first_import_are_not_scanned() -> None:
    before = gc.get_freeze_count()
    with uncollected_import("json"):
        assert gc.isenabled()
    assert gc.get_freeze_count() == before
    with uncollected_import("wave_of_no_file"):
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    gc.unfreeze()
