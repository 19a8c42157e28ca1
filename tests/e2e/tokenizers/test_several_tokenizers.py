"""Teachers of one and of another tokenizer in one run: losses, layouts, routing, resuming."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.runtime.batch import Batch, StepBatches
from tests.distributed.pool import Pool
from tests.e2e.failing import call_alone
from tests.e2e.processes import ROOT
from tests.e2e.runs import (
    QUANTITIES,
    STUDENT,
    Inputs,
    assembled,
    assert_same_course,
    course,
    layout,
    one_of_several,
    quick_and_slow,
    records,
    resumed,
    run,
)
from tests.e2e.tokenizers.test_two_tokenizers import common_ids, texts_of
from tests.reference.cross_tokenizer import common, likelihood
from tests.reference.divergences import dense, on_top_k, topk

# Of the samples' teachers, and of one teacher on all samples.
ROUTED = (
    "{divergence: forward_kl}",
    "{alignment: likelihood, divergence: js_divergence, temperature: 6.0}",
)
NAMED = (
    "{divergence: reverse_kl, weight: 0.5, top_k: 8, teacher: near}",
    "{alignment: common, weight: 0.5, temperature: 2.0, scale_by_temperature_squared: true, "
    "teacher: far}",
    "{alignment: common, divergence: reverse_kl, weight: 0.25, top_k: 8, teacher: far}",
)
LOSSES = (
    "forward_kl",
    "likelihood_js_divergence_t6",
    "reverse_kl_top8_near",
    "common_forward_kl_t2_far",
    "common_reverse_kl_top8_far",
)
WEIGHTS = (1.0, 1.0, 0.5, 0.5, 0.25)


@pytest.fixture(scope="module")
def config(inputs: Inputs) -> Path:
    """The configuration of both teachers."""
    return write_config(inputs)


def write_config(inputs: Inputs) -> Path:
    """Two teachers: `far` has a tokenizer of its own; the teacher of a sample is drawn."""
    far = one_of_several("far") + (
        f"    sequence_length: 24\n    tokenizer: {{path: {inputs.second_tokenizer(421)}}}\n"
    )
    return inputs.write(
        "several_tokenizers", STUDENT, f"teachers:\n{one_of_several('near', width=48)}{far}",
        steps=6, terms="\n".join(f"    - {term}" for term in ROUTED + NAMED),
        changes={"objective:\n": "objective:\n  routing_weights: {near: 2, far: 1}\n"},
    )  # fmt: skip


UNROUTED = (f"objective.terms=[{', '.join(NAMED)}]", "objective.routing_weights=null")


def against_whole_logits(
    rank: int, world: int, config: Path, overrides: Sequence[str]
) -> tuple[dict[str, float], dict[str, float], float, float]:
    """Losses of a step, those of whole float64 logits, and the largest error of a gradient.

    The gradient is that of the objective on the student's last hidden states; the last number is
    its largest entry. Chunks are found in the texts.
    """
    with assembled(rank, world, config, overrides) as (_, parts):
        from megatron_distill.models.gpt import run_model
        from megatron_distill.signals import SignalsByTeacher

        step, objective = parts.loader.take(1), parts.objective
        student, teacher = parts.state.student, parts.teacher
        assert teacher is not None
        pieces, ids = vocabularies(config)
        weights = {term.name: term.weight for term in objective.terms}
        found = dict.fromkeys(("ce", "kd", *weights), 0.0)
        sums = dict.fromkeys(found, 0.0)
        error = largest = 0.0
        for batch in step.micro_batches:
            signal: Any = teacher.signals([batch])[0]
            assert isinstance(signal, SignalsByTeacher)
            with torch.no_grad():
                hidden_sbh = run_model(student.wrapped[0], batch, context_size=1)
            leaf_sbh = hidden_sbh.detach().requires_grad_()
            total, report = objective(leaf_sbh, student.head, batch, signal, step)
            (ours,) = torch.autograd.grad(total, leaf_sbh)
            for name in found:
                found[name] += float(report[name])

            exact_sbh = hidden_sbh.detach().double().requires_grad_()
            weight = student.head.head_weight().detach().double()
            logits_bsv = (exact_sbh.transpose(0, 1) @ weight.t())[..., : len(pieces[0])]
            values = oracle(batch, logits_bsv, signal.by_teacher, step, pieces, ids)
            values = {name: values[name] for name in ("ce", *weights)}
            values["kd"] = sum((w * values[name] for name, w in weights.items()), torch.zeros(()))
            (exact,) = torch.autograd.grad(values["ce"] + values["kd"], exact_sbh)
            for name, value in values.items():
                sums[name] += float(value)
            error = max(error, float((ours - exact).abs().max()))
            largest = max(largest, float(exact.abs().max()))
        return found, sums, error, largest


def vocabularies(config: Path) -> tuple[list[list[bytes | None]], tuple[Tensor, Tensor]]:
    """The bytes of both vocabularies' tokens, and the ids of common tokens."""
    from megatron_distill.config import load_config
    from megatron_distill.data.tokenizers.open import load_tokenizer

    settings = load_config(config, [])
    assert settings.teachers is not None
    other = settings.teachers["far"].tokenizer
    assert other is not None
    folders = (settings.data.tokenizer.path, other.path)
    tokenizers = [load_tokenizer(Path(str(folder))) for folder in folders]
    pieces = [tokenizer.token_bytes() for tokenizer in tokenizers]
    return pieces, common_ids(pieces, tokenizers)


