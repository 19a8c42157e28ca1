"""Plain values of the planner: a run, one choice of layout for it, and sums of named parts."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from megatron_distill.models.pipeline_stages import even_layers
from megatron_distill.planning.operations import Recomputed, attended_positions
from megatron_distill.planning.stages.known import known_of

if TYPE_CHECKING:
    from megatron_distill.models.architecture import Architecture
    from megatron_distill.planning.device import Precision
    from megatron_distill.runtime.layout import Layout

__all__ = [
    "Choice",
    "ChunkLoss",
    "LayerPair",
    "LossTerm",
    "Parts",
    "PlannedRun",
    "SharedTeacher",
    "TeacherPlace",
    "teachers_apart",
]


@dataclass(frozen=True)
class Parts:
    """Numbers of one unit, the fields of a subclass, which add up to the whole."""

    @property
    def total(self) -> float:
        """The sum of the parts, asked for with every choice."""
        return sum(vars(self).values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


TeacherPlace = Literal["none", "shared", "own ranks", "store"]
Alignment = Literal["likelihood", "common", "projection", "gold", "uld"]
LayerLoss = Literal["mse", "cosine", "attention"]


@dataclass(frozen=True)
class SharedTeacher:
    """One of several teachers, on the student's ranks and in its layout.

    share: of the samples that it teaches; 1 where a term names it. rests, shards: `rests` and
    `shards_teacher` of `PlannedRun`, of this one alone.
    """

    name: str
    shape: Architecture
    share: float
    rests: bool = False
    shards: bool = False


@dataclass(frozen=True)
class ChunkLoss:
    """A loss between two tokenizers; the fields are those of a term of the objective."""

    alignment: Alignment
    top_k: int | None = None
    uncommon_top_k: int = 256


@dataclass(frozen=True)
class LayerPair:
    """A loss between a layer of the student and one of the teacher, numbered from 1."""

    student: int
    teacher: int
    loss: LayerLoss = "mse"

    @property
    def is_of_attention(self) -> bool:
        """Whether attention maps are compared, not hidden states."""
        return self.loss == "attention"


@dataclass(frozen=True)
class LossTerm:
    """A term of the objective within one tokenizer.

    top_k: ids of each token that it is on; None: on all. has_tail: whether all further ids count as
    one more. divergence: its name in the objective.
    """

    top_k: int | None = None
    has_tail: bool = True
    divergence: str = "forward_kl"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """The parts of a configuration that decide memory and time, without a layout.

    Attributes:
        teacher: of a live teacher, or the one that a store would be captured from; None: no teacher
            or only a store, whose model is unknown. The largest of several.
        several: all teachers, where they are several.
        mixed: teachers of one term, at most.
        sends_heads: whether a teacher in another layout sends queries and keys by whole tensor
            ranks; one of both numbers of these must divide the other.
        paired_layers: of losses between layers.
        projector: sizes of each pair's projector, from the student's hidden size to the teacher's;
            empty: there is none. shares_projector: whether all pairs have one together.
        teacher_length: of the teacher's sequences, where it has a tokenizer of its own.
        losses: terms of the objective in words, by which measured runs are told apart.
        terms: those within one tokenizer as they are with a live teacher; empty: one on all ids.
        chunk_losses: between two tokenizers; empty: there is one.
        shards_teacher: whether the ranks with the same weights of the teacher divide them.
        keeps_signals: whether the student runs twice in a step, with signals that are kept for it.
        measures: what each step measures for the balance of the losses, in a forward pass of the
            student before its own: the losses, or the norms of their gradients.
        rests: whether the teacher's weights but its head are on a GPU in its forward pass alone.
        document_length: tokens of the document of a mean token, the sum of squared lengths over
            the sum of lengths; None: attention sees whole sequences.
        steps: of the run; 0: not known, as with epochs.
        validation_samples: held-out ones of each validation. validation_interval: steps between
            two; 0: one at the end.
        chunk_tokens: of the losses; None: chosen by the device.
        sent_ids: ids per token that a teacher with its own ranks or layout sends; None: hidden
            states.
        store_ids: ids per token of a store.
        row_blocks: whether the losses on a GPU take fp32 blocks of rows besides the logits; the
            kernels of whole divergences take none.
        overlaps_tensor: whether products hide messages of tensor ranks, from user buffers.
        reading_seconds: in which the rank that reads has a token; 0: the samples are a store's.
    """

    student: Architecture
    teacher: Architecture | None
    sequence_length: int
    several: tuple[SharedTeacher, ...] = ()
    mixed: int = 1
    sends_heads: bool = False
    paired_layers: tuple[LayerPair, ...] = ()
    projector: tuple[int, ...] = ()
    shares_projector: bool = False
    teacher_length: int | None = None
    losses: tuple[str, ...] = ()
    terms: tuple[LossTerm, ...] = ()
    chunk_losses: tuple[ChunkLoss, ...] = ()
    document_length: int | None = None
    global_batch_size: int
    steps: int = 0
    validation_samples: int = 0
    validation_interval: int = 0
    precision: Precision = "bf16"
    student_fp8: bool = False
    teacher_fp8: bool = False
    chunk_tokens: int | None = None
    is_distributed: bool = True
    overlaps_gradients: bool = True
    overlaps_parameters: bool = False
    bucket_size: int | None = None
    shards_teacher: bool = False
    offloads_hidden: bool = False
    keeps_signals: bool = False
    measures: Literal["losses", "gradients"] | None = None
    rests: bool = False
    steps_ahead: int = 1
    sent_ids: int | None = None
    store_ids: int = 64
    row_blocks: bool = True
    writes_scores: bool = False
    overlaps_tensor: bool = False
    reading_seconds: float = 0.0

    @property
    def width(self) -> int:
        """Bytes of a weight and of a number of the activations."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Positions of the student in one step."""
        return self.global_batch_size * self.sequence_length

    @property
    def is_aligned(self) -> bool:
        """Whether the losses are between two tokenizers, of a teacher with a model."""
        return bool(self.chunk_losses) and self.teacher is not None

    @property
    def answer_bytes(self) -> float:
        """Bytes per token of what a teacher sends: a hidden state, or ids with their values.

        With the ids go two numbers of their distribution and two of its temperature.
        """
        assert self.teacher is not None
        if self.sent_ids is None:
            return float(self.teacher.hidden_size * self.width)
        return 8.0 * self.sent_ids + 16.0

    def attended(self, shape: Architecture, length: int) -> tuple[float, float]:
        """Return the mean attended positions of layers without and with a window."""
        document = self.document_length
        return (
            attended_positions(length, None, document),
            attended_positions(length, shape.sliding_window, document),
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run it: layouts, micro-batch, recomputation, and the place of the teacher.

    Attributes:
        ranks: of the student; the teacher's own come on top.
        layers: of each stage of the student, virtual ones included, in the order of the forward
            pass.
        modules: of each layer that `selective` computes again.
        recomputed_layers: of each stage with `full`; None: all.
        teacher_layout: of a live teacher; None: there is none.
    """

    layout: Layout
    ranks: int
    micro_batch_size: int
    layers: tuple[int, ...]
    recompute: Recomputed = "none"
    modules: tuple[str, ...] = ("attention",)
    recomputed_layers: int | None = None
    place: TeacherPlace = "none"
    teacher_layout: Layout | None = None
    teacher_layers: tuple[int, ...] = ()
    teacher_ranks: int = 0

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.ranks + self.teacher_ranks

    @property
    def data(self) -> int:
        """Data-parallel size of the student."""
        return self.ranks // self.layout.model_ranks

    @property
    def teacher_data(self) -> int:
        """Replicas of the live teacher."""
        assert self.teacher_layout is not None
        return (self.teacher_ranks or self.ranks) // self.teacher_layout.model_ranks

    @property
    def is_same_layout(self) -> bool:
        """Whether a teacher on shared ranks has the student's layout."""
        layout = self.layout.without_virtual_stages()
        return self.place == "shared" and self.teacher_layout == layout

    @property
    def runs_within(self) -> bool:
        """Whether the teacher runs inside the student's forward step, a micro-batch at a time."""
        return self.is_same_layout and self.layout.pipeline == 1

    @property
    def sizes_of_ends(self) -> tuple[object, ...]:
        """All that decides the heads and losses of a token, with one teacher at most."""
        layout = self.layout
        sizes = layout.tensor, layout.context, layout.sequence
        return (*sizes, self.place, self.is_same_layout, self.teacher_layout is None)

    @property
    def wave(self) -> int:
        """Micro-batches for which a teacher in another layout on shared ranks runs at a time.

        Each of its stages has a unit of them, as in `train.teachers.units`.
        """
        assert self.teacher_layout is not None
        return -(-self.teacher_data * self.teacher_layout.pipeline // self.data)

    def sends_answers(self, run: PlannedRun) -> bool:
        """Whether a live teacher is elsewhere, or in another layout than the student."""
        is_live = self.place in ("shared", "own ranks") and run.teacher is not None
        return is_live and not self.is_same_layout

    def sends_ids(self, run: PlannedRun) -> bool:
        """Whether a live teacher sends top-k ids, for which it has run its head."""
        return run.sent_ids is not None and self.sends_answers(run)

    def keeps_head(self, run: PlannedRun) -> bool:
        """Whether the losses on the student's last stage run a live teacher's head."""
        is_live = self.place in ("shared", "own ranks") and run.teacher is not None
        return is_live and not self.sends_ids(run)

    def terms(self, run: PlannedRun) -> tuple[LossTerm, ...]:
        """Return the terms of the losses as they are with this place of the teacher.

        Where ids are sent or stored, each term is on them, or on the first ones of them.
        """
        known = run.sent_ids if self.sends_ids(run) else None
        if self.place == "store":
            known = run.store_ids
        return tuple(replace(term, top_k=term.top_k or known) for term in run.terms)

    def head_in_stages(self, run: PlannedRun) -> Architecture | None:
        """Return the teacher whose head the balance of the student's stages counts.

        Of several, the samples decide whose heads run, and a run's balance counts none of them.
        """
        return run.teacher if self.keeps_head(run) and not run.several else None

    def compared_layers(self, run: PlannedRun) -> tuple[LayerPair, ...]:
        """Return the pairs of layers with a loss; a store has no layers of a teacher."""
        is_known = run.teacher is not None and self.place != "store"
        return run.paired_layers if is_known else ()

    def micro_batches(self, run: PlannedRun) -> int:
        """Return the micro-batches of one replica of the student in a step."""
        return run.global_batch_size // (self.data * self.micro_batch_size)

    def teacher_micro_batches(self, run: PlannedRun) -> int:
        """Return the micro-batches of the busiest replica of the teacher in a step."""
        return -(-run.global_batch_size // (self.teacher_data * self.micro_batch_size))

    def teacher_tokens(self, run: PlannedRun) -> int:
        """Return the tokens of the teacher's micro-batch on one of the student's context ranks."""
        length = run.teacher_length or run.sequence_length
        return self.micro_batch_size * length // self.layout.context

    def chunk_layers(self, rank: int) -> tuple[range, ...]:
        """Return the layers of each chunk on a pipeline rank of the student."""
        return _chunks(self.layers, self.layout.pipeline, rank)

    def teacher_stage(self, rank: int) -> range:
        """Return the layers of the teacher's stage."""
        assert self.teacher_layout is not None
        return _chunks(self.teacher_layers, self.teacher_layout.pipeline, rank)[0]


def teachers_apart(run: PlannedRun, choice: Choice) -> list[tuple[PlannedRun, Choice, float]]:
    """Return a run and a choice of each live teacher, and the share of micro-batches that need it.

    A micro-batch runs through the teachers of all of its samples. Where replicas run a teacher
    together, one needs it where one of them does.
    """
    if not run.several:
        return [(run, choice, 1.0)]
    layout = choice.teacher_layout
    assert layout is not None

    def needed(one: SharedTeacher) -> float:
        is_joint = one.shards or layout.expert > 1
        return 1 - (1 - one.share) ** (choice.micro_batch_size * (choice.data if is_joint else 1))

    return [
        (
            known_of((run,), ("run with", one.name), partial(_run_with, run, one)),
            replace(choice, teacher_layers=even_layers(one.shape.num_layers, layout.pipeline)),
            needed(one),
        )
        for one in run.several
    ]


def _run_with(run: PlannedRun, one: SharedTeacher) -> PlannedRun:
    """Return the run with one of its several teachers alone."""
    return replace(
        run,
        teacher=one.shape,
        several=(),
        mixed=1,
        rests=one.rests,
        shards_teacher=one.shards,
    )


@lru_cache(maxsize=4096)
def _chunks(layers: tuple[int, ...], pipeline: int, rank: int) -> tuple[range, ...]:
    bounds = tuple(accumulate(layers, initial=0))
    stages = range(rank, len(layers), pipeline)
    return tuple(range(bounds[stage], bounds[stage + 1]) for stage in stages)
