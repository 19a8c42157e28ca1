"""The head's gradient in Megatron's buffer: against autograd, and further tensors of its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.distributed.balanced_steps import (
    LENGTH,
    Case,
    balanced,
    build,
    formula,
    step_batches,
)
from tests.distributed.losses.test_balanced_step import assert_equal
from tests.distributed.megatron_world import megatron_groups
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow
from tests.reference.tracing import Watch

PIPELINE = (("pipeline", 2),)
VIRTUAL = (*PIPELINE, ("virtual_pipeline", 2))
LAYOUTS: dict[str, tuple[int, tuple[tuple[str, Any], ...]]] = {
    "one rank": (1, ()),
    "DP2": (2, ()),
    "TP2": (2, (("tensor", 2),)),
    "PP2": (2, PIPELINE),
    "PP2+virtual": (2, VIRTUAL),
    "PP2 x DP2": (4, PIPELINE),
}
# A layout, whether the head is that of the embedding, and whether gradients are reduced meanwhile.
CASES = {
    "one rank, tied": ("one rank", True, False),
    "one rank, tied, overlap": ("one rank", True, True),
    "DP2, overlap": ("DP2", False, True),
    "TP2, tied, overlap": ("TP2", True, True),
    "PP2+virtual, overlap": ("PP2+virtual", False, True),
    "PP2 x DP2, tied, overlap": ("PP2 x DP2", True, True),
    "TP2": ("TP2", False, False),
    "PP2, tied": ("PP2", True, False),
    "PP2+virtual, tied, overlap": ("PP2+virtual", True, True),
    "PP2 x DP2": ("PP2 x DP2", False, False),
}
QUICK = list(CASES)[:6]


@pytest.mark.parametrize("name", quick_and_slow(CASES, QUICK))
def test_every_gradient_is_autograds(pool: Pool, name: str) -> None:
    layout, tied, overlap = CASES[name]
    world, groups = LAYOUTS[layout]
    (oracle,) = pool.run(1, formula, Case(tied=tied), None)
    assert_equal(pool.run(world, balanced, Case(layout=groups, tied=tied, overlap=overlap)), oracle)


class NewMatrices(Watch):
    """Counts the storages of operator results with one shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        # Held, so that no address is taken twice.
        self.found: dict[int, torch.UntypedStorage] = {}

    def look(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.shape == self.shape:
                storage = leaf.untyped_storage()
                self.found[storage.data_ptr()] = storage


def matrices(rank: int, world: int, case: Case, wrapped: bool) -> int:
    """How many matrices of the head's size the objective makes of a micro-batch."""
    with megatron_groups(**dict(case.layout)) as groups:
        from megatron_distill.signals import DenseLogits

        student, _, objective, _ = build(case, groups)
        step = step_batches(case, rank=0, ranks=1, context=(0, 1))
        batch = step.micro_batches[0]
        weight = student.chunks[0].head_weight()
        hidden = torch.randn(LENGTH, 1, weight.shape[1], requires_grad=True)
        signal = DenseLogits(torch.randn(LENGTH, objective.shard.real_width))
        head = student.head
        known = {weight.data_ptr(), weight.main_grad.untyped_storage().data_ptr()}  # type: ignore[attr-defined]
        if not wrapped:
            del weight.main_grad  # type: ignore[attr-defined]
        with NewMatrices(weight.shape) as made:
            total, _ = objective(hidden, head, batch, signal, step)
            torch.autograd.grad(total, (hidden, weight), allow_unused=True)
        return len(made.found.keys() - known)


@pytest.mark.parametrize("overlap", [False, True])
def test_no_gradient_of_the_heads_size_is_made_beside_the_buffer(pool: Pool, overlap: bool) -> None:
    assert pool.run(1, matrices, Case(overlap=overlap), True) == [0]
    assert pool.run(1, matrices, Case(), False) == [1]
