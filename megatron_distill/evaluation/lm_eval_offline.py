"""No downloads by lm-evaluation-harness; to be asked for before its packages are imported."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Final

__all__ = ["forbid_downloads"]

# Variables of huggingface_hub, which reads its own when it is imported, and of evaluate.
_HUB: Final = "HF_HUB_OFFLINE"
_OTHERS: Final = ("HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")


def forbid_downloads(environment: MutableMapping[str, str]) -> None:
    """Have the Hugging Face packages ask no server, unless the user's own variables say so.

    A user's `HF_HUB_OFFLINE` holds for the packages whose variables are not set.
    """
    wanted = environment.setdefault(_HUB, "1")
    for name in _OTHERS:
        environment.setdefault(name, wanted)
