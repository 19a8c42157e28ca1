"""Drawn ids: cuts, ties, shards; and the text that they become."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import add
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.models.generation import Sampling
from megatron_distill.models.generation.batches import RowSize, plan_batches
from megatron_distill.models.generation.draw import draw, draw_keys, gumbel_noise, row_key
from megatron_distill.models.generation.text import TextStream
from megatron_distill.ops import VocabShard
from tests.distributed.pool import Pool

DRAWS = 20_000
# Of chi-square with 49 degrees of freedom, at p = .001.
LIMIT_49 = 85.35


def head(size: int = 50, seed: int = 2) -> Tensor:
    return 1.5 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def reference_softmax(logits: Tensor, sampling: Sampling) -> np.ndarray:
    """The distribution after the cuts, by sorting."""
    z = logits.double().numpy() / sampling.temperature
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    p = np.exp(z - z.max())
    if sampling.top_k is not None:
        p[order[sampling.top_k :]] = 0.0
    p /= p.sum()
    if sampling.top_p < 1.0:
        before = np.cumsum(p[order]) - p[order]
        p[[i for i, mass in zip(order, before, strict=True) if mass >= sampling.top_p]] = 0.0
    p[p < sampling.min_p * p.max()] = 0.0
    return p / p.sum()


class _Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1


def draws(logits: Tensor, sampling: Sampling, count: int = DRAWS, vocabulary: int = 50) -> Tensor:
    """Ids of `count` rows with the same logits, at 8 positions of different samples."""
    rows = torch.tensor([row_key(sampling.seed, sample) for sample in range(count // 8)])
    keys = draw_keys(rows.repeat_interleave(8), torch.arange(8).repeat(count // 8))
    shard = VocabShard(size=vocabulary, start=0, stop=logits.shape[0])
    found = draw(
        logits[:vocabulary].expand(len(keys), -1),
        shard=shard,
        group=_Alone(),  # type: ignore[arg-type]
        sampling=sampling,
        keys_b=keys,
    )
    return found.ids_b


@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "seed": 9},
        pytest.param({"top_k": 12}, marks=pytest.mark.slow),
        pytest.param({"top_p": 0.8}, marks=pytest.mark.slow),
        {"min_p": 0.1},
        pytest.param(
            {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_draws_follow_the_softmax(cut: dict[str, Any]) -> None:
    sampling = Sampling(**{"temperature": 1.0, **cut})
    expected = reference_softmax(head(), sampling) * DRAWS
    counts = np.bincount(draws(head(), sampling).numpy(), minlength=50)
    is_possible = expected > 0
    assert counts[~is_possible].sum() == 0, "an excluded id was drawn"
    surprise = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    freedom = int(is_possible.sum()) - 1
    # Wilson and Hilferty's cube: within .5 of the table from 5 degrees of freedom on.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert limit <= LIMIT_49 + 0.5
    assert surprise < limit


@given(
    st.lists(st.sampled_from([-3.0, -0.5, -0.0, 0.0, 0.25, 1.0, 2.0]), min_size=2, max_size=40),
    st.integers(1, 45),
    st.sampled_from([1e-6, 0.3, 0.5, 0.77, 0.999]),
)
@settings(max_examples=25, deadline=None)
def test_cuts_with_ties_are_those_of_a_sorted_list(
    values: list[float], top_k: int, top_p: float
) -> None:
    """The set of ids that are ever drawn, seen through a law: an excluded id has no chance."""
    from megatron_distill.models.generation.draw import _cut

    logits = torch.tensor(values) * 1.25
    for cut in ({"top_k": top_k}, {"top_p": top_p}, {"top_k": top_k, "top_p": top_p}):
        sampling = Sampling(temperature=0.8, **cut)
        hidden = _cut(logits[None], group=_Alone(), sampling=sampling)  # type: ignore[arg-type]
        inside = (~hidden[0]).numpy()
        expected = reference_softmax(logits, sampling)
        cumulated = abs(np.cumsum(sorted(expected)[::-1]) - top_p).min()
        if cumulated > 1e-9:  # else rounding decides
            assert (inside == (expected > 0)).all()


def test_greedy_takes_the_lowest_id_among_equals_and_no_padding() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 9.0])
    assert set(draws(logits, Sampling(), count=16, vocabulary=4).tolist()) == {1}


@given(
    st.integers(1, 200),
    st.lists(st.tuples(st.integers(0, 199), st.sampled_from([1.0, 2.0, math.inf]))),
)
@settings(max_examples=25, deadline=None)
def test_the_largest_of_any_width_is_the_first_of_equal_ones(
    width: int, raised: list[tuple[int, float]]
) -> None:
    from megatron_distill.models.generation.draw import _largest

    values = torch.full((2, width), -math.inf)
    for place, value in raised:
        values[0, place % width] = value
        values[1, -1 - place % width] = value
    found, columns = _largest(values)
    assert found.tolist() == [max(row) for row in values.tolist()]
    assert columns.tolist() == [row.index(max(row)) for row in values.tolist()]


def test_noise_is_a_function_of_its_key_alone() -> None:
    keys = draw_keys(torch.tensor([row_key(1, 2), row_key(1, 3), row_key(2, 2)]), torch.arange(3))
    whole = gumbel_noise(keys, start=0, count=1000)
    torch.testing.assert_close(gumbel_noise(keys[1:], start=300, count=50), whole[1:, 300:350])
    assert len(whole.unique()) == whole.numel()
    # Mean and variance of Gumbel's distribution.
    many = gumbel_noise(keys, start=0, count=200_000)
    assert float(many.mean()) == pytest.approx(0.5772157, abs=0.006)
    assert float(many.var()) == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert abs(float(torch.corrcoef(many)[0, 1])) < 0.01


def test_the_hash_does_not_change() -> None:
    """A seed gives the same text in later releases."""
    assert row_key(0, 0) == 5197578548964807871
    keys = draw_keys(torch.tensor([row_key(1234, 5)]), torch.tensor([17]))
    assert keys.tolist() == [-8059368157390930768]


def _sharded(rank: int, world: int, cut: dict[str, Any], padded: int) -> tuple[list[int], Tensor]:
    width = padded // world
    shard = VocabShard(size=50, start=rank * width, stop=(rank + 1) * width)
    keys = draw_keys(torch.tensor([row_key(7, n) for n in range(64)]), torch.arange(64))
    logits = torch.stack([head(seed=n) for n in range(64)]).round(decimals=1)  # with ties
    found = draw(
        logits[:, shard.start : min(50, shard.stop)],
        shard=shard,
        group=dist.group.WORLD,  # type: ignore[arg-type]
        sampling=Sampling(**cut),
        keys_b=keys,
    )
    own = torch.log_softmax(logits.double(), 1).gather(1, found.ids_b[:, None])[:, 0]
    torch.testing.assert_close(found.log_probs_b, own, atol=2e-6, rtol=0)
    return found.ids_b.tolist(), found.log_probs_b


@pytest.mark.parametrize(
    "cut",
    [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 9},
        {"temperature": 1.5, "top_p": 0.7, "min_p": 0.01},
    ],
    ids=str,
)
def test_shards_draw_as_one(pool: Pool, cut: dict[str, Any]) -> None:
    ((expected, _),) = pool.run(1, _sharded, cut, 50)
    for padded in (52, 104):  # the second rank's shard is part of the vocabulary, or none of it
        for ids, _ in pool.run(2, _sharded, cut, padded):
            assert ids == expected


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.1}, "temperature=-0.1: must be 0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": 0}, "top_k=0: must be 1 or more"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0"),
        ({"min_p": 1.5}, "min_p=1.5: must be from 0 to 1"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Sampling(**values)


def by_bytes(ids: Sequence[int]) -> str:
    """A decoder with one id per byte."""
    return bytes(ids).decode("utf-8", "replace")


def without_first_space(ids: Sequence[int]) -> str:
    """A decoder that drops a leading space, as SentencePiece's."""
    return by_bytes(ids).removeprefix(" ")


