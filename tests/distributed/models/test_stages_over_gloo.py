"""Stages on GPUs with gloo, which would read a GPU's addresses as the host's."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megatron_distill.errors import ConfigError
from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool


def refused(rank: int, world: int) -> bool:
    with patch.object(torch.cuda, "is_initialized", lambda: True):
        with megatron_groups(tensor=2) as groups:
            assert groups.tensor.size() == 2  # sums are copied to the host
        with (
            pytest.raises(ConfigError, match=r"parallel\.pipeline = 2: with runtime\.backend = "),
            megatron_groups(pipeline=2),
        ):
            pass
    return True


def test_stages_on_gpus_with_gloo_are_refused(pool: Pool) -> None:
    assert pool.run(2, refused) == [True, True]
