"""Speculative decoding and texts of the teacher: the law of the text, blocks, every layout."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megatron_distill.models.generation import Sampling, ScoreRow, Stops, WriteRow
from tests.distributed.megatron_world import build, megatron_groups, small_architecture, writer_of
from tests.distributed.pool import Pool

TOKENS = 190
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # The teacher's head has other rows than the student's, and its layers windows.
    "windows": ({"sliding_window": 5, "sliding_layers": (0, 2), "vocab_size": 216}, {}),
    "experts": ({"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}}, {}),
}


def _models(groups: Any, kind: str) -> tuple[Any, Any]:
    """A teacher and a student that is near it: the same seed, and two of its layers."""
    shapes = (
        small_architecture(init_std=0.15, max_position_embeddings=64, **changes)
        for changes in KINDS[kind]
    )
    teacher, student = (
        writer_of(shape, groups, vocab_size=TOKENS, cache_gib=1.0) for shape in shapes
    )
    return teacher, student


def _prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(4)
    lengths = (5, 1, 9, 3, 12)
    return [
        tuple(torch.randint(3, TOKENS, (length,), generator=generator).tolist())
        for length in lengths
    ]


def _everything(rank: int, world: int, layout: dict[str, int], kind: str) -> dict[str, Any]:
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.evaluation.speculative import speculate
        from megatron_distill.train.evaluation.teacher_text import Text, compare_texts

        teacher, student = _models(groups, kind)
        rows = [WriteRow(ids, number, 14) for number, ids in enumerate(_prompts())]
        greedy = teacher.write(rows, sampling=Sampling(), stops=Stops(ids=(7,)))
        sampled = teacher.write(
            rows, sampling=Sampling(temperature=1.0, seed=2), stops=Stops(ids=(7,))
        )
        # Of unequal lengths, one without a block of three.
        texts = [
            Text(row.ids, text.ids[: 14 - 3 * row.sample])
            for row, text in zip(rows, sampled, strict=True)
        ]

        def blocks(rule: Any, verifier: Any = teacher) -> Any:
            return speculate(
                verifier, student, _prompts(), draft=3, tokens=14, rule=rule, seed=5, stop_ids=(7,)
            )

        return {
            "written": [text.ids for text in greedy],
            "greedy": blocks("greedy"),
            "sampled": blocks("sampled"),
            "itself": blocks("sampled", student),
            "texts": [(text.prompt, text.written) for text in texts],
            "compared": compare_texts(teacher, student, texts),
        }


def _expected(blocks: Any) -> list[float]:
    return [block.expected for text in blocks for block in text.blocks]


LAYOUTS = [
    pytest.param(
        *(2, "windows", {"pipeline": 2, "virtual_pipeline": 2}), id="VPP2", marks=pytest.mark.slow
    ),
    pytest.param(
        *(4, "windows", {"tensor": 2, "pipeline": 2}), id="TP2xPP2", marks=pytest.mark.slow
    ),
    pytest.param(2, "windows", {}, id="DP2", marks=pytest.mark.slow),
    pytest.param(2, "experts", {"expert": 2}, id="EP2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "kind", "layout"), LAYOUTS)
def test_blocks_and_figures_are_the_same_in_every_layout(
    pool: Pool, world: int, kind: str, layout: dict[str, int]
) -> None:
    (alone,) = pool.run(1, _everything, {}, kind)
    assert [text.ids for text in alone["greedy"]] == alone["written"]
    counts = {block.tokens for text in alone["greedy"] + alone["sampled"] for block in text.blocks}
    assert len(counts) > 1, "some drafts should be accepted, and some not"
    for text in alone["itself"]:
        for block in text.blocks:
            assert block.tokens == 4
            assert block.expected == pytest.approx(4.0, abs=1e-4)
    for found in pool.run(world, _everything, layout, kind):
        for name in ("greedy", "sampled", "itself"):
            assert [text.ids for text in found[name]] == [text.ids for text in alone[name]]
            assert _expected(found[name]) == pytest.approx(_expected(alone[name]), abs=1e-4)
        assert found["compared"].keys() == alone["compared"].keys()
        for name in (
            *("acceptance", "forward_kl", "reverse_kl", "js_divergence", "label_nll"),
            *("top1_agreement", "top5_overlap", "top20_overlap"),
        ):
            for one in (name, f"{name}_stderr"):
                assert found["compared"][one] == pytest.approx(alone["compared"][one], abs=1e-5)
        for name in ("tokens_per_verification", "tokens_per_verification_stderr"):
            tokens = alone["compared"][name]
            assert found["compared"][name] == pytest.approx(tokens, abs=1e-5)
        assert found["compared"]["text_hash"] == alone["compared"]["text_hash"]


def _dense(rank: int, world: int) -> tuple[Any, Any]:
    """Whole distributions of both models after each id of each text, in float64."""
    found = _everything(rank, world, {}, "windows")
    with megatron_groups() as groups:
        from megatron_distill.models.gpt import run_model
        from megatron_distill.runtime.batch import Batch

        models = _models(groups, "windows")
        both = []
        for prompt, written in found["texts"]:
            ids = torch.tensor([(*prompt, *written)])
            shares = []
            for model in models:
                with torch.no_grad():
                    model.chunks[0].eval()
                    hidden = run_model(model.chunks[0], Batch.untrained(ids), context_size=1)[:, 0]
                    logits = hidden.double() @ model.chunks[0].head_weight()[:TOKENS].double().T
                shares.append(logits.softmax(-1)[len(prompt) - 1 : -1])
            both.append((shares[0], shares[1]))
    return found["compared"], both


def _error(parts: list[torch.Tensor]) -> float:
    """Standard error of the mean over all values of texts that are independent of each other."""
    parts = [part for part in parts if len(part)]
    mean, count = torch.cat(parts).mean(), len(parts)
    squares = sum(float((part - mean).sum()) ** 2 for part in parts)
    return math.sqrt(count / (count - 1) * squares) / sum(map(len, parts))


def test_figures_on_texts_of_the_teacher_equal_dense_ones(pool: Pool) -> None:
    ((found, both),) = pool.run(1, _dense)
    overlaps = [torch.minimum(p, q).sum(1) for p, q in both]
    acceptance = float(torch.cat(overlaps).mean())
    assert found["acceptance"] == pytest.approx(acceptance, abs=1e-6)
    middle = [(p, q, (p + q) / 2) for p, q in both]
    divergences = [(p * (p / m).log() + q * (q / m).log()).sum(1) / 2 for p, q, m in middle]
    assert found["js_divergence"] == pytest.approx(float(torch.cat(divergences).mean()), abs=1e-6)
    assert found["js_divergence_stderr"] == pytest.approx(_error(divergences), abs=1e-6)
    forward = [(p * (p / q).log()).sum(1) for p, q in both]
    assert found["forward_kl"] == pytest.approx(float(torch.cat(forward).mean()), abs=1e-6)
    assert found["acceptance_stderr"] == pytest.approx(_error(overlaps), abs=1e-6)
    assert found["forward_kl_stderr"] == pytest.approx(_error(forward), abs=1e-6)
    assert [len(part) for part in overlaps] == [14, 11, 8, 5, 2]
    for length in (1, 3):
        blocks = [
            1 + part.unfold(0, length, 1).cumprod(1).sum(1) if len(part) >= length else part[:0]
            for part in overlaps
        ]
        value = found["tokens_per_verification"][str(length)]
        assert value == pytest.approx(float(torch.cat(blocks).mean()), abs=1e-6)
        error = found["tokens_per_verification_stderr"][str(length)]
        assert error == pytest.approx(_error(blocks), abs=1e-6)


SMALL_TOKENS, ROWS = 6, 3000


def _many(rank: int, world: int) -> tuple[list[tuple[int, ...]], list[float], dict[str, float]]:
    """Many texts of two ids after one prompt, and the teacher's probability of each."""
    with megatron_groups() as groups:
        from megatron_distill.models.generation.model import CachedGPT
        from megatron_distill.train.evaluation.speculative import block_figures, speculate

        models = []
        for seed in (3, 4):
            shape = small_architecture(num_layers=1, vocab_size=8, init_std=0.3)
            chunks = build(shape, groups, seed=seed)
            models.append(
                CachedGPT(chunks, shape, groups, torch.device("cpu"), vocab_size=SMALL_TOKENS)
            )
        teacher, student = models
        texts = speculate(
            teacher, student, [(1, 4, 2)] * ROWS, draft=2, tokens=2, rule="sampled", seed=9
        )
        answers = tuple((a, b) for a in range(SMALL_TOKENS) for b in range(SMALL_TOKENS))
        (scores,) = teacher.score([ScoreRow((1, 4, 2), answers)])
        logs = [score.log_prob for score in scores]
        return [text.ids for text in texts], logs, block_figures(texts, "sampled")


