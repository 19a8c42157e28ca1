"""FLOPs per token and model FLOPs utilization."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_distill.models.architecture import Architecture, MixtureOfExperts
from megatron_distill.train.throughput import (
    forward_flops_per_token,
    heads_in_layers,
    mfu,
    peak_flops_per_second,
    step_flops_per_token,
)

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


@pytest.mark.parametrize(("window", "pairs"), [(1, 5), (2, 9), (4, 14), (5, 15), (9, 15)])
def test_a_window_costs_the_pairs_that_it_leaves(window: int, pairs: int) -> None:
    # Of 5 tokens, token i sees min(i + 1, window) positions; 24 products of 12 and 12 each.
    sliding = dataclasses.replace(STUDENT, sliding_window=window, sliding_layers=(1,))
    without = forward_flops_per_token(STUDENT, sequence_length=5)
    found = forward_flops_per_token(sliding, sequence_length=5)
    assert without - found == pytest.approx(2 * 24 * (15 - pairs) / 5)


class PlainGpt(torch.nn.Module):
    """Every matrix product of a GPT, spelled out, with the whole score matrix computed."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.shape = shape
        self.mlp_matrices = 3 if shape.is_gated else 2
        self.experts = shape.moe.num_experts if shape.moe else 0
        self.experts_per_token = shape.moe.top_k if shape.moe else 1
        query, kv = (
            heads * shape.head_size for heads in (shape.num_attention_heads, shape.num_kv_heads)
        )
        hidden = shape.hidden_size
        inner = shape.moe.ffn_hidden_size if shape.moe else shape.ffn_hidden_size
        sizes = [(query + 2 * kv, hidden), (hidden, query)]
        self.attention = torch.nn.ParameterList(
            torch.randn(rows, columns) for _ in range(shape.num_layers) for rows, columns in sizes
        )
        self.mlp = torch.nn.ParameterList(
            torch.randn(inner, hidden) for _ in range(shape.num_layers * self.mlp_matrices)
        )
        self.router = torch.randn(self.experts, hidden)
        self.embedding = torch.nn.Parameter(torch.randn(shape.vocab_size, hidden))
        self.head = torch.nn.Parameter(torch.randn(shape.vocab_size, hidden))

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        hidden_bsH = torch.nn.functional.embedding(tokens_bs, self.embedding)
        for layer in range(shape.num_layers):
            hidden_bsH = hidden_bsH + self.attend(layer, hidden_bsH)
            if self.experts:
                hidden_bsH @ self.router.T
            for _ in range(self.experts_per_token):
                hidden_bsH = hidden_bsH + self.expand(layer, hidden_bsH)
        return hidden_bsH @ self.head.T

    def attend(self, layer: int, hidden_bsH: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        inwards, outwards = self.attention[2 * layer], self.attention[2 * layer + 1]
        heads = (hidden_bsH @ inwards.T).unflatten(-1, (-1, shape.head_size)).transpose(1, 2)
        query, key, value = heads.split(
            [shape.num_attention_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        copies = shape.num_attention_heads // shape.num_kv_heads
        key, value = (one.repeat_interleave(copies, dim=1) for one in (key, value))
        mixed = torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        return mixed.transpose(1, 2).flatten(-2) @ outwards.T

    def expand(self, layer: int, hidden_bsH: torch.Tensor) -> torch.Tensor:
        first = layer * self.mlp_matrices
        inner = hidden_bsH @ self.mlp[first].T
        if self.mlp_matrices == 3:
            inner = torch.nn.functional.silu(inner) * (hidden_bsH @ self.mlp[first + 2].T)
        return inner @ self.mlp[first + 1]


@pytest.mark.parametrize("shape", [STUDENT, MIXTURE])
def test_torch_counts_the_same_forward_and_backward(shape: Architecture) -> None:
    length, batch = 12, 2
    model = PlainGpt(shape)
    tokens_bs = torch.randint(shape.vocab_size, (batch, length))
    expected = forward_flops_per_token(shape, sequence_length=length, attended_positions=length)
    with FlopCounterMode(display=False) as counter:
        logits = model(tokens_bs)
        forward = counter.get_total_flops()
        # The embedding takes a gradient, so the first layer's input gradient is computed too.
        logits.sum().backward()
    assert forward == batch * length * expected
    backward = counter.get_total_flops() - forward
    # The plain model's router feeds nothing, so nothing comes back through it.
    router = shape.num_layers * 2 * shape.hidden_size * model.experts
    assert backward == batch * length * 2 * (expected - router)


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


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA H20", 148.0),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_device_is_known_by_its_name(name: str, tflops: float) -> None:
    assert peak_flops_per_second(name, precision="bf16") == tflops * 1e12


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
