"""From a configuration to a teacher with a tokenizer of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar, get_args

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.align.map_file import cached_vocabulary_map, map_bytes, map_from_bytes
from megatron_distill.align.vocabulary_map import CommonTokenRule, VocabularyMap
from megatron_distill.config import (
    JobConfig,
    ModelConfig,
    RunConfig,
    aligned_role,
)
from megatron_distill.data.aligned.rows import ChunkPlanner
from megatron_distill.data.sources import TeacherReading
from megatron_distill.data.tokenizers.open import (
    Tokenizer,
    Vocabulary,
    holds_tokenizer,
    load_tokenizer,
    open_named_encoding,
)
from megatron_distill.errors import ConfigError
from megatron_distill.losses import SharedVocabularies
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import vocab_shard
from megatron_distill.ops.aligned.columns import CommonColumns, TeacherLayout, shards_of
from megatron_distill.ops.aligned.gold import GoldColumns
from megatron_distill.ops.aligned.projected_rows import ProjectedRows
from megatron_distill.ops.vocab import VocabShard
from megatron_distill.ops.workspace import chunk_tokens_for, tile_tokens_for
from megatron_distill.runtime.collectives import from_first_rank, on_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.store import find_stores, tokenizer_folder
from megatron_distill.train.aligned_loss import AlignedLoss
from megatron_distill.train.checkpoint.description import assets_of, resolve_checkpoint
from megatron_distill.train.teachers.live import OnlineTeacher
from megatron_distill.train.teachers.own_layout import OwnLayout
from megatron_distill.train.teachers.own_ranks import RemoteHead

__all__ = [
    "Live",
    "TeacherTokenizer",
    "open_teacher_tokens",
    "open_vocabulary_map",
    "own_tokens",
    "read_teacher",
    "read_teacher_tokenizer",
]


def open_vocabulary_map(
    student: Tokenizer | None,
    teacher: Tokenizer | None,
    *,
    folder: Path,
    device: torch.device,
    special_pairs: Sequence[tuple[str, str]] = (),
) -> VocabularyMap:
    """Return the map of two tokenizers on every rank, from the cache in `folder` or built now.

    student, teacher: only the first rank has them and only it reads `folder`, which nodes need not
    share. Raises on all ranks as `align.cached_vocabulary_map`.

    Collective: world, one all-reduce of 8 bytes every five seconds while the first rank works. Then
    a broadcast of the map's file, about 50 bytes per student token.
    """

    def content() -> bytes:
        assert student is not None, "the first rank has the student's tokenizer"
        assert teacher is not None, "the first rank has the teacher's tokenizer"
        return map_bytes(
            cached_vocabulary_map(student, teacher, folder=folder, special_pairs=special_pairs)
        )

    shared = [on_first_rank(content, device=device)]
    dist.broadcast_object_list(shared, src=0)
    assert shared[0] is not None
    return map_from_bytes(shared[0], place="the first rank's vocabulary map")


# On ranks of its own: its head alone. None: a teacher with records, stored or sent.
Live = TypeVar("Live", OnlineTeacher | OwnLayout, RemoteHead, None)
Placed = TypeVar("Placed", OnlineTeacher | OwnLayout, RemoteHead)

# Alignments that compare tokens, and so need the map between both vocabularies.
_OF_TOKENS: Final = ("common", "projection", "gold")
_PLAIN_TERMS: Final = (
    "remove `alignment` from objective.terms, whose plain divergences compare both models token by "
    "token"
)
_MANY_CORES: Final = 8  # with fewer, the tokenizers' own threads keep all of them busy


@dataclass(frozen=True)
class TeacherTokenizer:
    """The tokens of a teacher with a tokenizer of its own.

    Attributes:
        vocabulary: of its tokenizer.
        sequence_length: tokens in one packed sequence.
        reading: how samples are read in them, on the first rank; None elsewhere.
        tokens_map: between both vocabularies; None if no term compares tokens.
        role: of the teacher: its section of the configuration.
    """

    vocabulary: Vocabulary
    sequence_length: int
    reading: TeacherReading | None
    tokens_map: VocabularyMap | None
    role: str

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, on the first rank; None elsewhere."""
        return None if self.reading is None else self.reading.tokenizer

    def connect(
        self,
        online: Live,
        student: Architecture,
        vocabulary: Vocabulary,
        groups: Groups,
        device: torch.device,
        *,
        chunk_tokens: int | None,
    ) -> tuple[Live, AlignedLoss]:
        """Return the teacher with its head in the layout of the loss, and the loss.

        online: None for a teacher with records, which are whole on each rank. Raises ConfigError,
        on all ranks, where a record lacks the mass of common tokens.

        Collective: tensor group, one all-gather of 16 bytes for each model, and one all-to-all of
        the teacher's head; where the teacher is elsewhere, once its head has arrived.
        """
        group, rank = _sharing(groups), groups.tensor.rank()
        shard, tokens_map = vocab_shard(student, groups, tokens=vocabulary.size), self.tokens_map
        if online is None:
            of_teacher = VocabShard(self.vocabulary.size, 0, self.vocabulary.size)
        else:
            of_teacher = vocab_shard(online.architecture, groups, tokens=self.vocabulary.size)
        shared = SharedVocabularies(shard, of_teacher, None, None, group)
        if tokens_map is not None and online is None:
            shared = _with_places(tokens_map, shared, rank, device, self.role)
        elif tokens_map is not None and online is not None:
            shared, layout = _with_map(tokens_map, shared, rank, device)
            online = _arranged(online, layout)
        # All ranks of the group must cut the same tiles, and their shards may differ.
        shards = shards_of(shared.teacher_shard, group)
        widest = max(shared.student_shard.width, *(one.width for one in shards))
        band_tokens = chunk_tokens or chunk_tokens_for(widest, device)
        tile_tokens = min(band_tokens, tile_tokens_for(widest, device))
        context = groups.context
        planner = ChunkPlanner(tile_tokens, band_tokens, context.rank(), context.size())
        return online, AlignedLoss(shared, planner)


