"""Signals refuse, when they are made, what could only fail later or silently."""

import dataclasses

import pytest
import torch

from megatron_distill.signals import DenseLogits, HiddenState


def test_well_formed_signals_are_frozen() -> None:
    signal = HiddenState(torch.zeros(2, 3), torch.zeros(5, 3), 30.0, 0.5)
    assert (signal.logit_softcap, signal.logit_scale) == (30.0, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        signal.logit_scale = 2.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        DenseLogits(torch.zeros(0, 5)).logits = torch.zeros(1, 5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 3, 4), r"DenseLogits.logits is torch.float32 of shape \(2, 3, 4\)"),
        (torch.zeros(2, 3, dtype=torch.long), "DenseLogits.logits is torch.int64"),
    ],
)
def test_logits_are_a_floating_point_matrix(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DenseLogits(logits)


@pytest.mark.parametrize(
    ("hidden", "weight", "factors", "message"),
    [
        (torch.zeros(1, 2, 3), torch.zeros(5, 3), {}, r"HiddenState.hidden .*\(1, 2, 3\)"),
        (torch.zeros(2, 3), torch.zeros(5), {}, r"HiddenState.weight .*\(5,\)"),
        (torch.zeros(2, 3), torch.zeros(5, 4), {}, "3 features, its weight 4"),
        (torch.zeros(2, 3).bfloat16(), torch.zeros(5, 3), {}, "bfloat16 .* its weight .*float32"),
        (torch.zeros(2, 3), torch.zeros(5, 3), {"logit_softcap": 0.0}, "logit_softcap is 0.0"),
        (torch.zeros(2, 3), torch.zeros(5, 3), {"logit_scale": -1.0}, "logit_scale is -1.0"),
        (torch.zeros(2, 3), torch.zeros(5, 3), {"logit_scale": float("nan")}, "scale is nan"),
    ],
)
def test_hidden_states_and_heads_belong_together(
    hidden: torch.Tensor, weight: torch.Tensor, factors: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        HiddenState(hidden, weight, **factors)
