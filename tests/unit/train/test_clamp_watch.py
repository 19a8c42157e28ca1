"""The warning of a balance that stays at its clamp."""

import math

from megatron_distill.train.balancing import CLAMPED_STEPS, ClampWatch


def warnings(clamp: float | None, *steps: dict[str, float]) -> list[tuple[int, str]]:
    """The warnings of a watch, each after its step."""
    watch = ClampWatch(clamp)
    return [
        (number, line) for number, step in enumerate(steps, start=1) for line in watch.observe(step)
    ]


def test_it_warns_once_after_so_many_steps_in_a_row() -> None:
    free, held = [{"kd_scale": 9.99}], [{"kd_scale": 10.0}]
    assert warnings(10.0, *held * (CLAMPED_STEPS - 1), *free, *held * (CLAMPED_STEPS - 1)) == []
    ((number, line),) = warnings(10.0, *free, *held * 5 * CLAMPED_STEPS)
    assert number == 1 + CLAMPED_STEPS
    for part in (
        "objective.balance.clamp = 10", "kd_scale was 10 in each of the last 20 steps",
        "raise objective.balance.clamp", "raise the weights of objective.terms",
    ):  # fmt: skip
        assert part in line


def test_the_remedy_depends_on_the_end_and_on_the_scale() -> None:
    low = [{"kd_scale": 1 / 7, "feature_scale": 1.0, "alpha": 7.0}] * CLAMPED_STEPS
    ((_, line),) = warnings(7.0, *low)
    assert "lower the weights of objective.terms" in line
    both = [{"kd_scale": 3.0, "feature_scale": 7.0}] * CLAMPED_STEPS
    ((_, line),) = warnings(7.0, *both)
    assert "feature_scale was 7" in line
    assert "raise the weights of objective.features" in line


def test_each_scale_has_its_own_count() -> None:
    early = {"kd_scale": 7.0, "feature_scale": 2.0}
    late = {"kd_scale": 7.0, "feature_scale": 1 / 7}
    found = warnings(7.0, early, *[late] * CLAMPED_STEPS)
    assert [number for number, _ in found] == [CLAMPED_STEPS, 1 + CLAMPED_STEPS]


def test_a_mean_that_rounding_moved_counts() -> None:
    rounded = [{"kd_scale": 10.0 * (1 - 2**-21)}] * CLAMPED_STEPS
    assert len(warnings(10.0, *rounded)) == 1


def test_without_a_clamp_or_a_measure_nothing_is_logged() -> None:
    assert warnings(None, *[{"kd_scale": 1.0}] * 50) == []
    assert warnings(1.5, *[{"alpha": 1.5, "forward_kl_weight": 1.5}] * 50) == []
    assert warnings(10.0, *[{"kd_scale": math.nan}] * 50) == []