def oracle(
    batch: Batch,
    logits_bsv: Tensor,
    signals: dict[str, Any],
    step: StepBatches,
    pieces: list[list[bytes | None]],
    ids: tuple[Tensor, Tensor],
) -> dict[str, Tensor]:
    """This micro-batch's share of each loss, from whole float64 logits."""
    log_q = logits_bsv.log_softmax(-1)
    labels = log_q.gather(-1, batch.labels_bs[..., None]).squeeze(-1)
    values = {name: log_q.sum() * 0.0 for name in LOSSES}
    values["ce"] = -labels[batch.ce_mask_bs].sum() / step.ce_tokens
    number = {"far": 0, "near": 1}
    near = signals["near"].logit_source()
    logits_p = (near.hidden.double() @ near.weight.double().t())[:, : len(pieces[0])]
    logits_p = logits_p.view(*batch.tokens_bs.shape, -1)
    source = signals["far"].logit_source()
    teacher_logits = (source.hidden.double() @ source.weight.double().t())[:, : len(pieces[1])]
    assert batch.teacher is not None
    teacher_logits = teacher_logits.view(*batch.teacher.tokens_bs.shape, -1)
    for row, drawn in enumerate(batch.teacher_numbers):
        inside = batch.kd_mask_bs[row]
        ours, target = logits_bsv[row][inside], logits_p[row][inside]
        if drawn == number["near"]:
            of_row = dense("forward_kl", ours, target, temperature=1.0).sum()
            values[LOSSES[0]] = values[LOSSES[0]] + of_row / step.kd_tokens
        of_row = on_top_k("reverse_kl", ours, *topk(target, 8, 1.0), "tail", 1.0).sum()
        values[LOSSES[2]] = values[LOSSES[2]] + of_row / step.kd_tokens
        for one, other, at in texts_of(batch, [logits_bsv, teacher_logits], pieces, [row]):
            if drawn == number["far"]:
                of_row = likelihood(one, other, at, "js_divergence", 6.0, beta=0.5).sum()
                values[LOSSES[1]] = values[LOSSES[1]] + of_row / step.chunks
            of_row = 4.0 * common(one, other, at, ids, "forward_kl", 2.0).sum()
            values[LOSSES[3]] = values[LOSSES[3]] + of_row / step.pairs
            of_row = common(one, other, at, ids, "reverse_kl", top_k=8).sum()
            values[LOSSES[4]] = values[LOSSES[4]] + of_row / step.pairs
    return values


@pytest.mark.parametrize("kind", ["routed and named", "named"])
def test_a_step_has_the_losses_and_the_gradient_of_whole_logits(
    pool: Pool, config: Path, tmp_path: Path, kind: str
) -> None:
    given = [f"output={tmp_path}", *(UNROUTED if kind == "named" else ())]
    ((found, expected, error, largest),) = pool.run(1, against_whole_logits, config, given)
    assert set(found) == {"ce", "kd", *(LOSSES if kind != "named" else LOSSES[2:])}
    for name in found:
        assert found[name] == pytest.approx(expected[name], rel=2e-6), name
        assert found[name] > 1e-3, name
    assert error <= 1e-5 * largest, (error, largest)


_HELD_OUT = ("validation.samples=8", "validation.interval=6")


@pytest.fixture(scope="module")
def whole(pool: Pool, config: Path, inputs: Inputs) -> list[dict[str, Any]]:
    """The run of one rank."""
    return run(pool, 1, config, inputs.folder / "several-tokenizers", *_HELD_OUT)


LAYOUTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("TP2+sequence", "PP2", "CP2", "DP2", "TP2xCP2"), ()),
    "one rank, one sample at a time": ("train.micro_batch_size=1",),
    "one rank, workers": ("data.workers=2",),
    "DP2, teachers of TP2 and PP2": (
        "teachers.far.parallel={tensor: 2, sequence: true}",
        "teachers.near.parallel={pipeline: 2}",
    ),
    "TP2+sequence, teachers of PP2 and CP2": (
        "teachers.far.parallel={pipeline: 2}",
        "teachers.near.parallel={context: 2}",
    ),
}


