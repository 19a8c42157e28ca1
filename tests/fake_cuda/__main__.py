"""One rank's work on the fake device; prints what was seen of it as JSON.

python -m tests.fake_cuda STUB PROGRAM RANK WORLD SUBJECT [OVERRIDE ...]

PROGRAM is train, fused, capture, generate or benchmark.
"""

import ctypes
import importlib
import os
import sys

# torch keeps what it finds when it is loaded.
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would want the numbers

program = importlib.import_module(f"tests.fake_cuda.{sys.argv[2]}")
program.main(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6:])
