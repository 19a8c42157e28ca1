"""Sampling of new tokens."""

import pytest
import torch
from torch import Tensor

from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.evaluation.generate import Sampling, generate, sample_next

VOCAB = 7
EOS = 6


def counting(tokens_bs: Tensor) -> Tensor:
    """The next token is the last one plus 1, up to EOS."""
    return torch.nn.functional.one_hot((tokens_bs[:, -1] + 1) % VOCAB, VOCAB).float() * 30


def uncertain(tokens_bs: Tensor) -> Tensor:
    """Logits that depend on the whole context."""
    generator = torch.Generator()
    rows = []
    for row in tokens_bs.tolist():
        generator.manual_seed(hash(tuple(row)) % 2**31)
        rows.append(torch.randn(VOCAB, generator=generator))
    return torch.stack(rows)


def draw(logits_V: Tensor, *, count: int = 4000, **sampling: float) -> Tensor:
    """The share of each token among `count` draws."""
    chosen = sample_next(
        logits_V.expand(count, -1),
        sampling=Sampling(max_new_tokens=1, **sampling),
        generator=torch.Generator().manual_seed(1),
    )
    return torch.bincount(chosen, minlength=len(logits_V)) / count


def test_greedy_follows_the_likeliest_token_and_each_row_ends_before_its_eos() -> None:
    sampling = Sampling(max_new_tokens=5, temperature=0.0, eos_id=EOS)
    written = generate(counting, torch.tensor([[9, 3], [9, 0]]), sampling=sampling, max_context=8)
    assert written == [[4, 5], [1, 2, 3, 4, 5]]


def test_any_of_the_stop_tokens_ends_a_row() -> None:
    sampling = Sampling(max_new_tokens=9, temperature=0.0, eos_id=EOS, stop_ids=(2, 5))
    written = generate(counting, torch.tensor([[9, 3], [9, 0]]), sampling=sampling, max_context=8)
    assert written == [[4], [1]]


def test_generation_stops_asking_once_every_row_has_ended() -> None:
    asked = []

    def spied(tokens_bs: Tensor) -> Tensor:
        asked.append(tokens_bs.tolist())
        return counting(tokens_bs)

    sampling = Sampling(max_new_tokens=50, temperature=0.0, eos_id=EOS)
    generate(spied, torch.tensor([[2, 4]]), sampling=sampling, max_context=3)
    assert asked == [[[2, 4]], [[2, 4, 5]]]


def test_the_model_sees_no_more_than_its_context() -> None:
    lengths = []

    def spied(tokens_bs: Tensor) -> Tensor:
        lengths.append(tokens_bs.shape[1])
        return counting(tokens_bs)

    sampling = Sampling(max_new_tokens=4, temperature=0.0)
    (row,) = generate(spied, torch.tensor([[0, 1]]), sampling=sampling, max_context=3)
    assert lengths == [2, 3, 3, 3]
    assert row == [2, 3, 4, 5]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_seed_fixes_the_text(top_p: float) -> None:
    def text(seed: int) -> list[list[int]]:
        sampling = Sampling(max_new_tokens=30, top_p=top_p, seed=seed)
        return generate(uncertain, torch.tensor([[1, 2, 3]]), sampling=sampling, max_context=4)

    torch.manual_seed(0)
    first = text(5)
    torch.manual_seed(1)
    assert text(5) == first
    assert text(6) != first


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits_V = torch.tensor([2.0, 1.0, 0.0, float("-inf")])
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(logits_V / temperature, dim=-1)
        shares = draw(logits_V, temperature=temperature)
        # Five standard errors of the rarest event counted.
        assert torch.allclose(shares, expected, atol=5 * 0.5 / 4000**0.5), temperature
        assert shares[3] == 0


def test_the_nucleus_is_the_smallest_set_that_holds_top_p() -> None:
    logits_V = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
    assert (draw(logits_V, top_p=0.5) > 0).tolist() == [False, True, False, False]
    assert (draw(logits_V, top_p=0.51) > 0).tolist() == [False, True, False, True]
    assert (draw(logits_V, top_p=0.76) > 0).tolist() == [False, True, True, True]
    assert (draw(logits_V, top_p=1.0) > 0).tolist() == [True] * 4
    inside = draw(logits_V, top_p=0.7)
    assert torch.allclose(inside[[1, 3]], torch.tensor([2 / 3, 1 / 3]), atol=0.04)


def test_the_least_top_p_still_leaves_a_token() -> None:
    assert draw(torch.zeros(5), top_p=1e-9)[0] == 1.0


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits_bV = torch.tensor([[0.0, 2.0, 2.0, 2.0]])
    sampling = Sampling(max_new_tokens=1, temperature=0.0)
    assert sample_next(logits_bV, sampling=sampling, generator=torch.Generator()).tolist() == [1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_refused(bad: float, temperature: float) -> None:
    sampling = Sampling(max_new_tokens=3, temperature=temperature)
    with pytest.raises(CheckpointError, match="not numbers"):
        generate(
            lambda tokens_bs: torch.tensor([[0.0, bad, 1.0]]),
            torch.tensor([[0]]),
            sampling=sampling,
            max_context=4,
        )


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -0.5}, r"temperature=-0\.5"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, r"top_p=0\.0"),
        ({"top_p": 1.5}, r"top_p=1\.5"),
    ],
)
def test_a_value_out_of_range_is_named(values: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Sampling(**{"max_new_tokens": 1, **values})


def test_no_new_tokens_asks_the_model_nothing() -> None:
    def never(tokens_bs: Tensor) -> Tensor:
        raise AssertionError("asked")

    sampling = Sampling(max_new_tokens=0)
    assert generate(never, torch.tensor([[1]]), sampling=sampling, max_context=2) == [[]]
