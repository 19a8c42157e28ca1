"""Text written with a cache: against `transformers` for every family, and in every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.models.generation import Sampling, ScoreRow, Stops, WriteRow
from tests.distributed.hugging_face_models import (
    MODELS,
    VOCABULARY,
    WITH_EXPERTS,
    reference,
    save_model,
)
from tests.distributed.megatron_world import build, megatron_groups, small_architecture, writer_of
from tests.distributed.pool import Pool
from tests.e2e.runs import quick_and_slow

if TYPE_CHECKING:
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.runtime.groups import Groups

LENGTHS = (5, 11, 23, 8)
FAST = ("qwen3", "gemma2")
FAMILIES = tuple(MODELS)


def prompts(vocabulary: int = VOCABULARY) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist())
        for length in LENGTHS
    ]


def saved_family(folder: Path, name: str) -> Path:
    """Write a random model with positions for a prompt and 64 new tokens."""
    positions = {"n_positions" if name == "gpt2" else "max_position_embeddings": 128}
    return save_model(folder, name, **positions)


def _opened(folder: Path, groups: Groups) -> CachedGPT:
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.models.hugging_face.description import describe
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights
    from megatron_distill.models.weights import fill

    shape = describe(folder).architecture
    chunks = build(shape, groups, seed=None)
    fill(chunks, HuggingFaceWeights(folder, describe(folder)), groups=groups)
    return CachedGPT(chunks, shape, groups, torch.device("cpu"))


def copied_prefixes(*, are_copied: bool = True) -> Any:
    """Let rows begin with copies of their prefix, as on a GPU."""
    from megatron_distill.models.generation import model

    return patch.object(model, "copies_prefix", lambda _: are_copied)


def _of_folder(rank: int, world: int, folder: Path, prefix: tuple[int, ...]) -> dict[str, Any]:
    with megatron_groups() as groups:
        found = _opened(folder, groups)
        rows = [WriteRow(ids, sample, 64) for sample, ids in enumerate(prompts())]
        greedy = {"sampling": Sampling(), "stops": Stops()}
        alone = found.write(rows, **greedy)
        again = [WriteRow(row.ids, 0, 24) for row in rows]
        after = found.write(again, **greedy, prefix=prefix)
        with copied_prefixes():
            copied = found.write(again, **greedy, prefix=prefix)
        answers = [((4,), text.ids[:30], (9, 8, 7), (5, 6)) for text in alone]
        scored = [ScoreRow(row.ids, several) for row, several in zip(rows, answers, strict=True)]
        one = [ScoreRow((7,), (ids,)) for ids in prompts()]
        return {
            "alone": alone,
            "after": after,
            "copied": copied,
            "answers": answers,
            "scores": found.score(scored),
            "scores after": found.score(scored, prefix=prefix),
            "one": found.score(one, prefix=prefix),
        }


class _Reference:
    """`transformers` on whole texts."""

    def __init__(self, folder: Path) -> None:
        self.model = reference(folder)

    @torch.no_grad()
    def log_probs(self, context: Sequence[int], ids: Sequence[int]) -> tuple[Tensor, bool]:
        """Return the log-probability of each id after a context, and if all are the likeliest."""
        logits = self.model(torch.tensor([[*context, *ids]])).logits[0].double()
        rows = torch.log_softmax(logits, -1)[len(context) - 1 : -1]
        index = torch.tensor(ids)
        return rows.gather(1, index[:, None])[:, 0], bool((rows.argmax(-1) == index).all())

    @torch.no_grad()
    def written(self, context: Sequence[int], count: int) -> list[int]:
        """Return the continuation by `generate`, with its own cache."""
        found = self.model.generate(
            torch.tensor([context]), max_new_tokens=count, do_sample=False, eos_token_id=None
        )
        return found[0, len(context) :].tolist()


def close(found: Sequence[float], expected: Tensor, named: str = "log-probabilities") -> None:
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), expected, atol=1e-5, rtol=0,
        msg=lambda text: f"{named}: {text}",
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAMILIES],
)
def test_every_family_writes_and_scores_as_transformers(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    folder = saved_family(tmp_path / "model", name)
    prefix = prompts()[2][:13]
    (ours,) = pool.run(1, _of_folder, folder, prefix)
    theirs = _Reference(folder)
    for context, text in zip(prompts(), ours["alone"], strict=True):
        assert list(text.ids) == theirs.written(context, 64)
        assert text.ended == "length"
        expected, is_greedy = theirs.log_probs(context, text.ids)  # recomputed, without a cache
        assert is_greedy
        close(text.log_probs, expected)
    for context, text, copied in zip(prompts(), ours["after"], ours["copied"], strict=True):
        expected, is_greedy = theirs.log_probs((*prefix, *context), text.ids)
        assert is_greedy
        assert copied.ids == text.ids
        close(text.log_probs, expected)
        close(copied.log_probs, expected)
    for before, key in (((), "scores"), (prefix, "scores after")):
        for context, answers, scores in zip(prompts(), ours["answers"], ours[key], strict=True):
            for answer, score in zip(answers, scores, strict=True):
                expected, is_greedy = theirs.log_probs((*before, *context), answer)
                close(score.log_probs, expected)
                assert score.is_greedy == is_greedy
    for ids, (score,) in zip(prompts(), ours["one"], strict=True):
        close(score.log_probs, theirs.log_probs((*prefix, 7), ids)[0])


EVERY_STEP, AS_ON_CUDA = (1, 0), (4, 1)


@contextmanager
def looking(interval: int, delay: int) -> Iterator[None]:
    """Let the host look at the drawn ids every few steps, some steps later, as beside a GPU.

    Then products and attention of first rows are a GPU's too; else a CPU's own, of any size.
    """
    from megatron_distill.models.generation import attend, linear
    from megatron_distill.models.generation.pace import PACES, StopCheckPace

    least, short = (2**62, 0) if delay else (1, 2**62)
    limits = linear.Limits(least, least, orders_columns=False)
    copied = 0 if delay else linear.COPIED_BYTES
    with (
        patch.dict(PACES, {"cpu": StopCheckPace(interval, delay)}),
        patch.multiple(linear, _LEAST_NUMBERS=1, _LEAST_ROWS=1, _ROWS_MET=1),
        patch.object(linear, "limits", lambda: limits),
        patch.object(
            linear.WeightCopies, "__init__", lambda copies: vars(copies).update(left=copied)
        ),
        patch.object(attend, "_SHORT", short),
        copied_prefixes(are_copied=bool(delay)),
    ):
        yield


MOE = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"sliding_window": 7, "sliding_layers": (0, 2), "qkv_bias": True},
    "experts": {"moe": MOE},
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "whole": {"temperature": 0.9, "seed": 3},
    "cut": {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 4},
}


def _sampled(
    rank: int,
    world: int,
    layout: dict[str, Any],
    kind: str,
    order: tuple[int, ...] = (0, 1, 2, 3),
    cache_gib: float = 1.0,
    pace: tuple[int, int] = EVERY_STEP,
) -> dict[str, Any]:
    with megatron_groups(**layout) as groups, looking(*pace):
        architecture = small_architecture(
            **KINDS[kind], vocab_size=197, init_std=0.2, max_position_embeddings=64
        )
        model = writer_of(architecture, groups, vocab_size=190, cache_gib=cache_gib)
        every = prompts(190)
        rows = [WriteRow(every[row], row, 9 + row) for row in order]
        found: dict[str, Any] = {}
        for name, values in SAMPLINGS.items():
            texts = model.write(rows, sampling=Sampling(**values), stops=Stops(ids=(3, 50, 51)))
            found[name] = [texts[order.index(row)].ids for row in range(4)]
            log_probs = [texts[order.index(row)].log_probs for row in range(4)]
            found[f"{name}, log-probabilities"] = log_probs
        scored = [ScoreRow(every[row], ((5,), (9, 8, 7), (6, 5))) for row in order]
        scores = model.score(scored, prefix=every[1][:6])
        found["scores, log-probabilities"] = [
            [value for score in scores[order.index(row)] for value in score.log_probs]
            for row in range(4)
        ]
        return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, values in expected.items():
        if "log-prob" in name:
            for some, others in zip(found[name], values, strict=True):
                close(some, torch.tensor(others, dtype=torch.float64), name)
        else:
            assert found[name] == values, name


LAYOUTS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "dense", {"tensor": 2}),
    (4, "dense", {"tensor": 4}),  # of two key-value heads
    (2, "dense", {"pipeline": 2}),
    (2, "dense", {"pipeline": 2, "virtual_pipeline": 2}),
    (2, "dense", {"context": 2}),
    (2, "dense", {}),
    (4, "dense", {"tensor": 2, "pipeline": 2, "sequence": True}),
    (2, "experts", {"expert": 2}),
    (2, "experts", {"tensor": 2}),
    (4, "experts", {"tensor": 2, "expert": 2, "sequence": True}),
    (4, "experts", {"pipeline": 2, "expert": 2}),
]
QUICK = (LAYOUTS[0], LAYOUTS[3], LAYOUTS[4], LAYOUTS[5], LAYOUTS[7])


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[str], dict[str, Any]]:
    """The texts of one rank, written once for each kind of model."""
    return cache(lambda kind: pool.run(1, _sampled, {}, kind)[0])


@pytest.mark.parametrize(
    ("world", "kind", "layout"),
    [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=str(one))
        for one in LAYOUTS
    ],
)
def test_every_layout_draws_the_same_ids(
    pool: Pool,
    alone: Callable[[str], dict[str, Any]],
    world: int,
    kind: str,
    layout: dict[str, Any],
) -> None:
    expected = alone(kind)
    lengths = {len(ids) for ids in expected["whole"]}
    assert len(lengths) > 1, "rows should end at different steps"
    assert max(max(ids) for ids in expected["whole"]) < 190
    for found in pool.run(world, _sampled, layout, kind):
        same(found, expected)


def _of_families(
    rank: int, world: int, folders: dict[str, Path], layout: dict[str, Any]
) -> dict[str, Any]:
    with megatron_groups(**layout) as groups:
        found: dict[str, Any] = {}
        rows = [WriteRow(ids, sample, 20) for sample, ids in enumerate(prompts())]
        for family, folder in folders.items():
            model = _opened(folder, groups)
            for name in ("greedy", "cut"):
                sampling = Sampling(**SAMPLINGS[name])
                texts = model.write(rows, sampling=sampling, stops=Stops())
                found[f"{family}, {name}"] = [text.ids for text in texts]
                log_probs = [text.log_probs for text in texts]
                found[f"{family}, {name}, log-probabilities"] = log_probs
        return found


@pytest.mark.slow
def test_shards_of_every_family_draw_the_same_ids(pool: Pool, tmp_path: Path) -> None:
    """Tensor ranks of each, and expert ranks where there are experts, beside one rank."""
    folders = {name: saved_family(tmp_path / name, name) for name in FAMILIES}
    (expected,) = pool.run(1, _of_families, folders, {})
    layouts: dict[str, Sequence[str]] = {"tensor": FAMILIES, "expert": WITH_EXPERTS}
    for kind, names in layouts.items():
        several = {name: folders[name] for name in names}
        for found in pool.run(2, _of_families, several, {kind: 2}):
            same(found, {place: expected[place] for place in found})


# Ranks, kind and layout; the order of the rows, the cache, and when the host looks at drawn ids.
WAYS: dict[str, tuple[int, str, dict[str, Any], tuple[int, ...], float, tuple[int, int]]] = {
    "another order": (1, "dense", {}, (3, 1, 0, 2), 1.0, EVERY_STEP),
    "small batches": (1, "dense", {}, (2, 0, 3, 1), 1e-6, EVERY_STEP),
    "small batches, TP2": (2, "dense", {"tensor": 2}, (2, 0, 3, 1), 1e-6, EVERY_STEP),
    "small batches, CP2": (2, "dense", {"context": 2}, (1, 3, 2, 0), 1e-6, EVERY_STEP),
    "small batches, EP2": (2, "experts", {"expert": 2}, (2, 0, 3, 1), 1e-6, EVERY_STEP),
    "late looks": (1, "dense", {}, (3, 1, 0, 2), 1.0, AS_ON_CUDA),
    "late looks, PP2+virtual": (
        2, "dense", {"pipeline": 2, "virtual_pipeline": 2}, (3, 1, 0, 2), 1.0, AS_ON_CUDA,
    ),
    "late looks, EP2": (2, "experts", {"expert": 2}, (3, 1, 0, 2), 1.0, AS_ON_CUDA),
}  # fmt: skip
QUICK_WAYS = ("another order", "small batches", "late looks", "late looks, EP2")


@pytest.mark.parametrize("way", quick_and_slow(WAYS, QUICK_WAYS))
def test_neither_order_nor_batches_nor_late_looks_change_the_ids(
    pool: Pool, alone: Callable[[str], dict[str, Any]], way: str
) -> None:
    world, kind, *given = WAYS[way]
    layout, *others = given
    for found in pool.run(world, _sampled, layout, kind, *others):
        same(found, alone(kind))


def _refused(rank: int, world: int) -> dict[str, str]:
    with megatron_groups(tensor=2) as groups:
        architecture = small_architecture()
        model = writer_of(architecture, groups)

        def write(*ids: int, strings: tuple[str, ...] = (), limit: int = 2) -> None:
            stops = Stops(strings=strings)
            model.write([WriteRow(ids, 0, limit)], sampling=Sampling(), stops=stops)

        def damaged() -> None:
            with torch.no_grad():
                model.chunks[0].decoder.layers[1].mlp.linear_fc2.weight[3, 2] = float("nan")
            write(5, 6, limit=9)

        cases = {
            "long": lambda: write(*range(33)),
            "empty": lambda: write(),
            "unknown id": lambda: write(5, 200),
            "no decoder": lambda: write(5, strings=("a",)),
            "no answer": lambda: model.score([ScoreRow((5,), ((1,), ()))]),
            "damaged": damaged,
        }
        found = {}
        for name, case in cases.items():
            try:
                case()
            except (ConfigError, CheckpointError) as error:
                found[name] = str(error)
        return found


def test_refused_rows_are_named_on_all_ranks(pool: Pool) -> None:
    one, other = pool.run(2, _refused)
    assert one == other
    assert one["long"].startswith("a row has 33 tokens, and the model has 32 positions")
    assert "no token after the shared prefix" in one["empty"]
    assert one["unknown id"].startswith("a row has token id 200, and the model has 200 ids")
    assert one["no decoder"].startswith("stop strings ('a',) need a tokenizer")
    assert "has no answer" in one["no answer"]
    assert "logits are not numbers" in one["damaged"]


def _asked_to_stop(
    rank: int, world: int, layout: dict[str, Any], kind: str, pace: tuple[int, int]
) -> list[int]:
    """Write rows of one batch each until the last rank's second question; returns their lengths."""
    with megatron_groups(**layout) as groups, looking(*pace):
        shape = small_architecture(**KINDS[kind], init_std=0.2, max_position_embeddings=64)
        model = writer_of(shape, groups, cache_gib=1e-6)
        questions = iter(range(100))
        texts = model.write(
            [WriteRow(ids, sample, 40) for sample, ids in enumerate(prompts(190))],
            sampling=Sampling(),
            stops=Stops(),
            stop_requested=lambda: next(questions) >= 1 and rank == world - 1,
        )
        return [len(text.ids) for text in texts]


@pytest.mark.parametrize("pace", [EVERY_STEP, AS_ON_CUDA], ids=str)
@pytest.mark.parametrize(
    ("world", "kind", "layout", "lengths"),
    [
        (1, "dense", {}, [0, 0, 17, 0]),
        (4, "dense", {"tensor": 2, "pipeline": 2}, [0, 0, 17, 0]),
        (2, "dense", {}, [0, 17, 17, 0]),
        (2, "experts", {"expert": 2}, [0, 17, 17, 0]),
    ],
    ids=str,
)
def test_a_request_to_one_rank_to_stop_ends_the_rows_of_all(
    pool: Pool,
    world: int,
    kind: str,
    layout: dict[str, Any],
    lengths: list[int],
    pace: tuple[int, int],
) -> None:
    """Rows begin from the longest prompt on; the second question comes before the 17th id."""
    assert pool.run(world, _asked_to_stop, layout, kind, pace) == [lengths] * world
