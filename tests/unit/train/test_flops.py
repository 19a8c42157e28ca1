"""FLOPs per token and model FLOPs utilization."""

import dataclasses

import pytest

from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.models.flops import (
    forward_flops_per_token,
    heads_in_layers,
    step_flops_per_token,
)
from megatron_distill.train.throughput import mfu, peak_flops_per_second

STUDENT = Architecture(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=20,
    num_attention_heads=4,
    num_kv_heads=2,
    head_size=3,
    vocab_size=50,
    max_position_embeddings=16,
)
MIXTURE = Architecture(
    num_layers=3,
    hidden_size=16,
    ffn_hidden_size=40,  # of no expert
    num_attention_heads=2,
    num_kv_heads=2,
    head_size=8,
    vocab_size=70,
    max_position_embeddings=16,
    activation="gelu",
    moe=MixtureOfExperts(num_experts=4, top_k=2, ffn_hidden_size=24),
)


def test_a_dense_model_costs_as_counted_by_hand() -> None:
    # Per layer: query 8x12, key and value 8x6 each, output 12x8, three matrices of 8x20: 768
    # weights. A token of a 5-token sequence attends to 3 positions on average, at 12 products for
    # the scores and 12 for the sum: 72. The head has 8x50.
    weights = 8 * 12 + 8 * 6 + 8 * 6 + 12 * 8 + 3 * 8 * 20
    assert weights == 768
    expected = 2 * (2 * (weights + 72) + 8 * 50)
    assert expected == 4160
    assert forward_flops_per_token(STUDENT, sequence_length=5) == expected
    # Without a gate, two matrices of 8x20.
    plain = dataclasses.replace(STUDENT, activation="gelu")
    assert forward_flops_per_token(plain, sequence_length=5) == expected - 2 * 2 * 8 * 20


@pytest.mark.parametrize(("window", "pairs"), [(1, 5), (2, 9), (4, 14), (5, 15), (9, 15)])
def test_a_window_costs_the_pairs_that_it_leaves(window: int, pairs: int) -> None:
    # Of 5 tokens, token i sees min(i + 1, window) positions; 24 products of 12 and 12 each.
    sliding = dataclasses.replace(STUDENT, sliding_window=window, sliding_layers=(1,))
    without = forward_flops_per_token(STUDENT, sequence_length=5)
    found = forward_flops_per_token(sliding, sequence_length=5)
    assert without - found == pytest.approx(2 * 24 * (15 - pairs) / 5)


def test_causal_attention_costs_the_lower_triangle() -> None:
    whole = forward_flops_per_token(STUDENT, sequence_length=9, attended_positions=9)
    causal = forward_flops_per_token(STUDENT, sequence_length=9)
    pairs_saved = (81 - 45) / 9
    assert whole - causal == 2 * 2 * 2 * 12 * pairs_saved


def test_a_mixture_pays_for_the_experts_a_token_visits() -> None:
    dense = forward_flops_per_token(STUDENT, sequence_length=4)
    moe = MixtureOfExperts(num_experts=16, top_k=2, ffn_hidden_size=20)
    shape = dataclasses.replace(STUDENT, moe=moe)
    mixture = forward_flops_per_token(shape, sequence_length=4)
    assert mixture - dense == 2 * (2 * 3 * 8 * 20 + 2 * 8 * 16)
    # One of the two layers dense again, the other with a shared expert and its gate.
    shared = dataclasses.replace(moe, dense_layers=(0,), shared_ffn_hidden_size=7, shared_gate=True)
    shape = dataclasses.replace(STUDENT, moe=shared)
    some = forward_flops_per_token(shape, sequence_length=4)
    assert some - dense == 2 * 3 * 8 * 20 + 2 * 8 * 16 + 2 * 3 * 8 * 7 + 2 * 8


def test_the_student_goes_forward_and_back_and_the_teacher_only_forward() -> None:
    student = forward_flops_per_token(STUDENT, sequence_length=4)
    teacher = forward_flops_per_token(MIXTURE, sequence_length=4)
    both = step_flops_per_token(STUDENT, MIXTURE, sequence_length=4)
    assert both.total == 3 * student + teacher
    assert both.teacher_share == teacher / (3 * student + teacher)
    # A teacher with tokens of its own has 6 of them for 4 of the student's.
    longer = step_flops_per_token(STUDENT, MIXTURE, sequence_length=4, teacher_length=6)
    teacher_step = 6 * forward_flops_per_token(MIXTURE, sequence_length=6)
    assert longer.total == pytest.approx((4 * 3 * student + teacher_step) / 4)
    heads = heads_in_layers(STUDENT, MIXTURE, sequence_length=4, teacher_length=6)
    of_student = heads_in_layers(STUDENT, None, sequence_length=4)
    same = heads_in_layers(STUDENT, MIXTURE, sequence_length=4)
    assert heads - of_student == pytest.approx(1.5 * (same - of_student))
    alone = step_flops_per_token(STUDENT, None, sequence_length=4)
    assert (alone.total, alone.teacher_share) == (3 * student, 0.0)


PEAKS = {
    989.4: ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"),
    756.5: ("NVIDIA H100 PCIe",),
    835.5: ("NVIDIA H100 NVL",),
    312.0: ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
    2250.0: ("NVIDIA B200",),
    2500.0: ("NVIDIA GB200",),
    121.0: ("NVIDIA L4",),
    362.0: ("NVIDIA L40S",),
    148.0: ("NVIDIA H20",),
    1307.4: ("AMD Instinct MI300X",),
}


def test_a_device_is_known_by_its_name() -> None:
    for tflops, names in PEAKS.items():
        for name in names:
            assert peak_flops_per_second(name, precision="bf16") == tflops * 1e12, name


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA A1000", "cpu", "NVIDIA H2000", ""])
def test_an_unknown_device_has_no_peak_and_no_utilisation(name: str) -> None:
    assert peak_flops_per_second(name, precision="bf16") is None
    assert (
        mfu(1e9, tokens_per_second=1e3, num_devices=1, device_name=name, precision="bf16") is None
    )


def test_utilisation_is_the_share_of_all_devices() -> None:
    used = mfu(
        1e9,
        tokens_per_second=989.4e3 / 2,
        num_devices=4,
        device_name="NVIDIA H200",
        precision="bf16",
    )
    assert used == pytest.approx(0.125)
