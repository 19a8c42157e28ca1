"""Random states of a run: what must differ between ranks differs, everything else agrees."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)

from megatron_distill.runtime.groups import Groups

# Far apart, so that no stage's tensor-parallel or expert offsets meet another stage's.
_STAGE_STRIDE = 100_003
_DATA_STRIDE = 1_009


def seed_everything(seed: int, groups: Groups) -> None:
    """Seed every random state of this process; only dropout ever draws from them.

    Pipeline stages and data-parallel ranks draw different masks, tensor-parallel ranks the same
    ones where they hold the same activations and different ones where they hold shards.
    """
    own = seed + _STAGE_STRIDE * groups.pipeline.rank() + _DATA_STRIDE * groups.data_context.rank()
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
    model_parallel_cuda_manual_seed(own, force_reset_rng=True)


@contextmanager
def repeated_dropout() -> Iterator[None]:
    """Leave the random states as they were found, so that what follows draws the same masks."""
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    tracked = get_cuda_rng_tracker().get_states()
    try:
        yield
    finally:
        torch.set_rng_state(host)
        torch.cuda.set_rng_state(device)
        get_cuda_rng_tracker().set_states(tracked)
