"""The configuration of a run that has been trained, to work with its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_distill.config import RunConfig, check_layout, load_config

__all__ = ["load_trained_run"]

# A checkpoint is read in any layout; one process is what a call without torchrun has.
_ONE_PROCESS = (
    "parallel.tensor=1",
    "parallel.pipeline=1",
    "parallel.virtual_pipeline=null",
    "parallel.context=1",
    "parallel.expert=1",
    "parallel.sequence=false",
)
# What the run started from is not what it has become.
_NO_OTHER_SOURCE = ("student.hf=null", "student.keep_layers=null", "student.num_layers=null")


def load_trained_run(folder: str, overrides: Sequence[str], *, world_size: int) -> RunConfig:
    """Read `folder/config.yaml` with the run's own checkpoint as the student's weights.

    The layout is that of one process unless `overrides` name another.

    Raises ConfigError if the folder is not that of a run, an override is wrong, or the layout does
    not fit `world_size`.
    """
    own = [f"output={folder}", f"student.checkpoint={folder}", *_NO_OTHER_SOURCE]
    file = Path(folder) / "config.yaml"
    tokenizer = load_config(file, _ONE_PROCESS).data.tokenizer
    if tokenizer.path is None and tokenizer.encoding is None and tokenizer.train_vocab_size is None:
        own.append(f"data.tokenizer.path={Path(folder) / 'hugging_face'}")
    config = load_config(file, [*_ONE_PROCESS, *own, *overrides])
    check_layout(config, world_size)
    return config
