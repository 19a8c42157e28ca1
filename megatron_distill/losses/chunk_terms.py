"""A term between models with different tokenizers, and both vocabularies on a rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, get_args

import torch.distributed as dist
from torch import Tensor

from megatron_distill.align.vocabulary_map import CommonTokenRule
from megatron_distill.losses.terms import Term, TermTeachers
from megatron_distill.ops.aligned.columns import CommonColumns
from megatron_distill.ops.aligned.executor import AlignedRows
from megatron_distill.ops.aligned.gold import GoldColumns, GoldTerm
from megatron_distill.ops.aligned.likelihood import LikelihoodTerm
from megatron_distill.ops.aligned.merged_vocabulary import CommonTerm, common_top_k
from megatron_distill.ops.aligned.projected_rows import ProjectedRows
from megatron_distill.ops.aligned.projection import PROJECTION_TOP_K, ProjectionTerm
from megatron_distill.ops.aligned.published_projection import (
    PUBLISHED_TOP_K,
    PublishedDivergence,
    PublishedProjectionTerm,
    published_ids,
)
from megatron_distill.ops.aligned.sorted_distance import UldTerm
from megatron_distill.ops.aligned.tile import AlignedTerm
from megatron_distill.ops.divergences import Divergence, WeightedDivergence, divergence_named
from megatron_distill.ops.factors import Factor
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.signals import IdTarget, Support, TopK

__all__ = ["Alignment", "ChunkTerm", "SharedVocabularies", "ranked_term"]

Alignment = Literal["likelihood", "common", "projection", "gold", "uld"]

# Alignments that are defined on chunks of one token on each side alone.
_OF_PAIRS: Final = ("common",)
_UNCOMMON_TOP_K: Final = 256


@dataclass(frozen=True)
class SharedVocabularies:
    """The student's and the teacher's vocabulary on this rank.

    Attributes:
        student_shard: this rank's columns of the student's vocabulary.
        teacher_shard: this rank's columns of the teacher's, in the numbering of its head.
        common: the columns of tokens that both have; None if no term uses them.
        new_ids: ``[V]`` int64, the number of each of the teacher's ids in its head, where that was
            rearranged (`TeacherLayout`); None where numbers are ids.
        group: the ranks that share the vocabularies; None if this rank holds all of them.
        projected: the vocabulary map's rows of this rank, with ids in the numbering of the head;
            None if no term uses them.
        gold: columns of common and uncommon tokens by partition; those that terms use.
        places: ``[V]``, for each of the teacher's ids the number of the student's class of the same
            token, -1 for none. None unless the teacher's tokens come from records.
    """

    student_shard: VocabShard
    teacher_shard: VocabShard
    common: CommonColumns | None
    new_ids: Tensor | None
    group: dist.ProcessGroup | None
    projected: ProjectedRows | None = None
    gold: Mapping[CommonTokenRule, GoldColumns] = field(default_factory=dict)
    places: Tensor | None = None

    def teacher_numbers(self, ids: Tensor) -> Tensor:
        """The teacher's ids in the numbering of its head."""
        return ids if self.new_ids is None else self.new_ids[ids]


