"""A teacher of another tokenizer: losses of known values, commands after a run, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_distill.runtime.batch import Batch, StepBatches
from tests.distributed.hugging_face_models import reference, save_model
from tests.distributed.pool import Pool
from tests.e2e.conversion.test_hugging_face import give_tokenizer
from tests.e2e.failing import call, call_alone, message
from tests.e2e.processes import ROOT
from tests.e2e.runs import MEANS_NAMES, MEANS_TERMS, Inputs, assembled, records, run
from tests.reference.cross_tokenizer import Alignment
from tests.support.peaks import least_peak

SHORT = ("train.steps=2", "schedule.warmup_steps=1")
NAMES = ("likelihood_js_divergence_t6", "common_forward_kl_t2", "common_reverse_kl_top8")


def documents_of(batch: Batch) -> Iterator[Batch]:
    """Each document of a two-sided micro-batch alone, in a micro-batch of one sample."""
    assert batch.teacher is not None
    for row in range(len(batch.tokens_bs)):
        for number in batch.document_ids_bS[row].unique().tolist():
            if number < 0:
                continue
            student, teacher = (_alone(side, row, number) for side in (batch, batch.teacher))
            assert student.chunks_bs is not None
            yield replace(student, teacher=teacher, chunk_count=int(student.chunks_bs.max()) + 1)


def _alone(side: Batch, row: int, number: int) -> Batch:
    inside = (side.document_ids_bS[row] == number).nonzero().squeeze(1)
    length = side.tokens_bs.shape[1]

    def moved(values_bs: Tensor, padding: int) -> Tensor:
        found = values_bs.new_full((1, length), padding)
        found[0, : len(inside)] = values_bs[row, inside]
        return found

    assert side.chunks_bs is not None
    chunks = moved(side.chunks_bs, -1)
    first = chunks[chunks >= 0].min() if bool((chunks >= 0).any()) else 0
    return Batch(
        tokens_bs=moved(side.tokens_bs, 0),
        labels_bs=moved(side.labels_bs, 0),
        ce_mask_bs=moved(side.ce_mask_bs, 0),
        kd_mask_bs=moved(side.kd_mask_bs, 0),
        position_ids_bs=moved(side.position_ids_bs, 0),
        document_ids_bS=torch.where(torch.arange(length) < len(inside), 0, -1)[None],
        sequence_index_s=side.sequence_index_s,
        sample_ids_b=side.sample_ids_b[row : row + 1],
        isolate_documents=True,
        chunks_bs=torch.where(chunks >= 0, chunks - first, -1),
    )


def packed_and_alone(
    rank: int, world: int, config: Path, overrides: list[str]
) -> tuple[int, int, dict[str, float], dict[str, float]]:
    """Losses of a step, and of its documents in a sample each, with the numbers of samples."""
    with assembled(rank, world, config, overrides) as (_, parts):
        from megatron_distill.train.step import run_student

        def losses(step: StepBatches) -> dict[str, float]:
            batches = step.micro_batches
            assert parts.teacher is not None
            with torch.no_grad():
                found = run_student(
                    *(parts.state.student, parts.teacher.signals(batches)),
                    *([parts.objective] * len(batches), step),
                    forward_only=True,
                )
            return {name: float(value) for name, value in found.items()}

        step = parts.loader.take(1)
        planner = parts.objective.planner
        assert planner is not None
        documents = tuple(
            planner.planned(one) for batch in step.micro_batches for one in documents_of(batch)
        )
        alone = replace(step, micro_batches=documents, positions=len(documents) * 32)
        return 8, len(documents), losses(step), losses(alone)


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        pytest.param((), NAMES, id="tokens"),
        pytest.param((MEANS_TERMS,), MEANS_NAMES, id="means", marks=pytest.mark.slow),
    ],
)
def test_documents_in_one_sample_give_the_losses_of_documents_alone(
    pool: Pool, inputs: Inputs, tmp_path: Path, terms: tuple[str, ...], names: tuple[str, ...]
) -> None:
    config = inputs.folder / "aligned.yaml"
    ((samples, documents, packed, alone),) = pool.run(
        1, packed_and_alone, config, [f"output={tmp_path}", *terms]
    )
    assert documents > samples
    for name in ("ce", "kd", *names):
        assert alone[name] == pytest.approx(packed[name], rel=1e-6), name


def peak_of_step(rank: int, world: int, config: Path, overrides: list[str]) -> int:
    """Peak bytes of tensors in a step, above those alive before it."""
    with assembled(rank, world, config, overrides) as (_, parts):
        from megatron_distill.train.step import run_student

        step, teacher, state = parts.loader.take(1), parts.teacher, parts.state
        assert teacher is not None
        objectives = [parts.objective] * len(step.micro_batches)

        def take() -> None:
            signals = teacher.signals(step.micro_batches)
            run_student(state.student, signals, objectives, step)

        take()
        return least_peak(take)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "terms"),
    [(1, ()), (1, (MEANS_TERMS,)), (2, (MEANS_TERMS,))],
    ids=["tokens", "means", "means TP2"],
)
def test_the_peak_of_a_step_does_not_grow_with_its_micro_batches(
    pool: Pool, inputs: Inputs, tmp_path: Path, tensor: int, terms: tuple[str, ...]
) -> None:
    config = inputs.folder / "aligned.yaml"
    few, many = (
        pool.run(
            *(tensor, peak_of_step, config),
            [
                *(f"output={tmp_path / str(samples)}", f"train.global_batch_size={samples}"),
                *(f"parallel.tensor={tensor}", "data.sequence_length=128"),
                *("teacher.sequence_length=128", *terms),
            ],
        )
        for samples in (4, 12)
    )
    for own_few, own_many in zip(few, many, strict=True):
        assert own_many <= 1.05 * own_few, (few, many)


def common_ids(pieces: list[list[bytes | None]], tokenizers: list[Any]) -> tuple[Tensor, Tensor]:
    """Ids of equal bytes and those of the ends of documents, of the student and the teacher."""
    numbers = {piece: number for number, piece in enumerate(pieces[1]) if piece is not None}
    found = [
        (number, numbers[piece])
        for number, piece in enumerate(pieces[0])
        if piece is not None and piece in numbers
    ]
    found.append((tokenizers[0].eos_id, tokenizers[1].eos_id))
    own, other = zip(*sorted(found), strict=True)
    return torch.tensor(own), torch.tensor(other)


def texts_of(
    batch: Batch,
    logits: list[Tensor],
    pieces: list[list[bytes | None]],
    samples: Sequence[int] | None = None,
) -> Iterator[tuple[Tensor, Tensor, Alignment]]:
    """The rows of each document of a batch on both sides, and their chunks by equal prefixes.

    An end of document is taken for one byte that no text has. A document that goes on from the
    sample before begins with a token of context on each side.
    """
    assert batch.teacher is not None
    for row in range(len(batch.tokens_bs)) if samples is None else samples:
        for number in batch.document_ids_bS[row].unique().tolist():
            if number < 0:
                continue
            sides = []
            for side, names in zip((batch, batch.teacher), pieces, strict=True):
                inside = (side.document_ids_bS[row] == number).nonzero().squeeze(1)
                ids = side.tokens_bs[row, inside].tolist()
                last = int(inside[-1])
                if bool(side.kd_mask_bs[row, last]):  # the sample's last label is no token of it
                    ids.append(int(side.labels_bs[row, last]))
                sides.append((inside, ids, [names[one] or b"\0" for one in ids]))
            (_, _, own), (_, _, other) = sides
            skipped = 0 if b"".join(own) == b"".join(other) else 1
            assert b"".join(own[skipped:]) == b"".join(other[skipped:])
            yield _aligned(sides, row, logits, skipped)


def _aligned(
    sides: list[Any], row: int, logits: list[Tensor], skipped: int
) -> tuple[Tensor, Tensor, Alignment]:
    ends: list[list[int]] = []
    for _, _, parts in sides:
        sizes = torch.tensor([0] * skipped + [len(part) for part in parts[skipped:]])
        ends.append(sizes.cumsum(0).tolist())
    shared = sorted(set(ends[0][skipped:]) & set(ends[1][skipped:]))
    # The chunk of a document's first token has a label that no row predicts.
    start = skipped or next(
        index + 1 for index, end in enumerate(shared) if end >= max(ends[0][0], ends[1][0])
    )
    first = 0 if skipped else start
    rows, chunks, labels = [], [], []
    for (inside, ids, _), stops, values in zip(sides, ends, logits, strict=True):
        numbers = [sum(end < stop for end in shared) - first for stop in stops]
        chunks.append(torch.tensor(numbers[1:]).clamp(min=-1))
        labels.append(torch.tensor(ids[1:]))
        rows.append(values[row, inside][: len(ids) - 1])
    at = Alignment(chunks[0], chunks[1], labels[0], labels[1], len(shared) - first)
    return rows[0], rows[1], at


@pytest.fixture(scope="module")
def permuted(pool: Pool, inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and the same with its ids in another order, each with its tokenizer."""
    folder = tmp_path_factory.mktemp("permuted")
    plain = folder / "plain"
    save_model(plain, "qwen2", num_hidden_layers=2, vocab_size=301, tie_word_embeddings=False)
    pool.run(1, give_tokenizer, inputs.tokenizer, plain)
    order = torch.randperm(301, generator=torch.Generator().manual_seed(4))
    model = reference(plain)
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        weight.data[order] = weight.data.clone()
    model.save_pretrained(folder / "other")
    pool.run(1, give_tokenizer, inputs.tokenizer, folder / "other")
    file = folder / "other" / "tokenizer.json"
    content = json.loads(file.read_text())
    ids = content["model"]["vocab"]
    content["model"]["vocab"] = {token: int(order[number]) for token, number in ids.items()}
    for token in content["added_tokens"]:
        token["id"] = int(order[token["id"]])
    file.write_text(json.dumps(content))
    return folder


