"""Stages on GPUs with gloo, which would read a GPU's addresses as the host's."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from megatron_distill.errors import ConfigError
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool


def refused(rank: int, world: int) -> bool:
    prepare_megatron_core(on_cuda=False)
    from megatron_distill.runtime.groups import Layout, create_second_groups

    with patch.object(torch.cuda, "is_initialized", lambda: True):
        with megatron_groups(tensor=2) as groups:
            assert groups.tensor.size() == 2  # sums are copied to the host
        with (
            pytest.raises(ConfigError, match=r"parallel\.pipeline = 2: with runtime\.backend = "),
            megatron_groups(pipeline=2),
        ):
            pass
        with pytest.raises(ConfigError, match="a teacher's `parallel`: with runtime"):
            create_second_groups(Layout(), timeout_minutes=5)
    return True


def test_stages_on_gpus_with_gloo_are_refused(pool: Pool) -> None:
    assert pool.run(2, refused) == [True, True]
