"""The planner's bytes of losses on the logits of the same tokens, against losses that run here."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.harness.peak import LiveStorages
from megatron_distill.losses import Term, fused_linear_objective
from megatron_distill.planning.device import load_device
from megatron_distill.planning.memory import chunk_bytes
from megatron_distill.planning.run import LossTerm
from megatron_distill.signals import HiddenState
from tests.unit.planning.shapes import choice_of, llama, run_of

# Two blocks of the rows that one thread takes.
TOKENS, VOCABULARY, HIDDEN = 64, 8192, 64


def measured(terms: list[Term]) -> int:
    """Return the peak above the inputs, in fp32, with a buffer for the head's gradient."""
    generator = torch.Generator().manual_seed(1)

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, HIDDEN, generator=generator) / HIDDEN**0.25

    hidden, weight = normal(TOKENS).requires_grad_(), normal(VOCABULARY).requires_grad_()
    teacher, buffer = HiddenState(normal(TOKENS), normal(VOCABULARY)), torch.zeros_like(weight)
    labels, weights = torch.arange(TOKENS), torch.full((TOKENS,), 1 / TOKENS)

    def run() -> None:
        total, _ = fused_linear_objective(
            hidden, weight, teacher, labels,
            ce_weights=weights, kd_weights=weights, terms=terms,
            weight_gradient_sum=buffer.detach(),
        )  # fmt: skip
        torch.autograd.grad(total, (hidden, weight), allow_unused=True)

    run()
    gc.collect()
    with LiveStorages() as live:
        run()
    return live.peak


def planned(*terms: LossTerm) -> float:
    shape = llama(1, HIDDEN, 128, 4, 4, vocab_size=VOCABULARY)
    run = run_of(shape, teacher=shape, sequence_length=TOKENS, precision="fp32", terms=terms)
    cores = {"kind": "cpu", "cores": torch.get_num_threads()}
    device = load_device("a100-80gb").model_copy(update=cores)
    return chunk_bytes(run, choice_of((1,), (1,)), device.shared_by(1))


DIVERGENCES = (
    "forward_kl", "reverse_kl", "js_divergence", "skewed_forward_kl", "skewed_reverse_kl",
    "total_variation", "squared_hellinger", "adaptive_kl", "js_divergence and reverse_kl",
)  # fmt: skip
QUICK = ("adaptive_kl",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in DIVERGENCES],
)
def test_divergences_take_the_planned_row_blocks(case: str, one_thread: None) -> None:
    names = case.split(" and ")
    found = planned(*(LossTerm(divergence=name) for name in names))
    assert found == pytest.approx(measured([Term(name) for name in names]), rel=0.02)


def test_a_choice_among_narrow_rows_reads_all_logits_at_once(one_thread: None) -> None:
    """Planned together with the row blocks, which a single chunk takes after the choice."""
    peak = measured([Term("forward_kl", top_k=512)])
    whole = planned(LossTerm())
    assert peak < planned(LossTerm(512)) < peak + whole
