"""The last message of a rank, in the file that torchrun reads at the end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

__all__ = ["tell_torchrun"]


def tell_torchrun(text: str) -> bool:
    """Give torchrun the message that its report ends with; return whether it will show it.

    It will not without torchrun, or if it is going to restart the ranks.
    """
    restarts, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", "0"))
        for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is None or restarts != most:
        return False
    details = {"py_callstack": text, "timestamp": str(int(time.time()))}
    try:
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))
    except OSError:
        return False
    return True
