"""The configuration keys that decide a store's plan, for messages."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["KEYS", "configured"]

# Configuration keys by field of the plan; the remaining fields have no key.
KEYS: Final = {
    "samples": "store.samples",
    "samples_per_shard": "store.samples_per_shard",
    "capture.codec": "store.codec",
    "capture.k": "store.k",
    "capture.mode": "store.mode",
    "capture.sampling_seed": "seed",
    "capture.sequence_length": "data.sequence_length",
    "capture.temperatures": "store.temperatures",
    "capture.top_p": "store.top_p",
    "identity.settings.precision": "capture.precision",
}
# Exceptions among the dataset's settings: the remaining ones are keys of `data`.
_DATASET: Final = "identity.settings.dataset."
_DATASET_KEYS: Final = {"seed": "seed"}
_SOURCE_KEYS: Final = {
    "share": "weight",
    "files": "paths",
    "conversation.prompt_keys": "conversation.prompt_key",
}
# Descriptions of digests and names that no single key decides.
WORDS: Final = {
    "capture.vocab_size": "the number of the tokenizer's tokens",
    "identity.teacher": "the digest of the teacher's weights",
    "identity.tokenizer": "the digest of the tokenizer",
    "identity.dataset": "the digest of data and tokenizer",
    "identity.settings.teacher": "the name of the teacher's folder",
    "identity.settings.version": "the release of megatron-distill",
}


def configured(name: str) -> str:
    """Return the configuration key of a field of a store's plan, or a description of it."""
    if name.startswith(_DATASET):
        setting = name.removeprefix(_DATASET)
        source = re.fullmatch(r"sources\.(\d+)\.(.+)", setting)
        if source is None:
            return _DATASET_KEYS.get(setting, f"data.{setting}")
        number, part = source.groups()
        return f"data.sources.{number}.{_SOURCE_KEYS.get(part, part)}"
    return KEYS.get(name) or WORDS.get(name, name)
