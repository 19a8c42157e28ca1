"""Signals that are computed when they are asked for."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatron_distill.signals import DenseLogits, OnDemand


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
