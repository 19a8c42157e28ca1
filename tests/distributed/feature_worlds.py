"""One step with feature losses in any layout, by the package's own parts; for pool workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_distill.data.aligned.documents import AlignedDocument
from megatron_distill.data.collation import GlobalBatch, micro_batch
from megatron_distill.losses import (
    BalanceMode,
    BalanceState,
    ChunkTerm,
    FeaturePair,
    ScoreRule,
    Term,
    ValueSchedule,
)
from megatron_distill.runtime.batch import Batch, StepBatches
from tests.distributed.aligned_steps import packed, random_side, step_of
from tests.distributed.megatron_world import (
    megatron_groups,
    objective_of,
    parts_of,
    rows_of,
    small_architecture,
    student_of,
    teacher_of,
)
from tests.distributed.models.test_models import LENGTH, packed_batch
from tests.reference.cross_tokenizer import Alignment
from tests.reference.features import Pair, Trained
from tests.reference.llama import Heads, Packed

if TYPE_CHECKING:
    from megatron_distill.data.aligned.rows import ChunkPlanner
    from megatron_distill.runtime.groups import Groups, Layout
    from megatron_distill.train.balancing import Balancing
    from megatron_distill.train.features import FeatureLosses
    from megatron_distill.train.objective import TokenObjective
    from megatron_distill.train.step import Student
    from megatron_distill.train.teachers.live import OnlineTeacher

ROWS = 4
# Tokens of the teacher in a sample, where it has a tokenizer of its own.
TEACHER_LENGTH = 40
CE_WEIGHT = 0.7
KD_WEIGHT = 1.3
STUDENT = {"init_std": 0.2, "vocab_size": 224}
TEACHER = {**STUDENT, "num_layers": 6, "hidden_size": 40, "head_size": 10, "ffn_hidden_size": 56}
STUDENT_HEADS = Heads(queries=4, groups=2, size=8)
TEACHER_HEADS = Heads(queries=4, groups=2, size=10)
# From a later stage to an earlier one and the other way round, two of one layer, one layer to two.
PAIRS: tuple[Pair, ...] = (
    (1, 5, "mse", 0.6),
    (4, 2, "cosine", 2.0),
    (3, 3, "mse", 0.3),
    (3, 6, "cosine", 1.5),
    (2, 5, "mse", 0.4),
)
METRICS = ("teacher_ce", "student_entropy", "teacher_entropy", "top1_agreement")
Parts = dict[tuple[str, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Setting:
    """The setting of a step: layout, losses, weights and teacher."""

    layout: dict[str, Any] = field(default_factory=dict)
    recompute: str = "none"
    micro_batch_size: int = 1
    pairs: Sequence[Pair] = PAIRS
    projector: str = "linear"
    shared: bool = False
    teacher: dict[str, Any] = field(default_factory=lambda: dict(TEACHER))
    ce_weight: float = CE_WEIGHT
    kd_weight: float = KD_WEIGHT
    forward_only: bool = False
    factor: float = 1.0  # on every pair's weight, as from balancing
    mode: BalanceMode = "fixed"
    alpha: float = 1.0
    per_micro_batch: bool = False
    # Of the teacher: the student's tokens, tokens of its own, or the student's in chunks of one.
    tokens: Literal["shared", "own", "chunks"] = "shared"

    @property
    def teacher_length(self) -> int:
        """Tokens of the teacher in a sample."""
        return TEACHER_LENGTH if self.tokens == "own" else LENGTH


@dataclass(frozen=True)
class Found:
    """One rank's result of a step: means, and its parts of weights and gradients."""

    values: dict[str, float]
    weights: Parts
    gradients: Parts
    teacher_weights: Parts
    projectors: dict[str, Tensor]
    projector_gradients: dict[str, Tensor]
    balance: dict[str, float]


def whole_batch() -> Batch:
    """Four packed sequences with separate masks; padding is trained by neither loss."""
    two = packed_batch(isolate=True)
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, 200, (ROWS, LENGTH), generator=generator)
    documents = two.document_ids_bS.repeat(2, 1)
    ce_mask, kd_mask = (
        (torch.rand(ROWS, LENGTH, generator=generator) < share) & (documents >= 0)
        for share in (0.7, 0.8)
    )
    return replace(
        two,
        tokens_bs=tokens,
        labels_bs=tokens.roll(-1, 1),
        ce_mask_bs=ce_mask,
        kd_mask_bs=kd_mask,
        position_ids_bs=two.position_ids_bs.repeat(2, 1),
        document_ids_bS=documents,
        sample_ids_b=torch.arange(ROWS),
        documents=None,
    )


def trained(setting: Setting | None = None) -> Trained:
    """The same as the oracle takes it.

    With chunks of one token the positions of the KD mask are those of the chunks' ends, and the
    rest is as in a plain run.
    """
    if setting is not None and setting.tokens != "shared":
        return trained_chunks(setting)
    whole = whole_batch()
    return Trained(packed_of(whole), whole.labels_bs, whole.ce_mask_bs, whole.kd_mask_bs)


