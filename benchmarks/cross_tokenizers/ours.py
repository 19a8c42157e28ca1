"""Our step with a teacher of another tokenizer, and its loss alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from benchmarks.cross_tokenizers.planned import LOSSES
from benchmarks.cross_tokenizers.texts import LENGTH, Texts
from benchmarks.steps.own_step import OwnStep
from benchmarks.steps.subject import OPTIMIZER, TrainingState, training_state
from megatron_distill.align import VocabularyMap
from megatron_distill.align.build_map import build_vocabulary_map
from megatron_distill.data.aligned.documents import AlignedDocument, PairEncoder
from megatron_distill.data.aligned.packing import AlignedPacker, Window
from megatron_distill.data.collation import count_labels, micro_batch, pack_samples
from megatron_distill.data.tokenizers.open import Tokenizer, Vocabulary, load_tokenizer
from megatron_distill.losses import AlignedSide, ChunkTerm, cross_tokenizer_divergence
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import run_model, vocab_shard
from megatron_distill.models.hugging_face.model import HuggingFaceWeights, describe_checked
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import DenseLogits, HiddenState
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.assemble.alignment import TeacherTokenizer
from megatron_distill.train.model_source import ModelSource
from megatron_distill.train.objective import TokenObjective
from megatron_distill.train.optimizer import connect_schedule, wrap_data_parallel
from megatron_distill.train.phase_timers import PhaseTimers
from megatron_distill.train.step import Student
from megatron_distill.train.teachers.live import OnlineTeacher

__all__ = ["Ours", "build_ours"]

Run = Callable[[], float]

# Each is one row of the tables; the loss from logits alone is without cross-entropy.
TERMS: Final[Mapping[str, tuple[ChunkTerm, ...]]] = {
    name: (ChunkTerm(loss.alignment, top_k=loss.top_k),) for name, loss in LOSSES.items()
}


@dataclass(frozen=True)
class Ours:
    """The models, the data, and the loss with both vocabularies.

    Attributes:
        step: of the first row of `TERMS`.
        batches: the texts of one step.
        aligned: the loss.
        common_ids: the ids of the tokens that both vocabularies have.
        map_rows: offsets, teacher ids and weights of the rows of the vocabulary map.
        prepare_seconds: tokenising twice, aligning and packing, which a run does meanwhile.
        facts: sizes, by name.
    """

    step: OwnStep
    batches: StepBatches
    aligned: AlignedLoss
    common_ids: tuple[torch.Tensor, torch.Tensor]
    map_rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    prepare_seconds: float
    facts: Mapping[str, float]

    @property
    def steps(self) -> dict[str, Run]:
        """One optimizer step with each row's terms; returns the loss between the models."""
        return {name: self._step(terms) for name, terms in TERMS.items()}

    def _step(self, terms: tuple[ChunkTerm, ...]) -> Run:
        own = replace(self.step, objective=replace(self.step.objective, terms=terms))

        def run() -> float:
            return own.step(self.batches).kd

        return run

    def baseline_logits(self) -> dict[str, tuple[Batch, torch.Tensor]]:
        """By role the side of the batch and the logits `[b, s, V]` before any step."""
        (batch,) = self.batches.micro_batches
        assert batch.teacher is not None
        step = self.step
        with torch.no_grad():
            hidden_sbh = run_model(step.student.wrapped[0], batch, context_size=1)
            student = hidden_sbh.transpose(0, 1) @ step.student.chunks[0].head_weight().t()
            signal = step.teacher.signals([batch])[0]
            source = None if signal is None else signal.logit_source()
            assert isinstance(source, HiddenState), "the teacher is live, in one stage"
            teacher = source.hidden @ source.weight.t()
        shape = (*batch.teacher.tokens_bs.shape, -1)
        return {"student": (batch, student), "teacher": (batch.teacher, teacher.view(shape))}

    def from_hidden(self, scale: float) -> dict[str, Run]:
        """The loss with cross-entropy from hidden states, forward and backward, by row."""
        (batch,) = self.batches.micro_batches
        student = self.step.student.chunks[0].head_weight().detach().clone()
        teacher = self.step.teacher.head_weight
        assert teacher is not None
        generator = torch.Generator().manual_seed(4)
        hidden, of_teacher = (
            torch.randn(batch.tokens_bs.numel(), head.shape[1], generator=generator) * scale
            for head in (student, teacher)
        )
        total = torch.zeros(student.shape)

        def run(terms: tuple[ChunkTerm, ...]) -> float:
            leaf, head = hidden.detach().requires_grad_(), student.detach().requires_grad_()
            loss, report = self.aligned(
                HiddenState(leaf, head),
                HiddenState(of_teacher, teacher),
                batch,
                self.batches,
                ce_weight=1.0,
                terms=terms,
                sources=0,
                weight_gradient_sum=total,
            )
            loss.backward()
            return float(report["kd"])

        return {name: lambda terms=terms: run(terms) for name, terms in TERMS.items()}  # type: ignore[misc]

    def from_logits(self, scale: float) -> dict[str, Run]:
        """The mean over chunks from given logits, forward and backward, by row."""
        (batch,) = self.batches.micro_batches
        assert batch.teacher is not None
        generator = torch.Generator().manual_seed(5)
        shared = self.aligned.vocabularies
        rows, teacher_rows = batch.tokens_bs.numel(), batch.teacher.tokens_bs.numel()
        student = torch.randn(rows, shared.student_shard.width, generator=generator) * scale
        teacher = torch.randn(teacher_rows, shared.teacher_shard.width, generator=generator) * scale
        sides = [_aligned_side(one) for one in (batch, batch.teacher)]

        def run(term: ChunkTerm) -> float:
            leaf = student.detach().requires_grad_()
            values = cross_tokenizer_divergence(
                leaf,
                DenseLogits(teacher),
                alignment=term.alignment,
                divergence=term.divergence,
                top_k=term.top_k,
                uncommon_top_k=term.uncommon_top_k,
                student=sides[0],
                teacher_side=sides[1],
                chunks=batch.chunk_count,
                common_ids=self.common_ids,
                map_rows=self.map_rows,
            )
            mean = values.sum() / (self.batches.pairs if term.is_of_pairs else self.batches.chunks)
            mean.backward()
            return float(mean.detach())

        return {name: lambda term=terms[0]: run(term) for name, terms in TERMS.items()}  # type: ignore[misc]