def test_the_text_follows_the_teacher_and_blocks_the_expectation(pool: Pool) -> None:
    ((ids, logs, figures),) = pool.run(1, _many)
    counts = torch.zeros(SMALL_TOKENS, SMALL_TOKENS, dtype=torch.float64)
    for first, second in ids:
        counts[first, second] += 1
    expected = ROWS * torch.tensor(logs, dtype=torch.float64).exp().view_as(counts)
    assert float(expected.sum()) == pytest.approx(ROWS, rel=1e-6)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    # 35 degrees of freedom: their 99.9 % quantile.
    assert statistic < 66.6
    assert 1.3 < figures["tokens_per_verification"] < 2.9, "drafts should differ from the teacher"
    gap = figures["tokens_per_verification"] - figures["expected"]
    assert abs(gap) < 3 * figures["stderr"]


FREE_TOKENS, DRAFTS = 12, (1, 2, 4, 8)


def _shares() -> tuple[torch.Tensor, torch.Tensor]:
    """The distributions p and q of a teacher and a student that read no context, in float64."""
    generator = torch.Generator().manual_seed(6)
    p, q = torch.randn(2, FREE_TOKENS, generator=generator, dtype=torch.float64).softmax(1)
    return p, q


def _without_context(groups: Any, share: torch.Tensor) -> Any:
    """A model whose attention and feed-forward add nothing, with one embedding for all ids."""
    from megatron_distill.models.generation.model import CachedGPT
    from megatron_distill.models.gpt import vocab_shard

    shape = small_architecture(num_layers=1, vocab_size=FREE_TOKENS, max_position_embeddings=64)
    (chunk,) = build(shape, groups, seed=3)
    layer, shard = chunk.decoder.layers[0], vocab_shard(shape, groups)
    with torch.no_grad():
        layer.self_attention.linear_proj.weight.zero_()
        layer.mlp.linear_fc2.weight.zero_()
        chunk.embedding.word_embeddings.weight.fill_(64.0)  # whose norm is one
        head_VH = chunk.head_weight().zero_()
        head_VH[: shard.real_width, 0] = share.log()[shard.start : shard.stop]
    return CachedGPT([chunk], shape, groups, torch.device("cpu"))


