"""Errors that a user can cause and can repair.

Every message names the key or the file, the value found there, and what to change. Anything that
only the library itself can break is an ``assert`` instead.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "MegatronDistillError",
    "StoreError",
    "TrainingError",
]


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
