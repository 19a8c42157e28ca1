"""The report of a step is the sum over the global batch, whatever part of it a rank has.

Tensor ranks hold copies, context ranks parts of samples, pipeline stages but the last nothing.
Shares are integers, so that fp32 sums are exact in every order.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest
import torch

from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow

NAMES = ("ce", "kd", "top1_agreement", "forward_kl_t2")
SOURCES = ("web", "code")
MICRO_BATCHES, PARTS = 8, 4  # of one sample each, in parts of its positions
# fp32 shares of the global batch: [micro-batches, parts of a sample, names, 1 + sources]
SHARES = torch.randint(
    -1000, 1000, (MICRO_BATCHES, PARTS, len(NAMES), 1 + len(SOURCES)),
    generator=torch.Generator().manual_seed(5),
).float()  # fmt: skip


def reduced(
    rank: int, world: int, layout: Mapping[str, int], size: int, has_sources: bool
) -> dict[str, float]:
    """This rank's reduced report, of micro-batches of `size` samples."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.metrics import BY_SOURCE, source_keys, split_report
        from megatron_distill.train.objective import reduce_report

        replicas, parts = groups.data.size(), groups.context.size()
        own = SHARES[groups.data.rank() :: replicas, groups.context.rank() :: parts].sum(1)
        reports = []
        for batch in own.split(size) if groups.is_last_stage else ():
            entries = dict(zip(NAMES, batch.sum(0).unbind(), strict=True))
            reports.append(split_report(entries, NAMES))
        if not has_sources:
            reports = [{name: one[name] for name in NAMES} for one in reports]
        keys = source_keys(NAMES, SOURCES) if has_sources else ()
        assert not reports or (BY_SOURCE in reports[0]) == has_sources
        found = reduce_report(
            reports, names=NAMES, groups=groups, device=torch.device("cpu"), source_names=keys
        )
        return {name: float(value) for name, value in found.items()}


LAYOUTS: dict[str, tuple[int, Mapping[str, int]]] = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "CP2": (2, {"context": 2}),
    "DP2": (2, {}),
    "TP2xPP2": (4, {"tensor": 2, "pipeline": 2}),
    "TP2xCP2": (4, {"tensor": 2, "context": 2}),
    "CP2xDP2": (4, {"context": 2}),
    "PP2xCP2": (4, {"pipeline": 2, "context": 2}),
    "CP4": (4, {"context": 4}),
}


@pytest.mark.parametrize("layout", quick_and_slow(LAYOUTS, ("TP2", "CP2", "PP2xCP2")))
def test_every_figure_is_the_sum_over_the_global_batch_on_every_rank(
    pool: Pool, layout: str
) -> None:
    world, groups = LAYOUTS[layout]
    whole = SHARES.sum((0, 1))
    for size, has_sources in product((1, 2), (True, False)):
        expected = dict(zip(NAMES, whole[:, 0].tolist(), strict=True))
        if has_sources:
            for name, row in zip(NAMES, whole[:, 1:].tolist(), strict=True):
                expected |= {
                    f"{name}@{source}": one for source, one in zip(SOURCES, row, strict=True)
                }
        answers = pool.run(world, reduced, groups, size, has_sources)
        assert answers == [expected] * world
