"""A finished checkpoint on disk: its place, its description, and the model that it is of.

No tensor is read, and neither torch nor Megatron-Core is imported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megatron_distill.errors import CheckpointError
from megatron_distill.models.architecture import Architecture, architecture_differences
from megatron_distill.models.hugging_face.assets import ASSETS_FOLDER
from megatron_distill.runtime.atomic_files import write_flushed

__all__ = [
    "COMMON_FILE",
    "DESCRIPTION_FILE",
    "USE_ANOTHER",
    "Description",
    "assets_of",
    "check_same_model",
    "complete_checkpoints",
    "resolve_checkpoint",
    "resumed_description",
    "resumed_from",
    "saved_architecture",
]

# Megatron-Core's COMMON_STATE_FNAME.
COMMON_FILE: Final = "common.pt"

_FINISHED = re.compile(r"step_(\d{7,})")


_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


DESCRIPTION_FILE = "description.json"

# How an error of a damaged checkpoint ends; `resumed_from` has another end for a resume.
USE_ANOTHER: Final = "use another checkpoint"
_NAME_ANOTHER: Final = "name a run's output folder or one of its checkpoints/step_* folders"


@dataclass(frozen=True)
class Description:
    """Description of a checkpoint, readable without Megatron: `description.json` in its folder."""

    step: int
    tokens: int
    bad_steps: int
    architecture: dict[str, object]
    tokenizer: str  # content hash
    layout: str  # of the run that wrote it
    data: dict[str, Any]  # the loader's position
    balance: dict[str, Any] = field(default_factory=dict)  # running means of the losses
    # The feature losses and their projectors; None: none.
    features: dict[str, Any] | None = None
    # The settings of the run that wrote it; empty in imports and in older versions' checkpoints.
    configuration: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] | None = None  # see `Best`; None: the run keeps no best checkpoint
    save_seconds: float | None = None  # from the start of the save to the complete folder

    def write(self, folder: Path) -> None:
        """Write the file and flush it to disk."""
        write_flushed(folder / DESCRIPTION_FILE, json.dumps(vars(self), indent=1).encode())

    @classmethod
    def read(cls, folder: Path) -> Description:
        """Read the description of a complete checkpoint; raises CheckpointError."""
        path = folder / DESCRIPTION_FILE
        try:
            found = cls(**json.loads(path.read_text()))
            if not isinstance(found.architecture, dict):
                raise TypeError("its architecture is not an object")
        except FileNotFoundError:
            raise CheckpointError(
                f"{folder} is not a checkpoint: it has no {DESCRIPTION_FILE}; {_NAME_ANOTHER}"
            ) from None
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged ({error}); {USE_ANOTHER}") from None
        return found


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints of a folder, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _FINISHED.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def resolve_checkpoint(path: str) -> Path:
    """Return the checkpoint folder for a user's path: the path itself, or the newest of a run.

    Raises CheckpointError when there is none.
    """
    given = Path(path)
    for root in (given / "checkpoints", given):
        complete = complete_checkpoints(root)
        if complete:
            return complete[-1]
    if (given / DESCRIPTION_FILE).is_file():
        return given
    _refuse_pickle(given)
    raise CheckpointError(
        f"{path} contains no complete checkpoint; name the output folder of a run or one of its "
        "checkpoints/step_* folders"
    )


@contextmanager
def resumed_from(folder: Path) -> Iterator[None]:
    """Give the errors of a damaged checkpoint a remedy for a run that resumes from its newest one.

    No option chooses another one. The block must not communicate. Raises CheckpointError.
    """
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        end = next((one for one in (USE_ANOTHER, _NAME_ANOTHER) if text.endswith(one)), None)
        if end is None:
            raise
        complete = complete_checkpoints(folder.parent)
        before = complete[: complete.index(folder)][-1:] if folder in complete else complete[-1:]
        place = f"resume from {before[0].name}" if before else "start from step 0"
        remedy = f"remove or rename {folder} to {place}"
        raise CheckpointError(text.removesuffix(end) + remedy) from error


def resumed_description(folder: Path) -> Description:
    """Return the description of the checkpoint that a run resumes from; raises CheckpointError."""
    with resumed_from(folder):
        return Description.read(folder)


def _refuse_pickle(given: Path) -> None:
    """Raise CheckpointError for unsharded checkpoints, such as those of old Megatron-LM."""
    globs = (f"{folder}*{suffix}" for folder in ("", "*/", "*/*/") for suffix in _PICKLES)
    found = (path for glob in globs for path in sorted(given.glob(glob)))
    # A partial checkpoint of this library, left by a killed run, contains one such pickle.
    strange = (path for path in found if path.name != COMMON_FILE)
    pickle = given if given.suffix in _PICKLES else next(strange, None)
    if pickle is not None and pickle.is_file():
        raise CheckpointError(
            f"{pickle} is a pickle, which can run code when it is read, and is refused. Convert "
            "the model to safetensors where it was made, and import that"
        )


def assets_of(checkpoint: Path) -> Path:
    """Return the folder of the Hugging Face files of a checkpoint or of its run."""
    own = checkpoint / ASSETS_FOLDER
    return own if own.is_dir() else checkpoint.parent.parent / ASSETS_FOLDER


def saved_architecture(description: Description, folder: Path) -> Architecture:
    """Return the architecture of a checkpoint; fields unknown to older releases get defaults.

    Raises CheckpointError for field names of a different release.
    """
    try:
        return Architecture.from_dict(description.architecture)
    except TypeError as error:
        raise CheckpointError(
            f"{folder}: the architecture in its description is of another release ({error}); "
            "use the release that wrote it"
        ) from error


def check_same_model(
    description: Description, architecture: Architecture, tokenizer_hash: str, folder: Path
) -> None:
    """Raise CheckpointError when a checkpoint has a different architecture or tokenizer."""
    differences = architecture_differences(saved_architecture(description, folder), architecture)
    if differences:
        raise CheckpointError(
            f"{folder} is a checkpoint of another model (checkpoint vs configuration): "
            f"{'; '.join(differences)}; change the architecture, or `output` to start a run of "
            "its own"
        )
    # Weights may have been imported without a tokenizer.
    if description.tokenizer and description.tokenizer != tokenizer_hash:
        raise CheckpointError(
            f"{folder} was trained with another tokenizer ({description.tokenizer[:12]}, not "
            f"{tokenizer_hash[:12]}); set data.tokenizer.path to that one"
        )
