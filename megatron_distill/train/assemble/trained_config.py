"""The configuration of a trained run, changed to use its newest checkpoint."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from megatron_distill.config import (
    ModelConfig,
    RunConfig,
    TokenizerConfig,
    check_layout,
    config_of,
    load_config,
    own_layouts,
)
from megatron_distill.errors import CheckpointError, ConfigError

__all__ = [
    "NO_RUN",
    "STUDENT_ALONE",
    "add_run_arguments",
    "load_trained_run",
    "load_weights",
    "run_and_overrides",
    "weights_on",
    "weights_precision",
]

Precision = Literal["fp32", "bf16"]

NO_RUN = "give the output folder of a run, e.g. runs/first"

_TYPES: Final = {"fp32": "float32", "bf16": "bfloat16"}

# Overrides that leave the student of a run.
STUDENT_ALONE = ("teacher=null", "teachers=null", "objective.terms=[]")

# A checkpoint loads in any layout; a command without torchrun has one process.
_ONE_PROCESS = (
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.virtual_pipeline=null",
    "parallel.layers_per_stage={student: null, teacher: null}",
    "parallel.context=1",
    "parallel.expert=1",
    "parallel.sequence=false",
)
# These keys name the run's initial weights, not its trained ones.
_NO_OTHER_SOURCE = ("student.hf=null", "student.keep_layers=null", "student.num_layers=null")


def add_run_arguments(parser: argparse.ArgumentParser, *, example: str) -> None:
    """Add the arguments that name a run and changes to its configuration.

    The run is a positional argument because torchrun parses `--run` as an abbreviation of one of
    its own options, wherever it stands. `--run` remains for scripts started without torchrun.
    """
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RUN key=value",
        help=f"output folder of the student's run, then changes to its configuration, {example}",
    )
    parser.add_argument("--run", metavar="RUN", help="the same folder; not under torchrun")


def run_and_overrides(arguments: argparse.Namespace) -> tuple[str | None, list[str]]:
    """Return the run that `add_run_arguments` parsed, None where there is none, and its changes."""
    if arguments.run is not None:
        return arguments.run, list(arguments.words)
    return (arguments.words[0], arguments.words[1:]) if arguments.words else (None, [])


def load_trained_run(
    folder: str, overrides: Sequence[str], *, world_size: int, own: Sequence[str] = ()
) -> RunConfig:
    """Read `folder/config.yaml` with the run's own checkpoint as the student's weights.

    The layout is that of one process unless `overrides` name another. `own`: overrides of the
    command, before those of the user.

    Raises ConfigError if the folder is not that of a run, an override is wrong, or the layout does
    not fit `world_size`.
    """
    changes = [f"output={folder}", f"student.checkpoint={folder}", *_NO_OTHER_SOURCE]
    file = Path(folder) / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"{folder}: not a run folder (no config.yaml); {_instead(Path(folder))}")
    found = load_config(file, own=_ONE_PROCESS)
    changes += [f"{role}.parallel=null" for role, _ in own_layouts(found)]
    if (copy := _kept_tokenizer(found.data.tokenizer, folder)) is not None:
        changes.append(f"data.tokenizer.path={copy}")
    config = load_config(file, overrides, own=[*_ONE_PROCESS, *changes, *own])
    config = _with_shared_ranks(config)
    check_layout(config, world_size)
    return config


def _kept_tokenizer(named: TokenizerConfig, folder: str) -> Path | None:
    """Return the run's copy of its tokenizer where none is named, or the named one is gone.

    A relative path is gone when the command starts in another folder than the run did.
    """
    copy = Path(folder) / "hugging_face"
    if named.path is not None:
        is_gone = not Path(named.path).expanduser().exists()
        return copy if is_gone and copy.is_dir() else None
    return copy if named.encoding is None and named.train_vocab_size is None else None


def _instead(folder: Path) -> str:
    """Return what to give in place of a folder that is not a run's."""
    from megatron_distill.train.checkpoint.description import DESCRIPTION_FILE

    if (folder / "config.json").is_file():
        return f"it is a Hugging Face folder: give it as --hf {folder}"
    if (folder / DESCRIPTION_FILE).is_file():
        return f"it is a checkpoint: give it as --checkpoint {folder}"
    return NO_RUN