@pytest.mark.parametrize("case", quick_and_slow(LAYOUTS, ()))
def test_the_layout_changes_nothing(
    pool: Pool, config: Path, whole: list[dict[str, Any]], tmp_path: Path, case: str
) -> None:
    (world, overrides), own = layout(case), LAYOUTS[case]
    found = run(pool, world, config, tmp_path / "run", *_HELD_OUT, *overrides, *own)
    assert_same_course(found, whole, (*QUANTITIES, *LOSSES))
    for name in ("chunks", "aligned_labels", "tokens"):
        assert [record[name] for record in found] == [record[name] for record in whole], name
    ours, other = (
        records(folder)[-1]["validation"] for folder in (tmp_path / "run", _folder(config))
    )
    for name in ("ce_loss", "kd_loss", *LOSSES):
        assert ours[name] == pytest.approx(other[name], rel=1e-4), name


def _folder(config: Path) -> Path:
    return config.parent / "several-tokenizers"


def test_the_log_has_each_term_and_each_teacher(whole: list[dict[str, Any]], config: Path) -> None:
    for record in whole:
        kd = sum(weight * record[name] for weight, name in zip(WEIGHTS, LOSSES, strict=True))
        assert kd == pytest.approx(record["kd_loss"], rel=1e-5)
        near, far = record["teachers"]["near"], record["teachers"]["far"]
        assert set(record["teachers"]) == {"near", "far"}
        # A term of all samples names this teacher, so it is trained on all chunks of one token.
        assert 0 < far["chunks"] < record["chunks"]
        assert far["pairs"] < record["chunks"]
        assert far["kd_loss"] > 0
        assert 0.05 < far["topk_mass"] < 1
        assert near["kd_tokens"] > 0
        assert "top1_agreement" not in record
    validation = records(_folder(config))[-1]["validation"]
    assert set(validation["teachers"]) == {"near", "far"}
    kd = sum(weight * validation[name] for weight, name in zip(WEIGHTS, LOSSES, strict=True))
    assert kd == pytest.approx(validation["kd_loss"], rel=1e-5)


@pytest.mark.slow
def test_with_the_other_tokenizer_alone_it_is_the_run_of_that_teacher(
    pool: Pool, inputs: Inputs, config: Path, tmp_path: Path
) -> None:
    # The term of the student's own tokenizer has no weight; data and packing are the same.
    aligned = (
        "{alignment: likelihood, divergence: js_divergence, temperature: 6.0",
        "{alignment: common, weight: 0.5, temperature: 2.0",
        "{alignment: common, divergence: reverse_kl, weight: 0.25, top_k: 8",
    )
    of_both = "".join(f"{term}, teacher: far}}, " for term in aligned)
    terms_of_both = f"objective.terms=[{of_both}{{weight: 0.0, teacher: near}}]"
    found = run(pool, 1, config, tmp_path / "both", terms_of_both, "objective.routing_weights=null")
    far = one_of_several("far").replace("  far:", "teacher:", 1).replace("\n  ", "\n")
    text = config.read_text()
    single = tmp_path / "single.yaml"
    start, stop = text.index("teachers:\n"), text.index("seed:")
    tokens = f"  sequence_length: 24\n  tokenizer: {{path: {inputs.second_tokenizer(421)}}}\n"
    single.write_text(text[:start] + far + tokens + text[stop:])
    expected = run(
        pool, 1, single, tmp_path / "alone", f"objective.terms=[{'}, '.join(aligned)}}}]",
        "objective.routing_weights=null",
    )  # fmt: skip
    assert_same_course(found, expected)
    for name in ("chunks", "aligned_labels"):
        assert [record[name] for record in found] == [record[name] for record in expected], name


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_by_bit(pool: Pool, config: Path, tmp_path: Path) -> None:
    given = ("data.workers=1", "train.micro_batch_size=1")
    found, expected = resumed(pool, 1, config, tmp_path, *given, stop_after=3)
    assert course(found) == course(expected)


def test_the_preview_shows_both_tokenizations(pool: Pool, config: Path, tmp_path: Path) -> None:
    ending = call_alone(
        pool, ROOT / "tools" / "preview_data.py", config, f"output={tmp_path}",
        *("--samples", 1, "--counted", 4, "--chunks", 6, "--width", 100),
    )  # fmt: skip
    assert ending.status == 0, ending.stderr
    assert "student" in ending.stdout
    assert "chunks" in ending.stdout
