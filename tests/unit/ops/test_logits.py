"""Rows left out and put back; soft-cap and scale with chain rule; raw outputs never modified."""

import pytest
import torch

from megatron_distill.ops.workspace import Rows, Scratch, load_logits
from megatron_distill.signals import DenseLogits, HiddenState, LogitRule

CPU = torch.device("cpu")


def test_rows_are_those_where_any_weight_counts() -> None:
    rows = Rows.of_weights(torch.tensor([0.0, 1.0, 0.0, -1.0]), torch.tensor([0.0, 0.0, 2.0, 1.0]))
    assert rows.count == 3
    values = torch.arange(8.0).view(4, 2)
    taken = torch.cat([rows.take(values, slice(0, 2)), rows.take(values, slice(2, 3))])
    assert torch.equal(taken, values[1:])
    whole = rows.scatter(taken)
    assert torch.equal(whole[1:], values[1:])
    assert not whole[0].any()


def test_rows_that_all_count_are_not_copied() -> None:
    rows = Rows.of_weights(torch.ones(4), torch.zeros(4))
    values = torch.randn(4, 2)
    assert rows.indices is None
    assert rows.take(values, slice(1, 3)).data_ptr() == values[1:].data_ptr()
    assert rows.scatter(values) is values


def test_logits_that_need_no_change_are_not_copied() -> None:
    scratch = Scratch(4, 3, torch.float32, CPU)
    raw = torch.randn(4, 3)
    assert load_logits(LogitRule(), raw, scratch, "a") is raw
    assert load_logits(LogitRule(), raw.bfloat16(), scratch, "a").dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [LogitRule(), LogitRule(scale=0.3), LogitRule(softcap=2.0), LogitRule(2.0, 0.3)],
)
def test_loading_leaves_raw_outputs_alone(rule: LogitRule, dtype: torch.dtype) -> None:
    raw = (torch.randn(4, 3) * 4).to(dtype)
    before = raw.clone()
    loaded = load_logits(rule, raw, Scratch(4, 3, torch.float32, CPU), "a")
    assert torch.equal(raw, before)
    scaled = before.float() * rule.scale
    expected = scaled if rule.softcap is None else 2.0 * torch.tanh(scaled / 2.0)
    torch.testing.assert_close(loaded, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_chain_rule_equals_autograd(softcap: float | None, scale: float) -> None:
    rule = LogitRule(softcap, scale)
    raw = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    logits = raw * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    upstream = torch.randn(4, 3, dtype=torch.float64)
    (expected,) = torch.autograd.grad((logits * upstream).sum(), raw)
    scratch = Scratch(4, 3, torch.float64, CPU)
    ours = rule.chain_(upstream.clone(), logits.detach(), scratch.take("spare", 4))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_sources_know_their_width_and_dtype() -> None:
    head = HiddenState(torch.zeros(2, 3).bfloat16(), torch.zeros(5, 3).bfloat16())
    assert (head.width, head.dtype) == (5, torch.bfloat16)
    given = DenseLogits(torch.zeros(2, 7))
    assert (given.width, given.dtype) == (7, torch.float32)
