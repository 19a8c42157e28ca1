"""Files of a Hugging Face folder besides weights: configuration, tokenizer, generation settings.

A checkpoint made from such a folder contains copies, so that the export does not need the original.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.family import SPECIAL_TOKENS, Family, families

ASSETS_FOLDER = "hugging_face"
CONFIG_FILE = "config.json"
TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_GENERATION_FILE = "generation_config.json"
# Written by the family, or valid for the original's files only.
_NOT_CARRIED = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "partial_rotary_factor",
        "rope_local_base_freq",
        "rope_scaling",
        "rope_theta",
        "sliding_window_pattern",
        "torch_dtype",
        "transformers_version",
    }
)


def copy_assets(source: Path, destination: Path) -> None:
    """Copy configuration, tokenizer and generation settings of a folder; raises OSError."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG_FILE, _GENERATION_FILE):
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    copy_tokenizer(source, destination)


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer files of a folder; raises OSError."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def carried_entries(assets: Path, family: Family) -> dict[str, Any]:
    """Return entries of the original's config.json that the weights' shapes do not determine.

    From an original of another family, only the special tokens.
    """
    original = _original(assets)
    if original.get("model_type") != family.model_type:
        return {key: original[key] for key in SPECIAL_TOKENS if key in original}
    return {key: value for key, value in original.items() if key not in _NOT_CARRIED}


def _original(assets: Path) -> dict[str, Any]:
    """Return the entries of the original's config.json; raises CheckpointError."""
    path = assets / CONFIG_FILE
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); restore or remove it") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is damaged: not a JSON object; restore or remove it")
    return entries


def choose_family(architecture: Architecture, assets: Path, *, wanted: str | None) -> Family:
    """Return the family for the export: `wanted`, else the original's, else the first possible.

    Raises CheckpointError, with each family's reasons, if none can express the architecture.
    """
    known = families()
    if wanted is not None and wanted not in known:
        raise CheckpointError(f"--family {wanted}: not known; known are {', '.join(known)}")
    model_type = _original(assets).get("model_type")
    candidates = [known[wanted]] if wanted else list(known.values())
    candidates.sort(key=lambda family: family.model_type != model_type)
    reasons = []
    for family in candidates:
        try:
            family.config(architecture, carried_entries(assets, family))
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return family
    raise CheckpointError("no supported family matches this model:\n  " + "\n  ".join(reasons))


def weights_dtype(folder: Path) -> str | None:
    """The type of a folder's weights as torch spells it, from config.json or else from the files.

    None: neither tells.
    """
    with suppress(CheckpointError):
        entries = _original(folder)
        for found in (entries, entries.get("text_config")):
            stated = isinstance(found, Mapping) and (found.get("dtype") or found.get("torch_dtype"))
            if isinstance(stated, str) and stated != "auto":
                return stated.removeprefix("torch.")
    from megatron_distill.models.hugging_face.safetensors_files import SafetensorsFolder

    with suppress(CheckpointError):
        files = SafetensorsFolder(folder)
        return {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}.get(
            files.dtype(min(files.names)) if files.names else ""
        )
    return None


def write_config(
    folder: Path,
    family: Family,
    architecture: Architecture,
    *,
    carried: Mapping[str, Any],
    dtype: str,
) -> None:
    """Write config.json from the model itself; raises CheckpointError, OSError."""
    config = family.config(architecture, carried)
    config.dtype = dtype
    entries = config.to_diff_dict()
    entries |= _older_rope(entries.get("rope_parameters")) | {"torch_dtype": dtype}
    entries |= {older: entries[present] for older, present in family.older_entries.items()}
    text = json.dumps(entries, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text)


def _older_rope(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rotary entries in the form of `transformers` before release 5; later releases read both."""
    if rope is None:
        return {}
    entries: dict[str, Any] = {}
    if "full_attention" in rope:
        entries["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    entries["rope_theta"] = rope["rope_theta"]
    if rope["rope_type"] != "default":
        names = rope.keys() - {"rope_theta", "partial_rotary_factor"}
        entries["rope_scaling"] = {key: rope[key] for key in sorted(names)}
    if "partial_rotary_factor" in rope:
        entries["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return entries