def _free_of_context(rank: int, world: int, layout: dict[str, int]) -> dict[str, Any]:
    """Blocks of several lengths, and the figures of the same models on texts of the teacher."""
    with megatron_groups(**layout) as groups:
        from megatron_distill.train.evaluation.speculative import block_figures, speculate
        from megatron_distill.train.evaluation.teacher_text import Text, compare_texts

        teacher, student = (_without_context(groups, share) for share in _shares())
        rows = [WriteRow((1, 4), number, 12) for number in range(3)]
        written = teacher.write(rows, sampling=Sampling(temperature=1.0), stops=Stops())
        texts = [Text(row.ids, text.ids) for row, text in zip(rows, written, strict=True)]
        found: dict[str, Any] = {"compared": compare_texts(teacher, student, texts)}
        for draft in DRAFTS:
            blocks = speculate(
                teacher, student, [(1, 4)] * 150, draft=draft, tokens=16, rule="sampled", seed=7
            )
            ids = [one for text in blocks for one in text.ids]
            found[str(draft)] = block_figures(blocks, "sampled"), ids
        return found


@pytest.mark.parametrize(
    "layout", [{}, pytest.param({"tensor": 2}, marks=pytest.mark.slow)], ids=str
)
def test_models_without_context_accept_as_many_tokens_as_the_formula(
    pool: Pool, layout: dict[str, int]
) -> None:
    """(1 - a^(g+1)) / (1 - a) for an acceptance a and g drafts: arXiv 2211.17192, equation 1."""
    p, q = _shares()
    a = float(torch.minimum(p, q).sum())
    assert 0.4 < a < 0.9
    (found, *_) = pool.run(layout.get("tensor", 1), _free_of_context, layout)
    compared = found["compared"]
    assert compared["acceptance"] == pytest.approx(a, abs=1e-6)
    expected = {str(g): (1 - a ** (g + 1)) / (1 - a) for g in range(1, 9)}
    assert compared["tokens_per_verification"] == pytest.approx(expected, abs=1e-5)
    for draft in DRAFTS:
        figures, ids = found[str(draft)]
        # A block has at least n tokens with probability a^(n-1).
        squares = sum((2 * n - 1) * a ** (n - 1) for n in range(1, draft + 2))
        mean = expected[str(draft)]
        error = math.sqrt((squares - mean**2) / figures["blocks"])
        for name in ("tokens_per_verification", "expected"):
            assert abs(figures[name] - mean) < 3 * error, (draft, name)
        counts = torch.bincount(torch.tensor(ids), minlength=FREE_TOKENS)
        wanted = len(ids) * p
        # 11 degrees of freedom: their 99.9 % quantile.
        assert float(((counts - wanted) ** 2 / wanted).sum()) < 31.3, draft