def pieces(stream: TextStream, ids: bytes) -> list[str]:
    found = []
    for token in ids:
        is_over = stream.push(token)
        found.append(stream.new_text())
        if is_over:
            break
    stream.finish()
    return [*found, stream.new_text()]


@given(st.text(max_size=12))
def test_streamed_pieces_join_to_the_text_and_split_no_character(text: str) -> None:
    found = pieces(TextStream(by_bytes), text.encode("utf-8", "replace"))
    assert "".join(found) == text.encode("utf-8", "replace").decode()
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)


@given(st.text("ab\u00e9 ", max_size=20), st.lists(st.text("ab\u00e9", min_size=1, max_size=3)))
def test_a_stop_string_over_several_ids_ends_the_text_before_it(
    text: str, strings: list[str]
) -> None:
    stream = TextStream(by_bytes, tuple(strings))
    found = pieces(stream, text.encode())
    # The first that is complete; of those that are complete with one character, the longest.
    ends = [(text.find(one) + len(one), text.find(one)) for one in strings if one in text]
    first = min((end for end, _ in ends), default=0)
    expected = text[: min(start for end, start in ends if end == first)] if ends else text
    assert stream.text == "".join(found) == expected
    assert stream.is_stopped == bool(ends)


def test_text_that_may_become_a_stop_string_waits() -> None:
    stream = TextStream(by_bytes, ("\n\nQ",))
    assert pieces(stream, b"a\n\nb\n\nQ") == ["a", "", "", "\n\nb", "", "", "", ""]