def packed_of(side: Batch) -> Packed:
    """A side's tokens as the oracle takes them."""
    return Packed(side.tokens_bs, side.position_ids_bs, side.document_ids_bS)


def aligned_samples(setting: Setting) -> GlobalBatch:
    """Documents of random tokens in chunks of one to three tokens, packed for both sides."""
    rng = np.random.default_rng(8)

    def documents() -> Iterator[AlignedDocument]:
        while True:
            own = other = random_side(rng, np.ones(13, np.int64), 200)
            if setting.tokens == "own":
                chunks = (rng.choice([1, 1, 1, 2, 3], 9) for _ in range(2))
                own, other = (random_side(rng, sizes, 200) for sizes in chunks)
            yield AlignedDocument(own, other)

    return packed(documents(), (LENGTH, setting.teacher_length), ROWS)


def chunk_ends(setting: Setting) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int]:
    """Sample and place of each chunk's last token, of both sides, and the number of chunks.

    From the tokens of the samples, whose last one no model reads.
    """
    teacher = aligned_samples(setting).teacher
    assert teacher is not None
    own: list[tuple[int, int]] = []
    other: list[tuple[int, int]] = []
    chunks = 0
    for row, sides in enumerate(zip(teacher.student_chunks_GS1, teacher.chunks_GU1, strict=True)):
        for chunk in range(int(sides[0].max()) + 1):
            ends = [int((side == chunk).nonzero()[-1]) for side in sides]
            chunks += 1
            if ends[0] < LENGTH and ends[1] < setting.teacher_length:
                own.append((row, ends[0]))
                other.append((row, ends[1]))
    assert 0 < len(own) < chunks, "a sample ends with a chunk whose end no model reads"
    return own, other, chunks


def trained_chunks(setting: Setting) -> Trained:
    """The samples of two tokenizers as the oracle takes them."""
    whole = micro_batch(aligned_samples(setting), slice(0, ROWS), isolate_documents=True)
    own, other, count = chunk_ends(setting)
    kd_mask = torch.zeros_like(whole.kd_mask_bs)
    rows, places = torch.tensor(own).unbind(1)
    kd_mask[rows, places] = True
    found = Trained(packed_of(whole), whole.labels_bs, whole.ce_mask_bs, kd_mask)
    if setting.tokens == "chunks":
        return found
    side = whole.teacher
    assert side is not None
    assert side.chunks_bs is not None
    assert whole.chunks_bs is not None
    at = Alignment(
        *(whole.chunks_bs.reshape(-1), side.chunks_bs.reshape(-1)),
        *(whole.labels_bs.reshape(-1), side.labels_bs.reshape(-1)),
        count,
    )
    teacher_rows, teacher_places = torch.tensor(other).unbind(1)
    return replace(
        found,
        teacher=packed_of(side),
        chunks=at,
        student_ends=(rows, places),
        teacher_ends=(teacher_rows, teacher_places),
    )


def step_batches(groups: Groups, setting: Setting, planner: ChunkPlanner | None) -> StepBatches:
    """This rank's share of the whole batch; with a planner, of the samples of two tokenizers."""
    if planner is not None:
        return step_of(aligned_samples(setting), groups, planner, setting.micro_batch_size)
    whole, micro_batch_size = whole_batch(), setting.micro_batch_size
    own = range(groups.data.rank(), ROWS, groups.data.size())
    starts = range(0, len(own), micro_batch_size)
    batches = [rows_of(whole, list(own)[start : start + micro_batch_size]) for start in starts]
    rank, size = groups.context.rank(), groups.context.size()
    return StepBatches(
        tuple(batch.context_shard(rank, size).with_trained_rows() for batch in batches),
        ce_tokens=int(whole.ce_mask_bs.sum()),
        kd_tokens=int(whole.kd_mask_bs.sum()),
        positions=ROWS * LENGTH,
    )


def build_student(groups: Groups, recompute: str) -> Student:
    """The student with Megatron's gradient buffers, whole on every rank."""
    shape = small_architecture(**STUDENT)
    return student_of(shape, groups, length=LENGTH, positions=ROWS * LENGTH, recompute=recompute)


def build_teacher(groups: Groups, changes: dict[str, Any], length: int = LENGTH) -> OnlineTeacher:
    """The frozen teacher."""
    return teacher_of(small_architecture(**changes), groups, length=length)


def build_losses(setting: Setting, groups: Groups) -> FeatureLosses:
    """The feature losses of a setting, with projectors where the sizes differ."""
    from megatron_distill.train.features import (
        FeatureLosses,
        ProjectorOptimization,
        Projectors,
        ProjectorShape,
        ScoreRules,
        projector_name,
    )

    pairs = [FeaturePair(*pair) for pair in setting.pairs]
    width = setting.teacher.get("hidden_size", 32)
    projectors = None
    if width != 32:
        states = [pair for pair in pairs if not pair.is_of_attention]
        names = dict.fromkeys(projector_name(pair, shared=setting.shared) for pair in states)
        within = (24,) if setting.projector == "mlp" else ()
        projectors = Projectors(
            ProjectorShape(tuple(names), (32, *within, width)),
            ProjectorOptimization(1e-3, 0.1, (0.9, 0.95), 1e-8, True, 1.0),
            seed=5,
            groups=groups,
            device=torch.device("cpu"),
        )
    teacher = small_architecture(**setting.teacher)
    rules = (
        ScoreRule(shape.head_size**-0.5, None, shape.num_attention_heads)
        for shape in (small_architecture(**STUDENT), teacher)
    )
    return FeatureLosses(
        pairs,
        projectors=projectors,
        rules=ScoreRules(*rules),
        groups=groups,
        device=torch.device("cpu"),
    )


