"""Errors that a user can cause and can repair.

Every message names the key or the file, the value found there, and what to change. Anything that
only the library itself can break is an ``assert`` instead.
"""

__all__ = [
    "FROM_THE_HUB",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MegatronDistillError",
    "StoreError",
    "TrainingError",
    "counted",
]

# Many programs take the name of a model on the Hub for a folder and download it; nothing here does.
FROM_THE_HUB = "`hf download OWNER/NAME --local-dir DIR` makes one of a model on the Hub"


class MegatronDistillError(Exception):
    """Base of every error that a user can repair."""


class ConfigError(MegatronDistillError):
    """A configuration key, its value, or a combination of keys is wrong."""


class DataError(MegatronDistillError):
    """A corpus file, a record in it, or a tokenizer is missing or malformed."""


class StoreError(MegatronDistillError):
    """A teacher store is missing, damaged, or does not belong to this run."""


class CheckpointError(MegatronDistillError):
    """A checkpoint is missing, damaged, or does not fit the model or the layout."""


class TrainingError(MegatronDistillError):
    """Training itself went wrong: losses or gradients that are not finite."""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun: "1 sample", "2 samples", "1,024 processes"."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"
