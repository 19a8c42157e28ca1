"""Eight published batch times of Megatron-LM on A100s, within ten per cent, and in their order.

Source: Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, tables 3
and 5: four models, each with full recomputation, and with sequence parallelism and selective
recomputation of attention. Attention still wrote its scores. Sequences have 2,048 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from megatron_distill.models.architecture import Architecture
from megatron_distill.planning.device import load_device
from megatron_distill.planning.parameters import stage_numbers
from megatron_distill.planning.run import Choice, PlannedRun
from megatron_distill.planning.step_time import StepTime, step_time
from megatron_distill.runtime.groups import Layout


@dataclass(frozen=True)
class Published:
    """A model, its layout with eight tensor ranks, and seconds of both variants."""

    layers: int
    hidden: int
    heads: int
    pipeline: int
    virtual: int | None
    batch: int
    micro_batch: int
    full: float
    selective: float


RUNS = {
    "22B": Published(48, 6144, 64, 1, None, 4, 4, 1.42, 1.10),
    "175B": Published(96, 12_288, 96, 8, 3, 64, 1, 18.13, 13.75),
    "530B": Published(105, 20_480, 128, 35, 3, 280, 1, 49.05, 37.83),
    "1T": Published(128, 25_600, 160, 64, None, 512, 1, 94.42, 71.49),
}


def predicted(one: Published, *, full: bool) -> StepTime:
    shape = Architecture(
        num_layers=one.layers,
        hidden_size=one.hidden,
        ffn_hidden_size=4 * one.hidden,
        num_attention_heads=one.heads,
        num_kv_heads=one.heads,
        head_size=one.hidden // one.heads,
        vocab_size=51_200,
        max_position_embeddings=2048,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        qkv_bias=True,
        linear_bias=True,
        tied_embeddings=True,
        attention_dropout=0.1,
        hidden_dropout=0.1,
    )
    layout = Layout(8, one.pipeline, one.virtual, sequence=not full)
    run = PlannedRun(
        student=shape,
        teacher=None,
        sequence_length=2048,
        global_batch_size=one.batch,
        is_distributed=False,
        writes_scores=True,
    )
    layers = (one.layers // layout.stages,) * layout.stages
    choice = Choice(
        layout=layout,
        ranks=8 * one.pipeline,
        micro_batch_size=one.micro_batch,
        layers=layers,
        recompute="full" if full else "selective",
    )
    device = load_device("a100-80gb")
    return step_time(run, choice, device, stage_numbers(shape, layout, layers))


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("full", [True, False])
def test_the_batch_time_is_within_ten_per_cent(name: str, full: bool) -> None:
    one = RUNS[name]
    measured = one.full if full else one.selective
    assert predicted(one, full=full).total == pytest.approx(measured, rel=0.10)


def test_the_mean_error_is_below_five_per_cent() -> None:
    errors = [
        abs(predicted(one, full=full).total / (one.full if full else one.selective) - 1)
        for one in RUNS.values()
        for full in (True, False)
    ]
    assert sum(errors) / len(errors) < 0.05


def test_the_gain_of_selective_recomputation_is_the_published_one() -> None:
    for one in RUNS.values():
        gain = predicted(one, full=True).total / predicted(one, full=False).total
        assert gain == pytest.approx(one.full / one.selective, rel=0.06)
