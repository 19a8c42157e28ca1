"""The parts of a rank's memory that no recorded step shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_distill.planning.activations import forward_bytes
from megatron_distill.planning.device import load_device
from megatron_distill.planning.memory import memory_need
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice
from megatron_distill.runtime.groups import Layout
from tests.unit.planning.shapes import llama, run_of

DEVICE = load_device("h100-80gb")


def test_the_forward_pass_of_a_wide_teacher_is_in_the_peak() -> None:
    student = llama(2, 256, 512, 4, 4, vocab_size=4096)
    teacher = llama(8, 8192, 28_672, 64, 8, vocab_size=4096)
    run, layout = run_of(student, teacher=teacher), Layout()
    alone = Choice(layout=layout, ranks=1, micro_batch_size=1, layers=(2,), recompute="full")
    shared = replace(alone, place="shared", teacher_layout=layout, teacher_layers=(8,))
    numbers = stage_numbers(student, layout, (2,))
    without, need = (memory_need(run, choice, DEVICE, numbers) for choice in (alone, shared))
    alive = 8192 * forward_bytes(teacher, layout, 2, is_fused=True)
    answers = 8192 * 8192 * 2
    assert without.transient < alive / 2
    assert need.transient == pytest.approx(1.05 * (alive + answers))
    assert need.activations == without.activations


def test_tensor_ranks_divide_a_forward_pass_but_for_the_input_of_a_layer() -> None:
    shape = llama(8, 1024, 4096, 16, 16)
    one, two, split = (
        forward_bytes(shape, layout, 2, is_fused=True)
        for layout in (Layout(), Layout(2), Layout(2, sequence=True))
    )
    inner = 2 * 3 * 4096
    assert one == 2 * 2 * 1024 + inner
    assert two == one - inner / 2
    assert split == two - 1024
