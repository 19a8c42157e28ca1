"""One rank's training on the fake device; prints what was seen of its steps as JSON.

python -m tests.fake_cuda STUB RANK WORLD CONFIG [KEY=VALUE ...]
"""

import ctypes
import os
import sys

# torch keeps what it finds when it is loaded.
ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compiled code would want the numbers

from tests.fake_cuda.train import main  # noqa: E402

main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:])