# Terms that compare all tokens of a text with itself, and their names in the log.
EQUAL = {
    "likelihood": "likelihood_forward_kl",
    "common": "common_forward_kl",
    "common, top_k: 8": "common_forward_kl_top8",
    "projection": "projection_forward_kl",
    "gold": "gold_forward_kl",
    "uld": "uld",
}


@pytest.mark.parametrize("tensor", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_equal_models_of_permuted_ids_have_nothing_to_learn(
    pool: Pool, inputs: Inputs, permuted: Path, tmp_path: Path, tensor: int
) -> None:
    path = inputs.write(
        "permuted",
        f"student:\n  hf: {permuted / 'plain'}\n",
        f"teacher:\n  hf: {permuted / 'other'}\n",
        terms="".join(f"    - {{alignment: {term}}}\n" for term in EQUAL),
    )
    first = run(
        pool, tensor, path, tmp_path, "train.steps=1", "schedule.warmup_steps=0",
        f"parallel.tensor={tensor}", f"data.tokenizer.path={permuted / 'plain'}",
        "objective.features=[{match: uniform}, {student: 2, teacher: 1}]",
    )[0]  # fmt: skip
    assert first["aligned_labels"] > 0.9
    assert 0 <= first["data_wait"] < 1
    for name in ("kd_loss", *EQUAL.values()):
        assert 0 <= first[name] <= 1e-9, name
    assert first["feature_mse_1_1"] == first["feature_mse_2_2"] == 0
    assert first["feature_mse_2_1"] > 1e-6
    assert first["ce_loss"] > 3


@pytest.mark.slow
def test_a_run_is_evaluated_continues_a_prompt_and_is_exported(
    pool: Pool, inputs: Inputs, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    run(
        *(pool, 2, inputs.folder / "aligned.yaml", output, *SHORT, "parallel.tensor=2"),
        *("checkpoint.save=true", "validation.samples=16", "data.max_unaligned=0.02"),
        "objective.features=[{student: 2, teacher: 1}]",
    )
    expected: Any = records(output)[-1]["validation"]
    features = {"features_loss", "feature_mse_2_1"}
    assert expected.keys() == {"ce_loss", "kd_loss", "topk_mass", *NAMES, *features}
    # Two batches or four: each loss is a mean over all its chunks.
    for changes in ((), ("train.global_batch_size=4",)):
        ending = call_alone(pool, ROOT / "launch" / "evaluate.py", output, *changes)
        assert ending.status == 0, ending.stderr
        figures = json.loads(ending.stdout)
        for name, value in expected.items():
            assert figures[name] == pytest.approx(value, rel=2e-6), (name, changes)
    ending = call_alone(
        *(pool, ROOT / "launch" / "generate.py", output, "--prompt", "def ", "--tokens", 4)
    )
    assert ending.status == 0, ending.stderr
    assert ending.stdout.startswith("def ")
    ending = call_alone(
        *(pool, ROOT / "tools" / "convert_checkpoint.py", "export"),
        *("--checkpoint", output, "--hf", tmp_path / "out"),
    )
    assert ending.status == 0, ending.stderr
    assert reference(tmp_path / "out").config.vocab_size == 301


def characters(rank: int, world: int, folder: Path) -> None:
    """Write a tokenizer of a few Chinese characters, without bytes for all others."""
    import tokenizers
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((one, -2.0) for one in "漢字記号")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    wrapped.save_pretrained(folder)


@pytest.fixture(scope="module")
def foreign(pool: Pool, inputs: Inputs) -> Path:
    """A tokenizer that has no token of the corpus."""
    folder = inputs.folder / "foreign"
    pool.run(1, characters, folder)
    return folder


REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one tokenizer": (
        ("teacher.tokenizer.path={own}",),
        ("teacher.tokenizer: ", "{own}", "are one tokenizer", "remove `alignment`"),
    ),
    "no teacher's tokenizer": (
        ("teacher.tokenizer=null",),
        ("the teacher's tokenizer is unknown", "teacher.tokenizer.path"),
    ),
    "no common token": (("teacher.tokenizer.path={foreign}",), ("no token", "{own}", "{foreign}")),
    "too many documents without a chunk": (
        ("teacher.tokenizer.path={foreign}", "objective.terms=[{{alignment: likelihood}}]"),
        (
            "data.max_unaligned=0.01: 2 of 2 documents of data source ",
            "{corpus}",
            ": each of its chunks has an unknown token",
            "raise data.max_unaligned",
        ),
    ),
    "no document with a chunk": (
        ("teacher.tokenizer.path={foreign}", "objective.terms=[{{alignment: likelihood}}]",
         "data.max_unaligned=1"),
        (
            "data.max_unaligned=1: no sample can be made of data source ",
            "have no chunk that both tokenizers share; the last is {corpus}:",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_aligned_is_refused(
    pool: Pool, inputs: Inputs, foreign: Path, tmp_path: Path, case: str
) -> None:
    overrides, parts = REFUSED[case]
    names = {"own": inputs.tokenizer, "foreign": foreign, "corpus": inputs.corpus}
    given = [override.format(**names) for override in overrides]
    endings = call(pool, inputs.folder / "aligned.yaml", tmp_path, *SHORT, *given)
    text = message(endings)
    for part in parts:
        assert part.format(**names) in text, text
