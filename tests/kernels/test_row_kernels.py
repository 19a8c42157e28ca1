"""The row kernels in Triton's interpreter, on a GPU, and compiled for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron_distill.ops.kernels import kernels_run

pytest.importorskip("triton", reason="the kernels need Triton")

ROOT = Path(__file__).parents[2]
CASES = "tests/kernels/row_kernel_cases.py"
PYTEST = ("-m", "pytest", "-p", "no:cacheprovider", "-q")
SECONDS = 1500
# Each case compiles its own kernels, which takes longer than to run them.
PROCESSES = ("-n", str(min(8, os.cpu_count() or 1))) if find_spec("xdist") else ()


def child(
    *words: str, interpreted: bool, cache: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """A Python of its own: Triton is the interpreter or the compiler from its first import on."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0"}
    if cache is not None:
        environment["TRITON_CACHE_DIR"] = str(cache)
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_the_choice_follows_device_dtype_and_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert kernels_run(cuda, dtype)
        assert not kernels_run(cpu, dtype)
    assert not kernels_run(cuda, torch.float64)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels_run(cpu, torch.float32)
    assert not kernels_run(cpu, torch.float64)


def assert_passed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("some", ["not slow and not gpu", "slow"])
def test_interpreted(some: str) -> None:
    assert_passed(child(*PYTEST, "-m", some, CASES, interpreted=True))


@pytest.mark.slow
def test_degenerate_rows_interpreted() -> None:
    file = "tests/unit/losses/test_degenerate_rows.py"
    assert_passed(child(*PYTEST, file, interpreted=True))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    words = (*PYTEST, *PROCESSES, "-m", "slow or not slow", CASES)
    assert_passed(child(*words, interpreted=False))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["80", "90"])
def test_kernels_compile_and_fuse_no_product_with_a_difference(
    architecture: str, tmp_path: Path
) -> None:
    words = ("-m", "tests.kernels.compile_kernels", architecture)
    done = child(*words, interpreted=False, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout)
    assert len(kernels) == 2 * 8
    for kernel in kernels:
        assert kernel["bytes"] > 0
        # Those within a logarithm flush to zero; ours would not.
        words = kernel["instructions"]
        assert "fma.rn.f32" not in words, kernel
        assert not any(word.startswith("ld.local") for word in words), kernel
