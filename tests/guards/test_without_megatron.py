"""ops, signals, store, losses and data import where Megatron-Core is not installed."""

import subprocess
import sys

from tests.guards.source_tree import PACKAGE, ROOT, read_sources

ROOMS = ("ops", "signals", "store", "losses", "data")

# Triton is not on every machine; its kernels are behind a fence of their own.
PROBE = """
import importlib, importlib.util, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "megatron":
            raise ModuleNotFoundError(f"refused: {name}", name=name)

sys.meta_path.insert(0, Refuse())
has_triton = importlib.util.find_spec("triton") is not None
for name in sys.argv[1:]:
    if has_triton or ".ops.kernels." not in name:
        importlib.import_module(name)
"""


def test_the_lower_floors_import_without_megatron():
    modules = [s.module for s in read_sources(ROOT, (PACKAGE,)) if s.room in ROOMS]
    assert modules, "at least one of the rooms is there"
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
