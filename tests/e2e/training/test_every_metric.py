"""Every number of a log, but those of time and memory, is that of one rank in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    CONTEXT,
    PIPELINE,
    SEQUENCE,
    TENSOR,
    Inputs,
    records,
    run,
)

# Of these a log has what the machine and the layout make of a step.
OF_THE_MACHINE = (
    "step_seconds", "teacher_seconds", "tokens_per_second", "tflops_per_device", "mfu",
    "peak_memory_bytes", "data_wait", "timers/", "validation/seconds",
)  # fmt: skip
STEPS = 4
TERMS = """objective.terms=[
    {divergence: forward_kl, top_k: 12},
    {divergence: js_divergence, weight: 0.5, temperature: 2.0, scale_by_temperature_squared: true},
    {divergence: reverse_kl, weight: 0.3, top_k: 8, support: renormalized}]"""
LAYOUTS: dict[str, tuple[int, Sequence[str]]] = {
    "TP2+sequence": (2, (TENSOR, SEQUENCE)),
    "PP2": (2, (PIPELINE,)),
    "CP2": (2, (CONTEXT,)),
    "DP2": (2, ()),
    "micro-batch 4": (1, ("train.micro_batch_size=4",)),
}


@pytest.fixture(scope="module")
def sources(inputs: Inputs) -> str:
    """Two sources, so that figures are in total and per source."""
    lines = inputs.corpus.read_text().splitlines(keepends=True)
    parts = {"odd": lines[1::2], "even": lines[::2]}
    for name, part in parts.items():
        (inputs.folder / f"{name}-lines.jsonl").write_text("".join(part))
    given = ", ".join(
        f"{{format: jsonl, name: {name}, weight: {weight}, "
        f"paths: {inputs.folder / f'{name}-lines.jsonl'}}}"
        for weight, name in enumerate(parts, start=1)
    )
    return f"data.sources=[{given}]"


def numbers(record: dict[str, Any]) -> dict[str, float]:
    from megatron_distill.train.metrics import flat_scalars

    return {
        name: value
        for name, value in flat_scalars(record)
        if not name.removeprefix("train/").startswith(OF_THE_MACHINE)
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "aligned"])
def test_every_number_of_the_log_is_that_of_one_rank(
    pool: Pool, inputs: Inputs, sources: str, tmp_path: Path, kind: str
) -> None:
    common = [
        sources, f"train.steps={STEPS}", "schedule.warmup_steps=1", "validation.samples=8",
        f"validation.interval={STEPS}", *((TERMS,) if kind == "dense" else ()),
    ]  # fmt: skip
    config = inputs.folder / f"{kind}.yaml"
    run(pool, 1, config, tmp_path / "one", *common)
    expected = [numbers(record) for record in records(tmp_path / "one")]
    names = {name for record in expected for name in record}
    assert len(names) >= 30, sorted(names)
    assert {"train/sources/odd/kd_loss", "validation/sources/even/ce_loss"} <= names
    for layout, (world, overrides) in LAYOUTS.items():
        run(pool, world, config, tmp_path / layout, *common, *overrides)
        found = [numbers(record) for record in records(tmp_path / layout)]
        assert len(found) == len(expected)
        for ours, other in zip(found, expected, strict=True):
            assert ours.keys() == other.keys(), layout
            for name, value in other.items():
                assert ours[name] == pytest.approx(value, rel=2e-4, abs=1e-7), (layout, name)
