"""A fake device for the programs of this package: python -m tests.fake_cuda STUB.

`tests.fake_cuda.forks` starts it and gives it work.
"""

import ctypes
import os
import sys

# torch keeps what it finds when it is loaded.
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would want the numbers

from tests.fake_cuda.forks import serve  # noqa: E402

serve()