PIECES = ("a", "b\n\nc: d", "Q", ":", " e", "\n\nc:")


def by_pieces(ids: Sequence[int]) -> str:
    """A decoder with several characters per id."""
    return "".join(PIECES[token] for token in ids)


@pytest.mark.parametrize(
    ("strings", "ids", "text", "is_stopped"),
    [
        ((": ", "\n\n"), (0, 1), "ab", True),  # two in one id: the earliest
        (("c: d", "\n\nc"), (0, 1), "ab", True),  # one inside of the other
        (("a\n\n",), (0, 5, 4), "", True),  # over two ids, and the whole text
        (("Q:",), (4, 2, 3, 4), " e", True),
        (("Q:",), (3, 4, 2), ": eQ", False),  # the prompt ends with its beginning
    ],
)
def test_stops_in_ids_of_several_characters(
    strings: tuple[str, ...], ids: tuple[int, ...], text: str, is_stopped: bool
) -> None:
    """The prompt has each stop string, which ends nothing."""
    stream = TextStream(by_pieces, strings, context=(0, 5, 1, 2, 3, 2))
    for token in ids:
        if stream.push(token):
            break
    assert (stream.finish(), stream.is_stopped) == (text, is_stopped)


def test_the_first_space_is_kept_after_a_prompt() -> None:
    stream = TextStream(without_first_space, context=b"ab")
    assert "".join(pieces(stream, b" c d")) == " c d"


def test_an_unfinished_character_is_in_the_text_at_its_end() -> None:
    assert pieces(TextStream(by_bytes), b"a\xc3") == ["a", "", "\N{REPLACEMENT CHARACTER}"]


sizes_of_rows = st.lists(st.builds(RowSize, st.integers(1, 90), st.integers(0, 40)), max_size=12)


@pytest.mark.parametrize("in_step", [False, True])
@given(sizes_of_rows)
def test_data_ranks_share_the_rows(in_step: bool, sizes: list[RowSize]) -> None:
    plans = [
        plan_batches(
            sizes, rank=rank, ranks=3, groups=2, in_step=in_step, row_bytes=add, cache_bytes=200
        )
        for rank in range(3)
    ]
    rows = [row for plan in plans for batch in plan.mine for group in batch for row in group]
    assert sorted(rows) == list(range(len(sizes)))
    if in_step:
        shapes = {tuple(len(batch) for batch in plan.mine) for plan in plans}
        assert len(shapes) == 1, "ranks would make different numbers of steps"