def _sharing(groups: Groups) -> dist.ProcessGroup | None:
    """Return the ranks that share a vocabulary; None for one rank."""
    return groups.tensor if groups.tensor.size() > 1 else None


def _with_places(
    tokens_map: VocabularyMap,
    shared: SharedVocabularies,
    rank: int,
    device: torch.device,
    role: str,
) -> SharedVocabularies:
    """Return both vocabularies with the class of each of the teacher's ids among the student's.

    Collective: tensor group, one all-gather of 16 bytes.
    """
    whole, shards = shared.teacher_shard, shards_of(shared.student_shard, shared.group)
    ids, teacher_ids = _tensors(*tokens_map.common("strict"))
    columns = CommonColumns.of(ids, teacher_ids, shards, [whole] * len(shards), rank)
    if not columns.has_rest and columns.count < whole.size:
        raise ConfigError(
            "alignment 'common': all tokens of the student are common, and a record lacks the "
            f"teacher's sum over them. Use alignment 'likelihood', or set {role}.hf or "
            f"{role}.checkpoint in place of {role}.store, or {role}.transfer.what to hidden "
            "where it is top_k"
        )
    places = columns.places_of(teacher_ids[ids.argsort()], whole.size)
    return replace(shared, common=columns.to(device), places=places.to(device))


def _arranged(online: Placed, layout: TeacherLayout | None) -> Placed:
    """Return the teacher with its head in a layout.

    Collective: tensor group, one all-to-all of the head, if it is here.
    """
    if isinstance(online, RemoteHead):
        online.layout = layout
    elif layout is not None and online.head_weight is not None:
        return replace(online, head_weight=layout.rows(online.head_weight))
    return online


def _with_map(
    tokens_map: VocabularyMap, shared: SharedVocabularies, rank: int, device: torch.device
) -> tuple[SharedVocabularies, TeacherLayout | None]:
    """Return both vocabularies with the map between them, and the layout of the teacher's head.

    It is that of the relaxed pairs, which include the strict ones; None on one rank.
    """
    group, shard, teacher_shard = shared.group, shared.student_shard, shared.teacher_shard
    shards, teacher_shards = shards_of(shard, group), shards_of(teacher_shard, group)
    pairs = {name: _tensors(*tokens_map.common(name)) for name in get_args(CommonTokenRule)}
    new_ids, layout = torch.arange(teacher_shard.size), None
    if group is not None:
        ids, teacher_ids = pairs["relaxed"]
        layout = TeacherLayout.of(ids, teacher_ids, shards, teacher_shards, group)
        new_ids, teacher_shard, teacher_shards = layout.new_ids, layout.shard, list(layout.shards)
    columns = {
        name: CommonColumns.of(ids, new_ids[teacher_ids], shards, teacher_shards, rank)
        for name, (ids, teacher_ids) in pairs.items()
    }
    own = (shard, teacher_shard)
    rows = tokens_map.columns(shard.start, shard.stop)
    offsets, row_ids, weights = _tensors(
        rows.row_offsets, rows.row_teacher_ids_n, rows.row_weights_n
    )
    (unreached,) = _tensors(tokens_map.unreached_teacher_ids)
    projected = ProjectedRows.of(
        offsets, new_ids[row_ids], weights, unreached_ids=new_ids[unreached], shards=own
    )
    found = SharedVocabularies(
        student_shard=shard,
        teacher_shard=teacher_shard,
        common=columns["strict"].to(device),
        new_ids=None if group is None else new_ids.to(device),
        group=group,
        projected=projected.to(device),
        gold={name: GoldColumns.of(one, own).to(device) for name, one in columns.items()},
    )
    return found, layout


