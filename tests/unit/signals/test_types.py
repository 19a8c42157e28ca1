"""Signals are well-formed and frozen, and made when they are asked for."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch

from megatron_distill.signals import DenseLogits, HiddenState, OnDemand


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


def test_one_signal_is_held_at_a_time() -> None:
    alive: list[weakref.ref[DenseLogits]] = []

    def compute(number: int) -> DenseLogits:
        assert [one for one in alive if one() is not None] == []
        signal = DenseLogits(torch.full((1, 2), float(number)))
        alive.append(weakref.ref(signal))
        return signal

    signals = OnDemand(3, compute)
    assert len(signals) == 3
    assert [float(signals[number].logits[0, 0]) for number in (0, 0, 1, 2, 2, 1)] == [
        0.0, 0.0, 1.0, 2.0, 2.0, 1.0,
    ]  # fmt: skip
    assert len(alive) == 4


def test_a_list_holds_all_of_them() -> None:
    computed: list[int] = []

    def compute(number: int) -> int:
        computed.append(number)
        return number

    held = list(OnDemand(3, compute))
    assert held == computed == [0, 1, 2]
    with pytest.raises(IndexError, match="micro-batch 3 of 3"):
        OnDemand(3, compute)[3]
