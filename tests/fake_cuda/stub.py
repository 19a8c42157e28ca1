"""The part of the fake device that torch wants in machine code."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stub.cpp")
COMPILER = shutil.which("c++") or shutil.which("g++")
SECONDS = 300


def compile_stub(folder: Path) -> Path:
    """Compile the stub against this torch; to be loaded before torch is."""
    import torch
    from torch.utils.cpp_extension import include_paths

    assert COMPILER is not None
    libraries = Path(torch.__file__).parent / "lib"
    library = folder / "fake_cuda.so"
    command = [COMPILER, "-std=c++20", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return library
