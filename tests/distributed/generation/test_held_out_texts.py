"""Texts of held-out batches: samples that fill up the last one are none."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool
from tests.support.store_samples import settings, tokens_of


def texts_of(rank: int, world: int, filled: bool, isolated: bool) -> tuple[Any, str]:
    """Prompts and digest of three samples, in a batch that is filled up with a fourth or not.

    The fourth has the number of the second, as the records of a store may.
    """
    from megatron_distill.data.collation import micro_batch, pack_samples
    from megatron_distill.data.samples import Sample, untrained_like
    from megatron_distill.runtime.batch import StepBatches
    from megatron_distill.train.evaluation.teacher_text import held_out_prompts
    from megatron_distill.train.evaluation.text_hash import hash_of_held_out

    wanted = settings(vocab_size=40)
    samples = [Sample(**tokens_of(number, wanted), sample_id=number) for number in range(3)]
    samples += [untrained_like(samples[0], 1)] * filled
    batch = micro_batch(pack_samples(samples), slice(0, len(samples)), isolate_documents=isolated)
    steps = [StepBatches((batch,), 1.0, 1.0, batch.tokens_bs.numel())]
    with megatron_groups() as groups:
        return held_out_prompts(steps, groups, most=8), hash_of_held_out(steps, groups)


@pytest.mark.parametrize("isolated", [True, False])
def test_samples_that_fill_up_a_batch_are_no_texts(pool: Pool, isolated: bool) -> None:
    (plain,) = pool.run(1, texts_of, False, isolated)
    (filled,) = pool.run(1, texts_of, True, isolated)
    assert len(plain[0]) == 3
    assert filled == plain
