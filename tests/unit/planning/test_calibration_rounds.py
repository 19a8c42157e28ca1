"""Rates of several rounds are their medians, and the file has the spread of each."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from megatron_distill.ops import topk
from megatron_distill.planning.calibration.rounds import reduced
from megatron_distill.planning.device import (
    SEGMENTED_COLUMNS,
    DeviceProfile,
    load_device,
    write_device,
)

H100 = load_device("h100-80gb")


def a_round(**changes: Any) -> DeviceProfile:
    return H100.model_copy(update={"kind": "cpu", "cores": 2, "kernel_us": 2.0, **changes})


def test_each_rate_is_the_median_of_the_rounds_and_its_spread_their_range_over_it() -> None:
    rates = [3.0, 9.0, 4.0]
    factors = [1.0, 1.25, 0.75]
    found = reduced(
        [
            a_round(
                update_ns=rate,
                logit_ns={"fp32": 10 * rate, "bf16": 5.0},
                memory_efficiency=((1.0, 0.5), (8.0, rate / 10)),
                step_factors={"one rank": {"fp32": {"loss": factor}}},
            )
            for rate, factor in zip(rates, factors, strict=True)
        ]
    )
    middle, spread = median(rates), pytest.approx((9.0 - 3.0) / 4.0)
    assert (found.update_ns, found.logit_ns) == (middle, {"fp32": 10 * middle, "bf16": 5.0})
    assert found.memory_efficiency == ((1.0, 0.5), (8.0, 0.4))
    assert found.step_factors == {"one rank": {"fp32": {"loss": 1.0}}}
    assert found.spread == {
        "update_ns": spread,
        "logit_ns.fp32": spread,
        "memory_efficiency": spread,
        "step_factors.one rank.fp32.loss": 0.5,
    }
    # The rest is that of every round.
    assert found.model_copy(update={"spread": {}, "step_factors": {}}) == a_round(
        update_ns=4.0,
        logit_ns={"fp32": 40.0, "bf16": 5.0},
        memory_efficiency=((1.0, 0.5), (8.0, 0.4)),
    )


def test_one_slow_round_changes_no_rate() -> None:
    def with_node(slow: float) -> DeviceProfile:
        node = H100.node.model_copy(update={"latency_us": H100.node.latency_us * slow})
        return a_round(kernel_us=2.0 * slow, node=node, network=node)

    found = reduced([with_node(1.0), with_node(9.0), with_node(1.0)])
    assert (found.kernel_us, found.node) == (2.0, H100.node)
    assert found.spread == {"kernel_us": 8.0, "node.latency_us": 8.0}


def test_a_phase_that_one_round_lacks_is_left_out() -> None:
    several = {"teacher": 1.2, "communication": 2.0}
    rounds = [
        a_round(step_factors={"one rank": {"fp32": phases}})
        for phases in (several, {"teacher": 1.2}, several)
    ]
    assert reduced(rounds).step_factors == {"one rank": {"fp32": {"teacher": 1.2}}}


def test_spreads_are_in_the_file_and_one_from_before_has_none(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    write_device(a_round(), file)
    assert "spread" not in file.read_text()
    assert load_device(str(file)).spread == {}
    measured = a_round(spread={"kernel_us": 0.2, "step_factors.one rank.fp32.loss": 0.3})
    write_device(measured, file)
    assert load_device(str(file)) == measured


def test_the_rates_that_varied_are_those_of_the_precision_and_the_sharing() -> None:
    names = {"kernel_us": 0.2, "logit_ns.fp32": 0.4, "logit_ns.bf16": 0.5, "update_ns": 0.15}
    names |= {f"step_factors.{who}.fp32.loss": 0.3 for who in ("one rank", "several ranks")}
    device = a_round(spread=names).shared_by(2)
    assert list(device.varied("fp32", more_than=0.15).items()) == [
        ("logit_ns.fp32", 0.4), ("step_factors.several ranks.fp32.loss", 0.3), ("kernel_us", 0.2)
    ]  # fmt: skip


def test_rows_are_read_whole_up_to_the_same_width_as_in_a_choice() -> None:
    assert SEGMENTED_COLUMNS == topk._SEGMENTS_OF_K * topk._SEGMENT
    rates = {"choice_ns": {"fp32": 2.0}, "narrow_choice_ns": {"fp32": 7.0}}
    device = a_round(**rates)
    wide, narrow = (device.logit_seconds("fp32", width, chosen=64) for width in (12_288, 12_287))
    assert (wide, narrow) == pytest.approx((2e-9, 7e-9))
    before = a_round(choice_ns={"fp32": 2.0})
    assert before.logit_seconds("fp32", 100, chosen=64) == pytest.approx(2e-9)
