"""Every attention kernel against a masked softmax in float64, with gradients."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.attention import varlen as torch_varlen

from megatron_distill.models.attention_kernels import blocked, flex, tiles, varlen
from megatron_distill.models.attention_kernels.choice import kernel_for
from megatron_distill.models.attention_kernels.rule import AttentionRule
from megatron_distill.runtime.batch import zigzag_index
from megatron_distill.runtime.segments import Segments
from tests.reference.attention import (
    blockwise_gradients,
    documented_varlen_attn,
    masked_attention,
    visible_keys,
)

Attend = Callable[[Tensor, Tensor, Tensor, Segments, AttentionRule], Tensor]
SCALE = 0.4


@dataclass(frozen=True)
class Case:
    """A micro-batch on one context rank, and the score rule of a layer."""

    bounds: tuple[tuple[int, ...], ...]
    window: int | None = None
    softcap: float | None = None
    groups: int = 2
    repeats: int = 2
    rank: int = 0
    size: int = 1
    head_size: int = 4

    @property
    def segments(self) -> Segments:
        whole = Segments(self.bounds)
        return whole.sharded(self.rank, self.size).to("cpu")

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(SCALE, softcap=self.softcap, window=self.window)

    @property
    def document_ids(self) -> Tensor:
        ids = torch.zeros(len(self.bounds), self.bounds[0][-1], dtype=torch.int64)
        for row, bound in enumerate(self.bounds):
            for start in bound[1:-1]:
                ids[row, start:] += 1
        return ids

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """Queries, keys, values, and the gradient of the result."""
        generator = torch.Generator().manual_seed(1)
        length, b = self.bounds[0][-1], len(self.bounds)
        n, g, d = self.groups * self.repeats, self.groups, self.head_size
        shapes = ((length // self.size, b, n, d), (length, b, g, d), (length, b, g, d))
        made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        made.append(torch.randn(shapes[0], generator=generator, dtype=torch.float64))
        return [x.to(dtype) for x in made]

    def definition(self, dtype: torch.dtype = torch.float64) -> list[Tensor]:
        """The result and its gradients, in float64, from inputs rounded to a dtype."""
        query, key, value, gradient = (x.double() for x in self.tensors(dtype))
        index_s = zigzag_index(self.bounds[0][-1], rank=self.rank, size=self.size)
        visible = visible_keys(self.document_ids, index_s, self.window)
        attend = partial(masked_attention, visible_bsS=visible, scale=SCALE, softcap=self.softcap)
        return results(attend, [query, key, value], gradient)


def results(attend: Callable[..., Tensor], inputs: list[Tensor], gradient: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def found(
    attend: Attend, case: Case, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> list[Tensor]:
    *inputs, gradient = (x.to(device) for x in case.tensors(dtype))
    with_case = partial(attend, segments=case.segments.to(device), rule=case.rule)
    return [x.cpu() for x in results(with_case, inputs, gradient)]


def assert_is_definition(attend: Attend, case: Case) -> None:
    for ours, exact in zip(found(attend, case), case.definition(), strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-12, rtol=0)


# Seeds of cases that have each choice below.
SEEDS = (2, 3, 4, 6, 7, 9, 10)


def random_case(seed: int, *, softcap: bool) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    length = pick(16, 96, 320, 640) if not softcap else pick(16, 96)
    bounds = []
    for _ in range(pick(1, 2, 3)):
        cuts = torch.randperm(length - 1, generator=generator)[: pick(0, 1, 4)] + 1
        bounds.append((0, *sorted(cuts.tolist()), length))
    if pick(0, 1):
        bounds = [bounds[0]] * len(bounds)
    size = pick(1, 2, 4)
    return Case(
        tuple(bounds),
        window=pick(0, 0, 1, 5, 70, length) or None,
        softcap=(0.5, 50.0)[pick(0, 1)] if softcap else None,
        groups=pick(1, 2),
        repeats=pick(1, 3),
        rank=pick(*range(size)),
        size=size,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_are_the_definition(seed: int) -> None:
    assert_is_definition(tiles.attend, random_case(seed, softcap=False))


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_are_the_definition(seed: int) -> None:
    attend = partial(blocked.attend, block_bytes=2**26 if seed % 4 == 0 else 3000)
    assert_is_definition(attend, random_case(seed, softcap=seed % 3 > 0))


@pytest.mark.parametrize("seed", SEEDS)
def test_packed_documents_are_in_the_form_of_the_flash_kernel(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", documented_varlen_attn)
    assert_is_definition(varlen.attend, random_case(seed, softcap=False))


def test_a_flash_kernel_that_takes_groups_unasked_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_torch_2_11(*arguments: Any, scale: float, window_size: tuple[int, int]) -> Tensor:
        return documented_varlen_attn(
            *arguments, scale=scale, window_size=window_size, enable_gqa=True
        )

    monkeypatch.setattr(torch_varlen, "varlen_attn", of_torch_2_11)
    varlen.arguments.cache_clear()
    try:
        assert_is_definition(varlen.attend, Case(((0, 5, 16),)))
    finally:
        varlen.arguments.cache_clear()


@pytest.fixture
def backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch differentiate FlexAttention on a CPU: it refuses, but has the dense backward."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)


@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("seed", range(4))
def test_flex_masks_and_caps_are_the_definition(seed: int) -> None:
    attend = partial(flex.attend_with, flex_attention.flex_attention)
    assert_is_definition(attend, random_case(seed, softcap=True))


BLOCKS = ((0, 130, 512), (0, 300, 512))


@pytest.mark.slow
@pytest.mark.usefixtures("backward_on_cpu")
@pytest.mark.parametrize(("window", "rank"), [(None, 1), (200, None)])
def test_the_compiled_graphs_of_flex_have_the_gradients(
    window: int | None, rank: int | None
) -> None:
    # The graphs that torch compiles into kernels, of the forward and of the backward pass.
    kernel = torch.compile(flex_attention.flex_attention, backend="aot_eager", fullgraph=True)
    case = Case(BLOCKS, window, softcap=2.0, rank=rank or 0, size=1 if rank is None else 2)
    assert_is_definition(partial(flex.attend_with, kernel), case)


@pytest.mark.slow
def test_flex_is_compiled_for_more_models_than_dynamos_limit() -> None:
    compiled: list[object] = []

    def count(graph: Any, _: object) -> Any:
        compiled.append(graph)
        return graph.forward

    kernel = torch.compile(flex_attention.flex_attention, backend=count)
    case = Case(BLOCKS, softcap=2.0, head_size=16)
    *inputs, _ = case.tensors(torch.float32)
    for models in range(1, 11):
        rule = replace(case.rule, softcap=1.0 + models)
        with torch.no_grad():
            flex.attend_with(kernel, *inputs, case.segments, rule)
        assert len(compiled) == models


@pytest.mark.parametrize("seed", range(6))
def test_the_blocks_of_the_flex_backward_have_the_gradients(seed: int) -> None:
    """The compiled kernel goes through these lists, which the dense backward does not read."""
    case = replace(random_case(seed, softcap=True), bounds=BLOCKS, window=(None, 200)[seed % 2])
    *inputs, gradient = case.tensors(torch.float64)
    mask = flex.block_mask(case.segments, case.window, torch.device("cpu"))
    ours = blockwise_gradients(mask, *inputs, gradient, scale=SCALE, softcap=case.softcap)
    for found, exact in zip(ours, case.definition()[1:], strict=True):
        torch.testing.assert_close(found, exact, atol=1e-12, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("window", [None, 200])
def test_the_compiled_flex_kernel_reads_the_lists_of_blocks(window: int | None) -> None:
    case = Case(BLOCKS, window, softcap=2.0, head_size=32)
    *inputs, _ = case.tensors(torch.float32)
    with torch.no_grad():
        out = flex.attend(*inputs, case.segments, case.rule)
    torch.testing.assert_close(out.double(), case.definition(torch.float32)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_flex_blocks_cover_every_visible_key_and_few_others(seed: int) -> None:
    case = random_case(seed, softcap=False)
    index_s = zigzag_index(case.bounds[0][-1], rank=case.rank, size=case.size)
    visible = visible_keys(case.document_ids, index_s, case.window)
    blocks = flex.block_mask(case.segments, case.window, torch.device("cpu")).to_dense()[:, 0]
    padded = torch.nn.functional.pad(
        visible, (0, -visible.shape[2] % 128, 0, -visible.shape[1] % 128)
    )
    needed = padded.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).any(4).any(2)
    assert bool((blocks.bool() | ~needed).all())
    if case.size == 1:  # a block of two pieces also lists the keys between them
        assert torch.equal(blocks.bool(), needed)


def test_flex_applies_no_mask_where_a_block_is_seen_whole() -> None:
    case = Case(((0, 640),), window=400)
    mask = flex.block_mask(case.segments, case.window, torch.device("cpu"))
    counts, numbers = mask.full_kv_num_blocks, mask.full_kv_indices
    found = [
        numbers[0, 0, row, : int(counts[0, 0, row])].tolist() for row in range(counts.shape[2])
    ]
    # The last query of block r sees keys from 128 r - 272 on, the first one keys up to 128 r.
    assert found == [[], [0], [0, 1], [1, 2], [2, 3]]


LONG = Case(((0, 130, 700), (0, 300, 700)), window=100, head_size=16)


@pytest.mark.parametrize("case", [LONG, Case(((0, 640),), rank=1, size=4, head_size=16)])
def test_fp32_is_as_near_as_its_rounding(case: Case) -> None:
    for ours, exact in zip(
        found(tiles.attend, case, torch.float32), case.definition(torch.float32), strict=True
    ):
        assert ours.dtype is torch.float32
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attend", [tiles.attend, blocked.attend], ids=["tiles", "blocked"])
def test_half_precision_rounds_results_only(attend: Attend) -> None:
    for ours, exact in zip(
        found(attend, LONG, torch.bfloat16), LONG.definition(torch.bfloat16), strict=True
    ):
        assert ours.dtype is torch.bfloat16
        error = float((ours.double() - exact).norm() / exact.norm())
        assert error < 2**-7


def test_dropout_is_drawn_again_in_backward() -> None:
    case = Case(((0, 5, 16),), groups=1)
    rule = AttentionRule(SCALE, dropout=0.4)

    def attend(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return blocked.attend(*tensors, case.segments, rule, block_bytes=1000)

    leaves = [x.requires_grad_() for x in case.tensors(torch.float64)[:3]]
    assert torch.autograd.gradcheck(attend, leaves)
    before = torch.get_rng_state()
    out = blocked.attend(*leaves, case.segments, rule)
    after = torch.get_rng_state()
    assert not torch.equal(before, after)
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), after)


def test_dropout_keeps_the_mean() -> None:
    case = Case(((0, 64),), groups=1, repeats=1)
    *inputs, _ = case.tensors(torch.float64)
    rule = AttentionRule(SCALE, dropout=0.25)
    torch.manual_seed(1)
    drawn = [blocked.attend(*inputs, case.segments, rule) for _ in range(2000)]
    torch.testing.assert_close(torch.stack(drawn).mean(0), case.definition()[0], atol=0.08, rtol=0)


class _Sizes(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the sizes of all results."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):  # type: ignore[no-untyped-def]
        result = function(*arguments, **(named or {}))
        if isinstance(result, Tensor):
            self.elements.append(result.numel())
        return result


def test_no_tensor_is_larger_than_a_block_of_scores() -> None:
    case = Case(((0, 64), (0, 64)), softcap=2.0)
    budget = 4 * 2 * 4 * 64 * 4  # four queries of two samples and four heads
    with _Sizes() as sizes:
        found(partial(blocked.attend, block_bytes=budget), case, torch.float32)
    assert max(sizes.elements) <= budget // 4


CHOICES = {
    ("cpu", torch.float32, None, 0.0): "tiles",
    ("cpu", torch.bfloat16, None, 0.0): "tiles",
    ("cpu", torch.float32, 30.0, 0.0): "blocked",
    ("cpu", torch.bfloat16, 30.0, 0.0): "blocked",
    ("cpu", torch.float32, None, 0.1): "blocked",
    ("cuda", torch.bfloat16, None, 0.0): "varlen",
    ("cuda", torch.float16, None, 0.0): "varlen",
    ("cuda", torch.bfloat16, 30.0, 0.0): "flex",
    ("cuda", torch.bfloat16, None, 0.1): "blocked",
    ("cuda", torch.float32, None, 0.0): "blocked",
    ("cuda", torch.float32, 30.0, 0.0): "blocked",
}


@pytest.mark.parametrize("inputs", CHOICES, ids=str)
def test_the_kernel_follows_from_device_dtype_and_scores(
    inputs: tuple[str, torch.dtype, float | None, float],
) -> None:
    device, dtype, softcap, dropout = inputs
    query = _Described(torch.device(device), dtype, (8, 1, 4, 64))
    rule = AttentionRule(SCALE, softcap=softcap, dropout=dropout)
    assert kernel_for(query, rule).name == CHOICES[inputs]  # type: ignore[arg-type]


# FlexAttention compiles for each case with a soft cap.
CAPPED = (replace(LONG, softcap=50.0), Case(BLOCKS, softcap=2.0, rank=1, size=2, head_size=16))
ON_DEVICES = [
    *(replace(random_case(seed, softcap=False), head_size=16) for seed in SEEDS),
    LONG,
    *CAPPED,
]
# Of the largest result, by the norm: the kernels round weights of a row before their products.
DEVICE_ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DEVICE_ERRORS, ids=str)
@pytest.mark.parametrize("case", ON_DEVICES, ids=range(len(ON_DEVICES)))
def test_the_kernel_of_a_device_is_the_definition(
    case: Case, dtype: torch.dtype, device: str
) -> None:
    query, *_ = case.tensors(dtype)
    kernel = kernel_for(query.to(device), case.rule)
    capped = None if case.softcap is None else 30.0
    assert kernel.name == CHOICES[device, dtype, capped, 0.0]
    exact = case.definition(dtype)
    scale = max(float(x.norm()) for x in exact)
    for ours, other in zip(found(kernel.attend, case, dtype, device), exact, strict=True):
        assert ours.dtype is dtype
        assert float((ours.double() - other).norm()) < DEVICE_ERRORS[dtype] * scale


@dataclass(frozen=True)
class _Described:
    """The properties of a tensor on a device that is not there."""

    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]


@pytest.mark.parametrize("size", [20, 264])
def test_head_sizes_that_the_flash_kernel_refuses_are_blocked(size: int) -> None:
    query = _Described(torch.device("cuda"), torch.bfloat16, (8, 1, 4, size))
    assert kernel_for(query, AttentionRule(SCALE)).name == "blocked"  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "name"), [(8, "blocked"), (16, "flex")])
def test_soft_caps_of_heads_too_small_for_flexattention_are_blocked(size: int, name: str) -> None:
    query = _Described(torch.device("cuda"), torch.bfloat16, (8, 1, 4, size))
    assert kernel_for(query, AttentionRule(SCALE, softcap=2.0)).name == name  # type: ignore[arg-type]
