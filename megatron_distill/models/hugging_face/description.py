"""The description of a Hugging Face model: its config.json as an architecture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_distill.errors import FROM_THE_HUB, CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.family import Family, family_named
from megatron_distill.models.hugging_face.settings import config_errors, one_line
from megatron_distill.models.hugging_face.written import written_architecture

__all__ = ["ModelDescription", "describe", "describe_for_plan"]


@dataclass(frozen=True)
class ModelDescription:
    """The configuration of a Hugging Face folder as an architecture."""

    family: Family
    architecture: Architecture


def describe(folder: Path) -> ModelDescription:
    """Read config.json with `transformers`.

    Raises CheckpointError: no such file, an unknown family, or an unsupported value.
    """
    path = folder / "config.json"
    family, _ = _family(path)
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        return ModelDescription(family, family.architecture(config))
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except config_errors() as error:
        raise CheckpointError(f"{path}: {one_line(error)}; correct it") from error


def describe_for_plan(folder: Path) -> ModelDescription:
    """Read config.json as `describe`, without `transformers` where its entries suffice.

    They are not all checked, so that a model that is built needs `describe`.
    """
    family, entries = _family(folder / "config.json")
    shape = written_architecture(family, entries)
    return describe(folder) if shape is None else ModelDescription(family, shape)


def _family(path: Path) -> tuple[Family, dict[str, Any]]:
    """Return the family of a config.json and its entries."""
    entries = _entries(path)
    if entries.get("kv_lora_rank"):
        raise CheckpointError(
            f"{path}: kv_lora_rank is {entries['kv_lora_rank']!r}: latent attention (MLA, of "
            "DeepSeek-V2 and V3) is not implemented; choose a model without it"
        )
    family = family_named(entries.get("model_type"), where=str(path))
    if entries.get("quantization_config"):
        raise CheckpointError(
            f"{path}: quantization_config is set, so the weights are quantised; use the "
            "unquantised weights"
        )
    return family, entries


def _entries(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path}: no such file; name a folder with a Hugging Face model ({FROM_THE_HUB})"
        ) from None
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: not a configuration ({error}); copy it again") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: not a configuration; copy it again")
    return entries
