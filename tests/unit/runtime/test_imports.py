"""Imports of a rank before its first step, and the state that they do not change."""

from __future__ import annotations

import gc
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.runtime import imports
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


# An installed release, on CUDA or not, and what becomes of it.
RELEASES: dict[tuple[str | None, bool], str] = {
    ("0.16.1", False): "",
    ("0.16.1", True): "",
    ("0.16.1+1d462bd24", False): "",
    ("0.16.0", True): "warning",
    ("0.16.0", False): "error",
    ("0.15.3", True): "error",
    ("0.17.0rc0", True): "error",
    (None, True): "warning",
    (None, False): "error",
}


@pytest.mark.parametrize(("release", "on_cuda"), RELEASES)
def test_a_release_of_megatron_core_is_checked_on_all_devices(
    release: str | None,
    on_cuda: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def version(name: str) -> str:
        if release is None:  # a source tree
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(imports, "version", version)
    expected = RELEASES[release, on_cuda]
    fails = pytest.raises(ConfigError) if expected == "error" else nullcontext()
    with caplog.at_level("WARNING"), fails as raised:
        imports.require_release(on_cuda=on_cuda)
    said = caplog.text if raised is None else str(raised.value)
    assert bool(said) == bool(expected)
    if expected:
        assert "python -m pip install megatron-core==0.16.1" in said
        assert (release or "unknown release") in said


def test_a_missing_megatron_core_is_an_error_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(imports, "version", version)
    monkeypatch.setattr(imports, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^megatron-core is not installed: python -m pip"):
        imports.require_release(on_cuda=True)