@dataclass(frozen=True)
class ChunkTerm:
    """One loss between both models on chunks, with its weight; fields shared with `Term` are equal.

    ``alignment`` is the kind of loss. The ``temperature`` of ``likelihood`` is of the chunk's
    probability, that of all further kinds of both softmaxes. ``uld`` has no divergence.
    ``top_k`` None means all common tokens for ``common``, 64 teacher tokens for ``projection``
    and 8,192 if ``published`` (see `PublishedProjectionTerm`; T^2 is part of it).
    ``uncommon_top_k`` sorted probabilities are compared by ``gold`` and ``uld``; ``partition``
    chooses the common tokens of ``gold``. ``teachers``, of several: the one of this term; None for
    chunks of the samples whose teacher has a tokenizer of its own.

    Raises:
        ValueError: an unknown alignment, divergence or parameter, or a number out of range.
    """

    alignment: Alignment
    divergence: str = "forward_kl"
    weight: Factor = 1.0
    temperature: float = 1.0
    scale_by_temperature_squared: bool = False
    top_k: int | None = None
    parameters: Mapping[str, float] = field(default_factory=dict)
    temperatures: tuple[float, float] | None = None
    uncommon_top_k: int = _UNCOMMON_TOP_K
    published: bool = False
    partition: CommonTokenRule = "strict"
    teachers: TermTeachers | None = None

    support: ClassVar[Support] = "tail"

    def __post_init__(self) -> None:
        if self.alignment not in get_args(Alignment):
            known = ", ".join(get_args(Alignment))
            raise ValueError(f"alignment is {self.alignment!r}; known: {known}")
        if self._divergence.head_mass is not None and self.alignment != "common":
            raise ValueError(
                f"{self.divergence} is not defined with alignment {self.alignment!r}: it orders "
                "tokens by the teacher's probability, and these classes are not tokens; use "
                "forward_kl, reverse_kl or js_divergence"
            )
        for name, value in (("temperature", self.temperature), ("weight", self.weight)):
            if isinstance(value, Tensor):
                continue  # of the device, which is not read
            if not math.isfinite(value) or (name == "temperature" and value <= 0):
                wanted = "positive and finite" if name == "temperature" else "finite"
                raise ValueError(f"{name} of {self.alignment} is {value}; it must be {wanted}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k of {self.alignment} is {self.top_k}; it must be at least 1")
        if self.uncommon_top_k < 1:
            raise ValueError(f"uncommon_top_k is {self.uncommon_top_k}; it must be at least 1")
        if self.published and self.divergence not in get_args(PublishedDivergence):
            raise ValueError(
                f"divergence is {self.divergence}; the published projection is defined for "
                f"{' and '.join(get_args(PublishedDivergence))}"
            )

    @property
    def _divergence(self) -> Divergence:
        return divergence_named(self.divergence, **self.parameters)

    @property
    def name(self) -> str:
        """Name in reports: alignment and divergence, with settings that are not the default."""
        name = "uld" if self.alignment == "uld" else f"{self.alignment}_{self._divergence.name}"
        if self.published:
            name += "_published"
        if self.partition != "strict":
            name += f"_{self.partition}"
        if self.uncommon_top_k != _UNCOMMON_TOP_K:
            name += f"_uncommon{self.uncommon_top_k}"
        if self.temperatures is not None:
            first, last = self.temperatures
            name += f"_t{first:g}to{last:g}"
        elif self.temperature != 1.0:
            name += f"_t{self.temperature:g}"
        if self.top_k is not None:
            name += f"_top{self.top_k}"
        return name if self.teachers is None else f"{name}_{self.teachers.label}"

    @property
    def temperature_factor(self) -> float:
        """T^2 if configured, else 1."""
        return self.temperature**2 if self.scale_by_temperature_squared else 1.0

    @property
    def is_forward_kl(self) -> bool:
        """Whether the divergence is linear in the teacher's probabilities."""
        return self.divergence == "forward_kl"

    @property
    def is_of_pairs(self) -> bool:
        """Whether the term is defined on chunks of one token on each side alone."""
        return self.alignment in _OF_PAIRS

    @property
    def has_mass(self) -> bool:
        """Whether the term is on a top-k of the teacher's tokens, whose mass is reported."""
        return self.alignment == "projection" or (
            self.alignment == "common" and self.top_k is not None
        )

    def on(
        self,
        vocabularies: SharedVocabularies,
        rows: AlignedRows,
        target: IdTarget | None = None,
    ) -> AlignedTerm:
        """The loss of one tile of the rows, without its weight.

        ``target``: the teacher's side from a record, where there are no logits. For likelihood it
        holds the label of each of the M rows, for common the teacher's most probable ids.

        Collective: that of `published_ids` for the published projection.
        """
        divergence, temperature = self._divergence, self.temperature
        if target is not None:
            return self._of_record(vocabularies, target)
        match self.alignment:
            case "likelihood":
                return LikelihoodTerm(self.name, divergence, temperature)
            case "common":
                return self._common(vocabularies, None)
            case "projection":
                return self._projection(vocabularies, rows)
            case "gold":
                columns, k = vocabularies.gold[self.partition], self.uncommon_top_k
                return GoldTerm(self.name, columns, divergence, temperature, k)
            case "uld":
                return UldTerm(self.name, temperature, self.uncommon_top_k)

    def _of_record(self, vocabularies: SharedVocabularies, target: IdTarget) -> AlignedTerm:
        """The loss of a teacher without logits.

        Raises:
            ValueError: it needs more than a top-k.
        """
        assert isinstance(target, TopK), "records of aligned terms are of probabilities"
        if self.alignment == "likelihood":
            log_probs = target.log_probs.squeeze(1)
            return LikelihoodTerm(self.name, self._divergence, self.temperature, log_probs)
        if self.alignment != "common" or self.top_k is None:
            raise ValueError(f"{self.name} needs the teacher's logits; a record has none")
        assert vocabularies.places is not None, "a record needs the numbers of common tokens"
        return self._common(vocabularies, common_top_k(target, vocabularies.places, self.top_k))

    def _common(self, vocabularies: SharedVocabularies, recorded: TopK | None) -> CommonTerm:
        columns = vocabularies.common
        assert columns is not None, "a term on common tokens needs their columns"
        weighted = WeightedDivergence(self._divergence, self.temperature, 1.0)
        return CommonTerm(self.name, columns, weighted, self.top_k, recorded)

    def _projection(self, vocabularies: SharedVocabularies, rows: AlignedRows) -> AlignedTerm:
        projected = vocabularies.projected
        assert projected is not None, "projection needs the rows of a vocabulary map"
        if not self.published:
            k = self.top_k or PROJECTION_TOP_K
            return ProjectionTerm(self.name, projected, self._divergence, self.temperature, k)
        ids = published_ids(rows, self.top_k or PUBLISHED_TOP_K)
        direction: PublishedDivergence = (
            "reverse_kl" if self.divergence == "reverse_kl" else "forward_kl"
        )
        return PublishedProjectionTerm(self.name, projected, ids, direction, self.temperature)


def ranked_term(terms: Iterable[Term | ChunkTerm]) -> ChunkTerm | None:
    """The first term on a top-k of chunks, whose mass is reported; None without one."""
    return next((one for one in terms if isinstance(one, ChunkTerm) and one.has_mass), None)
