"""The planner's bytes of an update on a CPU, against torch's AdamW on tensors of the same sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.harness.peak import LiveStorages
from megatron_distill.planning.device import load_device
from megatron_distill.planning.parameters import RankNumbers, adam_numbers, stage_numbers
from megatron_distill.planning.updates import update_bytes
from megatron_distill.runtime.groups import Layout
from tests.unit.planning.shapes import choice_of, llama, run_of

# Its feed-forward is the largest: the quotient of the tensor before counts.
SHAPE, LAYOUT = llama(2, 64, 320, 4, 2, vocab_size=128), Layout()
NUMBERS = stage_numbers(SHAPE, LAYOUT, (2,))[0]
GPU = load_device("h100-80gb")
CPU = GPU.model_copy(update={"kind": "cpu"})


def made_by_adam(sizes: list[int]) -> int:
    """The most bytes that a step makes of tensors in this order, with a group of vectors."""
    tensors = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    for tensor in tensors:
        tensor.grad = torch.ones_like(tensor)
    hidden = SHAPE.hidden_size
    groups = [[one for one in tensors if (len(one) == hidden) == flat] for flat in (False, True)]
    adam = torch.optim.AdamW([{"params": group} for group in groups], foreach=False)
    adam.step()
    with LiveStorages() as live:
        adam.step()
    return live.peak


def parts(numbers: RankNumbers, ranks: int) -> list[list[int]]:
    """The sizes of the tensors' parts on each rank, of a list with an entry for each number."""
    (bucket,) = (dense for dense, _ in numbers.buckets)
    buffer: list[int] = []  # the tensor of each number, or 0
    for tensor, size in enumerate(reversed(bucket.sizes), start=1):
        buffer += [0] * (-len(buffer) % 64) + [tensor] * size
    buffer += [0] * (bucket.held(ranks) - len(buffer))
    share = len(buffer) // ranks
    shares = [buffer[begin : begin + share] for begin in range(0, len(buffer), share)]
    return [[one.count(tensor) for tensor in sorted(set(one) - {0})] for one in shares]


def test_whole_tensors_have_a_root_and_a_quotient_beside_that_of_the_one_before() -> None:
    sizes = [size for dense, _ in NUMBERS.buckets for size in dense.sizes]
    planned = adam_numbers(SHAPE, NUMBERS, LAYOUT, ranks=1, is_distributed=False)
    assert 4 * planned == pytest.approx(made_by_adam(sizes), rel=0.01)
    queries, widest = 64 * 128, max(sizes)
    assert planned == 2 * widest + queries


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_parts_of_a_buffer_have_them_in_its_order(ranks: int) -> None:
    planned = adam_numbers(SHAPE, NUMBERS, LAYOUT, ranks=ranks, is_distributed=True)
    made = [made_by_adam(sizes) for sizes in parts(NUMBERS, ranks)]
    assert 4 * planned == pytest.approx(max(made), rel=0.01)


def test_copies_of_gradients_are_those_of_the_buckets_under_way() -> None:
    layout = Layout(pipeline=2, virtual_pipeline=2)
    shape = llama(8, 64, 192, 4, 2, vocab_size=4096)
    numbers = stage_numbers(shape, layout, (2,) * 4)[0]
    choice = choice_of((2,) * 4, (2,) * 4, layout, ranks=4)
    run = run_of(shape, teacher=shape, overlaps_gradients=False)
    chunks = [dense.held(2) for dense, _ in numbers.buckets]
    assert len(chunks) == 2
    assert update_bytes(run, choice, CPU, numbers) == 4 * max(chunks)
    at_once = replace(run, overlaps_gradients=True)
    assert update_bytes(at_once, choice, CPU, numbers) == 4 * sum(chunks)
    alone = replace(run, is_distributed=False)
    assert update_bytes(alone, choice, CPU, numbers) == 2 * 4 * 4096 * 64
    assert update_bytes(run, choice, GPU, numbers) == 0