def _tensors(*arrays: NDArray[Any]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(array) for array in arrays)


def open_teacher_tokens(
    config: RunConfig, student: Tokenizer | None, vocabulary: Vocabulary, device: torch.device
) -> TeacherTokenizer:
    """Open the teacher's own tokenizer, and the map from the student's.

    student: on the first rank alone. Raises DataError or ConfigError on all ranks: no tokenizer is
    named, it is the student's, or both vocabularies have no token in common.

    Collective: world, one broadcast of a short object, and those of `open_vocabulary_map`.
    """
    own = own_tokens(config, vocabulary)
    teacher = None if own.reading is None else own.reading.tokenizer
    found = None
    if any(term.alignment in _OF_TOKENS for term in config.objective.terms):
        folder = Path(config.data.cache or Path(config.output) / "cache")
        found = open_vocabulary_map(student, teacher, folder=folder, device=device)
    return replace(own, tokens_map=found)


def own_tokens(config: RunConfig, vocabulary: Vocabulary) -> TeacherTokenizer:
    """Open the teacher's own tokenizer without a map; `vocabulary`: of the student.

    Raises DataError or ConfigError on all ranks: no tokenizer is named, or it is the student's.

    Collective: world, one broadcast of a short object.
    """
    reading: TeacherReading | None = None
    with together():
        if dist.get_rank() == 0:
            reading = read_teacher(config, vocabulary)
    teacher = None if reading is None else reading.tokenizer
    facts = from_first_rank(lambda: Vocabulary.of(teacher) if teacher is not None else None)
    assert facts is not None
    role = aligned_role(config)
    length = config.models[role].sequence_length or config.data.sequence_length
    return TeacherTokenizer(facts, length, reading, None, role)


def read_teacher(
    config: JobConfig, vocabulary: Vocabulary, *, remedy: str = _PLAIN_TERMS
) -> TeacherReading:
    """Return how samples are read in the teacher's tokens, in a process without a world.

    vocabulary: of the student. remedy: advice where both have one tokenizer. Raises ConfigError or
    DataError as `open_teacher_tokens`, the map apart.
    """
    role, data = aligned_role(config), config.data
    section = config.models[role]
    teacher = read_teacher_tokenizer(section, role)
    if teacher.identity == vocabulary.identity:
        raise ConfigError(
            f"{role}.tokenizer: {teacher.name} and data.tokenizer are one tokenizer; {remedy}"
        )
    length = section.sequence_length or data.sequence_length
    workers = data.workers
    if workers is None:
        workers = 2 if (os.cpu_count() or 1) >= _MANY_CORES else 0
    # Terms of teachers with the student's tokenizer train labels outside of chunks too.
    distils_all = isinstance(config, RunConfig) and any(
        term.alignment is None for term in config.objective.terms
    )
    return TeacherReading(teacher, length, data.max_unaligned, workers, distils_all)


def read_teacher_tokenizer(section: ModelConfig, role: str = "teacher") -> Tokenizer:
    """Read a teacher's tokenizer: the one it names, that of its folder, or of its checkpoint.

    Raises ConfigError or DataError.
    """
    given = section.tokenizer
    if given is not None and given.path is not None:
        return load_tokenizer(given.path)
    if given is not None and given.encoding is not None:
        return open_named_encoding(given.encoding)
    folders = [] if section.hf is None else [Path(section.hf).expanduser()]
    if section.checkpoint is not None:
        assets = assets_of(resolve_checkpoint(section.checkpoint))
        folders += [] if assets is None else [assets]
    for source in section.store or ():
        folders += [tokenizer_folder(store) for store in find_stores([source.path])]
    for folder in folders:
        if holds_tokenizer(folder):
            return load_tokenizer(folder)
    raise ConfigError(
        "the teacher's tokenizer is unknown, and an alignment needs it; set "
        f"{role}.tokenizer.path to its folder, or {role}.tokenizer.encoding"
    )