def build_ours(folder: Path, groups: Groups, device: torch.device) -> Ours:
    """Both models from their folders, the step's batch, optimizer and objective."""
    tokenizers = [load_tokenizer(folder / name) for name in ("student", "teacher")]
    started = time.perf_counter()
    whole = _whole(Texts.read(folder), *tokenizers)
    seconds = time.perf_counter() - started
    sources = [_source(folder / name) for name in ("student", "teacher")]
    shapes = [source.architecture for source in sources]
    vocabularies = [Vocabulary.of(tokenizer) for tokenizer in tokenizers]
    run = Execution(dtype=torch.float32, device=device)
    student, training = _student(sources[0], run, groups, positions=whole.positions)
    online = OnlineTeacher.of_source(
        sources[1],
        run,
        seed=1,
        sequence_length=LENGTH,
        shard=vocab_shard(shapes[1], groups, tokens=vocabularies[1].size),
        groups=groups,
    )
    found = build_vocabulary_map(*tokenizers)
    tokens = TeacherTokenizer(vocabularies[1], LENGTH, None, found, "teacher")
    teacher, aligned = tokens.connect(
        online, shapes[0], vocabularies[0], groups, run.device, chunk_tokens=None
    )
    assert isinstance(teacher, OnlineTeacher), "it is in the layout of the student"
    started = time.perf_counter()
    planned = (aligned.planner.planned(batch) for batch in whole.micro_batches)
    batches = replace(whole, micro_batches=tuple(one.with_trained_rows() for one in planned))
    seconds += time.perf_counter() - started
    objective = TokenObjective(
        ce_weight=1.0,
        terms=next(iter(TERMS.values())),
        metrics=(),
        chunk_tokens=None,
        shard=vocab_shard(shapes[0], groups, tokens=vocabularies[0].size),
        logit_rule=LogitRule(None, 1.0),
        groups=groups,
        aligned=aligned,
    )
    common = found.common()
    return Ours(
        step=OwnStep(
            student=student,
            teacher=teacher,
            objective=objective,
            training=training,
        ),
        batches=batches,
        aligned=aligned,
        common_ids=(torch.from_numpy(common[0]), torch.from_numpy(common[1])),
        map_rows=_map_rows(found),
        prepare_seconds=seconds,
        facts={
            "student tokens": vocabularies[0].size,
            "teacher tokens": vocabularies[1].size,
            "common tokens": len(common[0]),
            "labels": batches.ce_tokens,
            "chunks": batches.chunks,
            "pairs": batches.pairs,
        },
    )


def _student(
    source: ModelSource, run: Execution, groups: Groups, *, positions: int
) -> tuple[Student, TrainingState]:
    chunks = source.build(run, groups=groups, seed=1)
    wrapped = wrap_data_parallel(chunks, OPTIMIZER, groups=groups)
    timers = PhaseTimers(run.device)
    connect_schedule(wrapped, OPTIMIZER, positions=positions, timers=timers)
    student = Student(chunks, wrapped, groups, LENGTH, timers)
    return student, training_state(wrapped, dtype=run.dtype)


def _map_rows(found: VocabularyMap) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = found.row_offsets, found.row_teacher_ids_n, found.row_weights_n
    offsets, ids, weights = (torch.from_numpy(one) for one in rows)
    return offsets, ids, weights


def _aligned_side(batch: Batch) -> AlignedSide:
    assert batch.chunks_bs is not None, "the batch is of two tokenizers"
    return AlignedSide(batch.chunks_bs.reshape(-1), batch.labels_bs.reshape(-1))


def _source(folder: Path) -> ModelSource:
    described = describe_checked(folder)
    return ModelSource(described.architecture, lambda: HuggingFaceWeights(folder, described))


def _whole(texts: Texts, student: Tokenizer, teacher: Tokenizer) -> StepBatches:
    """One text in each sequence; not planned yet."""
    encoder = PairEncoder(student, teacher)
    whole = texts.whole
    samples = []
    for number, document in enumerate(encoder(whole, [True] * len(whole))):
        assert isinstance(document, AlignedDocument), document
        windows = (Window(LENGTH + 1, one.eos_id) for one in (student, teacher))
        packer = AlignedPacker[int](*windows)
        packer.add(document, number)
        sample = packer.flush(number)
        assert sample is not None
        samples.append(sample)
    packed = pack_samples(samples)
    (counts,) = count_labels(packed, isolate_documents=True)
    batch = micro_batch(packed, slice(0, len(samples)), isolate_documents=True)
    return StepBatches(
        (batch,),
        ce_tokens=counts.ce,
        kd_tokens=counts.kd,
        positions=len(samples) * LENGTH,
        chunks=counts.chunks,
        pairs=counts.pairs,
    )
