"""The description of a checkpoint, which is read without Megatron-Core."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_distill.errors import CheckpointError
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.train.checkpoint.description import COMMON_FILE, resolve_checkpoint

prepare_megatron_core(on_cuda=False)

from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME  # noqa: E402


def test_the_common_file_has_the_name_that_megatron_core_gives_it() -> None:
    assert COMMON_FILE == COMMON_STATE_FNAME


def test_a_pickle_is_refused_and_the_common_file_of_a_partial_checkpoint_is_none(
    tmp_path: Path,
) -> None:
    partial = tmp_path / "step_0000002.partial"
    partial.mkdir()
    (partial / COMMON_FILE).write_bytes(b"")
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        resolve_checkpoint(str(tmp_path))
    (partial / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.pt is a pickle"):
        resolve_checkpoint(str(tmp_path))
