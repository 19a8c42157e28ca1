"""Row statistics and their merge: any split of the vocabulary equals the whole, shards without real
columns included; ties go to the lowest id; equal models diverge by exactly zero."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.ops import VocabShard
from megatron_distill.ops.chunk import Chunk
from megatron_distill.ops.divergences import WeightedDivergence, divergence_named
from megatron_distill.ops.normalizers import Normalizers
from megatron_distill.ops.row_math import row_sums, row_top
from megatron_distill.ops.statistics import GlobalStatistics, LocalStatistics, StatisticsSpec
from megatron_distill.ops.workspace import Scratch
from megatron_distill.signals import LogitRule
from tests.reference.distillation import cross_entropy, entropy, forward_kl

KL = divergence_named("forward_kl")
CPU = torch.device("cpu")


def split_statistics(
    student: Tensor, teacher: Tensor, labels: Tensor, bounds: Sequence[int], temperature: float
) -> tuple[GlobalStatistics, list[LocalStatistics]]:
    """Statistics of column ranges, merged as an all-gather of their packets would be."""
    spec = StatisticsSpec(
        ("student", "teacher"), (WeightedDivergence(KL, temperature, 1.0),), full=True
    )
    parts = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        shard = VocabShard(student.shape[1], start, stop)
        columns = slice(start, start + shard.real_width)
        chunk = Chunk(
            spec,
            {"student": student[:, columns], "teacher": teacher[:, columns]},
            {"student": LogitRule(), "teacher": LogitRule()},
            shard,
            Scratch(len(student), shard.real_width, student.dtype, CPU),
            labels,
        )
        local = LocalStatistics.empty(spec, len(student), student.dtype, CPU)
        chunk.measure(local)
        parts.append(local)
    return GlobalStatistics(spec, torch.stack([p.values for p in parts])), parts


@settings(max_examples=40, deadline=None)
@given(data=st.data(), temperature=st.sampled_from([0.5, 1.0, 2.0, 4.0]))
def test_merge_of_any_split_equals_the_whole(data: st.DataObject, temperature: float) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    tokens, vocab = 5, data.draw(st.integers(1, 300))
    inner = data.draw(st.lists(st.integers(0, vocab + 20), max_size=3))
    bounds = sorted([0, *inner, vocab + 20])
    student, teacher = torch.randn(2, tokens, vocab, generator=generator) * 3
    labels = torch.randint(vocab, (tokens,), generator=generator)
    merged, parts = split_statistics(student, teacher, labels, bounds, temperature)
    pairs = [
        (merged.forward_kl(temperature), forward_kl(student, teacher, temperature)),
        (merged.cross_entropy("student"), cross_entropy(student, labels)),
        (merged.cross_entropy("teacher"), cross_entropy(teacher, labels)),
        (merged.entropy("student"), entropy(student)),
        (merged.entropy("teacher"), entropy(teacher)),
        (merged.agreement(), (student.argmax(1) == teacher.argmax(1)).double()),
    ]
    for ours, oracle in pairs:
        torch.testing.assert_close(ours, oracle, rtol=2e-6, atol=2e-6)
    mass = sum(
        Normalizers.of(local, merged).factors[local.spec.softmaxes.index(("teacher", temperature))]
        * local.rows[f"teacher_mass@{temperature}"]
        for local in parts
    )
    assert isinstance(mass, Tensor)
    torch.testing.assert_close(mass, torch.ones_like(mass), rtol=1e-7, atol=0)


def test_divergence_does_not_suffer_from_large_common_offsets() -> None:
    student, teacher = torch.randn(2, 4, 500, generator=torch.Generator().manual_seed(1))
    offset = torch.tensor([[0.0], [64.0], [-1024.0], [4096.0]])
    student, teacher = student + offset, teacher + offset
    merged, _ = split_statistics(
        student, teacher, torch.zeros(4, dtype=torch.long), [0, 100, 500], 1.0
    )
    torch.testing.assert_close(
        merged.forward_kl(1.0),
        forward_kl(student, teacher),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize(
    ("vocab", "values"), [(1, 2), (127, 10**6), (128, 2), (129, 2), (129, 10**6), (1000, 2)]
)
def test_top_is_the_lowest_column_of_the_largest_value(vocab: int, values: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(values, (50, vocab), generator=generator).float()
    value, column = row_top(logits)
    lowest = [row.tolist().index(row.max().item()) for row in logits]
    assert torch.equal(value, logits.amax(1))
    assert column.tolist() == lowest


@pytest.mark.parametrize(
    ("columns", "dtype"),
    [
        *((columns, torch.float32) for columns in (0, 1, 255, 256, 5000, 151_936)),
        (5000, torch.float64),
    ],
)
def test_sums_lose_less_than_their_last_rounding_in_fp32(columns: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    values = torch.rand(7, columns + 3, generator=generator).to(dtype)[:, :columns]
    expected = values.double().sum(1)
    found = row_sums(values)
    assert found.dtype == torch.float64
    assert bool(((found - expected).abs() <= 2e-8 * expected).all())