def load_weights(
    source: Mapping[str, str],
    overrides: Sequence[str],
    *,
    world_size: int,
    own: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration of weights without a run: `hf` or `checkpoint`, and its path.

    The tokenizer is that of the weights unless an override names another. `own`: overrides of the
    command, before those of the user. Raises ConfigError.
    """
    (kind, path) = next(iter(source.items()))
    named = any(word.startswith("data.tokenizer") for word in (*own, *overrides))
    content = {
        "student": dict(source),
        "data": {
            "sources": [{"format": "python_stdlib"}],
            "tokenizer": {} if named else {"path": _own_tokenizer(kind, path)},
            "sequence_length": 2 * world_size,
        },
        "train": {"steps": 1, "global_batch_size": world_size},
        "checkpoint": {"save": False},
        "output": path,
    }
    own = [*_ONE_PROCESS, *own]
    config = config_of(content, overrides, named=f"--{kind} {path}", own=own)
    check_layout(config, world_size)
    return config


def weights_precision(
    device: str, files: str | None, asked: Precision | None
) -> tuple[Precision, str | None]:
    """The precision of weights without a run, and why; None: as asked, or fp32 of a CPU.

    device: "cpu" or "cuda". files: type of the weights in their files, None if unknown. A GPU has
    16 bits, also of 32 in the files; fp16 becomes bf16, which has the range of fp32.
    """
    if asked is not None or device == "cpu":
        return asked or "fp32", None
    if files == "bfloat16":
        return "bf16", "as in its files"
    return "bf16", f"{files or 'an unknown type'} in its files"


def weights_on(config: RunConfig, device: str) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration of `load_weights` with the precision of a device, and what to say.

    A precision that an override set stays.
    """
    asked = config.train.precision if "precision" in config.train.model_fields_set else None
    files = None
    if asked is None and device != "cpu":
        files = _stored_type(config.student)
    precision, reason = weights_precision(device, files, asked)
    train = config.train.model_copy(update={"precision": precision})
    config = config.model_copy(update={"train": train})
    if reason is None:
        return config, ()
    source = config.student.hf or config.student.checkpoint
    return config, (f"{source}: read in {precision} ({reason}); for fp32 train.precision=fp32",)


def _stored_type(model: ModelConfig) -> str | None:
    """Return the type of the weights in their files as torch spells it; None: unknown."""
    from megatron_distill.models.hugging_face.assets import weights_dtype

    if model.hf is not None:
        return weights_dtype(Path(model.hf).expanduser())
    from megatron_distill.train.checkpoint.description import Description, resolve_checkpoint

    assert model.checkpoint is not None, "the weights are in one or the other"
    with suppress(CheckpointError):  # whoever reads the weights names it
        found = Description.read(resolve_checkpoint(model.checkpoint)).configuration
        return _TYPES.get(found.get("train", {}).get("precision"))
    return None


def _own_tokenizer(kind: str, path: str) -> str:
    """Return the folder of the tokenizer of weights; raises ConfigError."""
    if kind == "hf":
        return path
    # Of a run or an imported checkpoint, its folder `checkpoints`, or one of its checkpoints.
    places = (Path(path), Path(path).parent, Path(path).parent.parent)
    found = [place / "hugging_face" for place in places if (place / "hugging_face").is_dir()]
    if not found:
        raise ConfigError(
            f"--checkpoint {path}: no tokenizer is there; name one, data.tokenizer.path=DIR"
        )
    return str(found[0])


def _with_shared_ranks(config: RunConfig) -> RunConfig:
    """Let every teacher run on the ranks of the student."""
    names = ("ranks", "nodes", "steps_ahead", "transfer")
    shared = {name: ModelConfig.model_fields[name].default for name in names}
    update: dict[str, object] = {}
    if config.teacher is not None:
        update["teacher"] = config.teacher.model_copy(update=shared)
    if config.teachers is not None:
        update["teachers"] = {
            name: model.model_copy(update=shared) for name, model in config.teachers.items()
        }
    return config.model_copy(update=update)
