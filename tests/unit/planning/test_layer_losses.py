"""The planned work of losses between layers against built ones: products, bytes and calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from megatron_distill.losses.features import (
    AttentionInputs,
    AttentionLoss,
    FeatureLoss,
    Projector,
    ScoreRule,
    add_gradients,
)
from megatron_distill.planning.calibration.machine import _ElementsOfLayer
from megatron_distill.planning.losses.layer_work import (
    TOUCHED,
    Heads,
    PairWork,
    PassWork,
    map_work,
    state_work,
)
from megatron_distill.runtime.segments import Segments

DTYPES = {2: torch.bfloat16, 4: torch.float32}
# Operations that touch no number, or whose numbers are those of a product.
_NOT_COUNTED = ("empty", "detach", "unsafe_view", "mm", "addmm", "bmm", "promote_types")


class TouchedBytes(TorchDispatchMode):
    """Counts the bytes that operations read and write, without products and views."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema, name = func._schema, func.overloadpacket.__name__
        changed = [one.alias_info for one in schema.arguments]
        is_written = any(one is not None and one.is_write for one in changed)
        is_view = not is_written and any(one.alias_info is not None for one in schema.returns)
        if is_view or name.lstrip("_").startswith(_NOT_COUNTED):
            return result
        parts = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if name not in ("copy_", "zero_", "fill_"):
            parts += [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.total += sum(map(_bytes, parts))
        return result


def _bytes(tensor: Tensor) -> int:
    """The numbers of a tensor, repeated ones once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def counted(work: Callable[[], object]) -> tuple[int, int, int]:
    """FLOPs, touched bytes and calls of torch."""
    with FlopCounterMode(display=False) as flops:
        work()
    with TouchedBytes() as touched:
        work()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        work()
    calls = sum(one.count for one in record.key_averages() if one.key.startswith("aten::"))
    return flops.get_total_flops(), touched.total, calls


def check(planned: PassWork, work: Callable[[], object]) -> None:
    flops, byte_count, calls = counted(work)
    assert planned.flops == flops
    assert planned.byte_count == pytest.approx(byte_count, rel=0.05)
    assert planned.calls == pytest.approx(calls, rel=0.1)


def check_both(
    planned: PairWork,
    value: Callable[[], object],
    gradients: Callable[..., tuple[Tensor, ...]],
    tensors: tuple[Tensor, ...],
) -> None:
    """A loss, and its gradient that is added to the one of the tensors it was computed from."""
    check(planned.value, value)
    leaves = tuple(tensor.clone().requires_grad_() for tensor in tensors)
    passed = add_gradients(leaves, gradients)
    above = [tensor.detach() for tensor in passed]
    check(
        planned.gradient,
        lambda: torch.autograd.grad(passed, leaves, above, retain_graph=True),
    )


def test_the_measured_layer_of_a_cpu_touches_more_than_a_plan_counts() -> None:
    """The rate of a CPU's memory is over planned bytes, and those of these losses are touched."""
    layer = _ElementsOfLayer(16, torch.float32, torch.device("cpu"))
    layer()
    with TouchedBytes() as touched:
        layer()
    assert touched.total / (3 * layer.moved) == pytest.approx(TOUCHED, rel=0.01)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("sizes", [(96,), (128, 96), (64, 160, 96)], ids=str)
@pytest.mark.parametrize("loss", ["mse", "cosine"])
def test_a_loss_between_states_has_the_planned_work(
    loss: str, sizes: tuple[int, ...], width: int
) -> None:
    tokens, dtype = 2048, DTYPES[width]
    hidden = torch.randn(tokens, sizes[0]).to(dtype)
    projector = None
    if len(sizes) > 1:
        projector = Projector(sizes, device=torch.device("cpu"))
        for parameter in projector.parameters():
            parameter.grad = torch.zeros_like(parameter)
    teacher = torch.randn(tokens, sizes[-1]).to(dtype)
    built = FeatureLoss(loss, teacher, torch.rand(tokens), projector)
    check_both(
        state_work(loss, tokens, sizes, width=width),
        lambda: built.value(hidden),
        lambda given: (built.gradient(given, coefficient=0.5),),
        (hidden,),
    )


@pytest.mark.parametrize(("blocks", "width"), [(1, 2), (3, 4)])
@pytest.mark.parametrize(
    ("student", "teacher", "context"),
    [
        (Heads(4, 2, 16), Heads(4, 2, 16), 1),
        (Heads(8, 2, 16), Heads(4, 4, 32, is_capped=True), 1),
        (Heads(2, 1, 32, is_capped=True), Heads(6, 2, 8), 2),
    ],
    ids=str,
)
def test_a_loss_between_maps_has_the_planned_work(
    student: Heads,
    teacher: Heads,
    context: int,
    blocks: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the first context rank; in blocks of queries that end within a part of the sequence."""
    length, batch, dtype = 192, 2, DTYPES[width]
    queries = length // context
    rows = -(-queries // blocks)
    most = max(student.queries, teacher.queries)
    for module in ("losses.features", "planning.losses.layer_work"):
        monkeypatch.setattr(
            f"megatron_distill.{module}._BLOCK_BYTES", rows * 4 * most * batch * length
        )

    def inputs(heads: Heads) -> AttentionInputs:
        rule = ScoreRule(heads.size**-0.5, 30.0 if heads.is_capped else None, heads.queries)
        query = torch.randn(queries, batch, heads.queries, heads.size).to(dtype)
        key = torch.randn(length, batch, heads.groups, heads.size).to(dtype)
        return AttentionInputs(query, key, rule)

    own = inputs(student)
    visible = (
        Segments.whole(batch, length).sharded(0, context).key_ranges(None, torch.device("cpu"))
    )
    built = AttentionLoss(
        inputs(teacher), torch.rand(queries, batch), visible, own.rule, group=None
    )
    check_both(
        map_work(student, teacher, batch=batch, length=length, context=context, width=width),
        lambda: built.value(own.query, own.key),
        lambda query, key: built.gradients(query, key, coefficient=0.5),
        (own.query, own.key),
    )