def build_balancing(setting: Setting, objective: TokenObjective) -> Balancing:
    """The balancing of the step; fixed: the weights of the setting."""
    from megatron_distill.train.balancing import Balancing, Schedules

    unchanging = ValueSchedule.unchanging
    schedules = Schedules(
        ce=unchanging(setting.ce_weight),
        terms=tuple(unchanging(term.weight) for term in objective.terms),
        temperatures=tuple(unchanging(term.temperature) for term in objective.terms),
        features=tuple(map(unchanging, objective.feature_weights)),
        alpha=unchanging(setting.alpha),
    )
    return Balancing(setting.mode, schedules, per_micro_batch=setting.per_micro_batch)


def even_routes(pairs: Sequence[FeaturePair], teacher_layers: int, layout: Layout) -> Any:
    """The routes of features where both models have even stages."""
    from megatron_distill.models.pipeline_stages import even_layers, ranks_of_layers
    from megatron_distill.train.teachers.live import routes

    ranks = layout.pipeline
    return routes(
        pairs,
        of_student=ranks_of_layers(even_layers(4, layout.stages), ranks),
        of_teacher=ranks_of_layers(even_layers(teacher_layers, ranks), ranks),
    )


def between_tokenizers(
    online: OnlineTeacher, objective: TokenObjective, setting: Setting
) -> TokenObjective:
    """The objective with the likelihood of chunks in place of a divergence."""
    from megatron_distill.data.tokenizers.open import Vocabulary
    from megatron_distill.train.assemble.alignment import TeacherTokenizer

    student = small_architecture(**STUDENT)
    size, length = student.vocab_size, setting.teacher_length
    own = TeacherTokenizer(Vocabulary(size, "t"), length, None, None, "teacher")
    found, aligned = own.connect(
        online, student, Vocabulary(size, "s"), objective.groups, torch.device("cpu"),
        chunk_tokens=24,
    )  # fmt: skip
    assert found is online, "without a map the head stays"
    terms = (ChunkTerm("likelihood", weight=setting.kd_weight),)
    return replace(objective, terms=terms, metrics=(), aligned=aligned)


def take_step(rank: int, world: int, setting: Setting) -> Found:
    """Forward and backward of one step, gradients reduced and not applied."""
    with megatron_groups(**setting.layout) as groups:
        from megatron_distill.train.step import run_student
        from megatron_distill.train.teachers.live import FeatureTeacher

        student = build_student(groups, setting.recompute)
        online = build_teacher(groups, setting.teacher, setting.teacher_length)
        losses = build_losses(setting, groups)
        losses.attach(student.chunks)
        ways = even_routes(losses.pairs, online.architecture.num_layers, groups.layout)
        objective = objective_of(
            small_architecture(**STUDENT),
            groups,
            ce_weight=setting.ce_weight,
            terms=(Term("forward_kl", weight=setting.kd_weight),) if setting.kd_weight else (),
            metrics=METRICS,
            chunk_tokens=24,
            features=losses,
            feature_weights=tuple(setting.factor * pair.weight for pair in losses.pairs),
        )
        weights = parts_of(student.chunks, groups)
        teacher_weights = parts_of([online.model], groups)
        if setting.tokens != "shared":
            objective = between_tokenizers(online, objective, setting)
        step = step_batches(groups, setting, objective.planner)
        signals = FeatureTeacher(online, ways).signals(step.micro_batches)
        balancing = build_balancing(setting, objective)
        balanced = balancing.prepare(
            student, signals, objective, step, steps_done=0, state=BalanceState()
        )
        for chunk in student.wrapped:
            chunk.zero_grad_buffer()
        if losses.projectors is not None:
            losses.projectors.zero_gradients()
        if setting.forward_only:
            with torch.no_grad():
                means = run_student(student, signals, balanced.objectives, step, forward_only=True)
        else:
            means = run_student(student, signals, balanced.objectives, step)
        norm = losses.projectors.reduce_gradients() if losses.projectors else torch.zeros(())
        for chunk in student.chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.main_grad  # type: ignore[attr-defined]
        named = dict(losses.projectors.named_parameters()) if losses.projectors else {}
        return Found(
            {name: float(mean) for name, mean in means.items()} | {"norm": float(norm)},
            weights,
            parts_of(student.chunks, groups),
            teacher_weights,
            {name: p.detach().clone() for name, p in named.items()},
            {name: p.grad.clone() for name, p in named.items() if p.grad is not None},
            balanced.read([float(one) for one in balanced.tensors(means)])[2],
        )
