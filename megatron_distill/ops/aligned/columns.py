"""The columns of common tokens on each rank, and the teacher's columns in the student's layout.

Equal tokens have different ids in two vocabularies, and so lie on different ranks. A divergence
over all common tokens needs both models' logits of a token on one rank. A frozen head is
rearranged once (`TeacherLayout.head`); given logits are exchanged for each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.ops.vocab import VocabShard

__all__ = ["CommonColumns", "TeacherLayout", "check_pairs", "shards_of"]


def shards_of(shard: VocabShard, group: dist.ProcessGroup | None) -> list[VocabShard]:
    """The shards of all ranks, in order.

    Collective: over ``group`` one all-gather of 16 bytes; none where it is None.
    """
    if group is None:
        return [shard]
    device = "cpu" if dist.get_backend(group) == "gloo" else torch.device("cuda")
    own = torch.tensor([shard.start, shard.stop], dtype=torch.int64, device=device)
    gathered = own.new_empty(2 * dist.get_world_size(group))
    dist.all_gather_into_tensor(gathered, own, group=group)
    return [VocabShard(shard.size, start, stop) for start, stop in gathered.view(-1, 2).tolist()]


def check_pairs(student_ids: Tensor, teacher_ids: Tensor, sizes: tuple[int, int]) -> None:
    """Refuse pairs of common tokens that do not map two vocabularies one to one.

    Raises:
        ValueError: shapes or dtypes differ, there is no pair, or an id is unknown or repeated.
    """
    for name, ids, size in (
        ("student_ids", student_ids, sizes[0]),
        ("teacher_ids", teacher_ids, sizes[1]),
    ):
        if ids.dim() != 1 or ids.dtype != torch.int64 or len(ids) != len(student_ids):
            raise ValueError(
                f"{name} is {ids.dtype} of shape {tuple(ids.shape)}; both sides of the common "
                "tokens must be int64 of the same length"
            )
        if not len(ids):
            raise ValueError(
                "the two vocabularies have no common token; use a loss that compares texts: "
                "likelihood, or uld"
            )
        if not (int(ids.min()) >= 0 and int(ids.max()) < size):
            raise ValueError(
                f"{name} has ids from {int(ids.min())} to {int(ids.max())}; the vocabulary has "
                f"{size}"
            )
        if int(torch.bincount(ids).max()) > 1:
            raise ValueError(f"{name} repeats an id; a common token is one id on each side")


@dataclass(frozen=True)
class CommonColumns:
    """This rank's columns of the common tokens, in the order of the student's ids.

    The common tokens are numbered by rank and student id. Each rank's columns are followed by one
    for its part of the rest, if there is a rest.

    Attributes:
        count: number of common tokens on all ranks.
        has_rest: whether both vocabularies have further tokens.
        student: local columns ``[p]`` of the student, ascending.
        student_rest: local columns of the student's further tokens.
        classes: ``[V]`` for each real local column of the student its place in ``student``, or
            that of the last class.
        student_shard: this rank's classes among those of all ranks.
        teacher: local columns ``[t]`` of the teacher: of the same tokens if ``is_aligned``, else
            ascending.
        teacher_rest: local columns of the teacher's further tokens.
        teacher_shard: this rank's part of the common tokens in the order of teacher columns.
        student_places: ``[count]``, the class of each common token in that order.
        is_aligned: whether columns of both sides are of the same tokens.
    """

    count: int
    has_rest: bool
    student: Tensor
    student_rest: Tensor
    classes: Tensor
    student_shard: VocabShard
    teacher: Tensor
    teacher_rest: Tensor
    teacher_shard: VocabShard
    student_places: Tensor
    is_aligned: bool

    @classmethod
    def of(
        cls,
        student_ids: Tensor,
        teacher_ids: Tensor,
        student: Sequence[VocabShard],
        teacher: Sequence[VocabShard],
        rank: int,
    ) -> CommonColumns:
        """From pairs ``[P]`` of global ids and all ranks' shards; no collective.

        Raises:
            ValueError: see `check_pairs`.
        """
        check_pairs(student_ids, teacher_ids, (student[0].size, teacher[0].size))
        count = len(student_ids)
        has_rest = count < student[0].size and count < teacher[0].size
        order = student_ids.argsort()
        student_ids, teacher_ids = student_ids[order], teacher_ids[order]
        starts = _starts(student_ids, student)
        owner = torch.bucketize(
            student_ids, torch.tensor([one.stop for one in student]), right=True
        )
        place = torch.arange(count) + (owner if has_rest else 0)
        mine = slice(starts[rank], starts[rank + 1])
        columns = student_ids[mine] - student[rank].start
        classes = torch.full((student[rank].real_width,), len(columns))
        classes[columns] = torch.arange(len(columns))
        if not has_rest:
            classes.clamp_(max=max(len(columns) - 1, 0))
        first = starts[rank] + (rank if has_rest else 0)
        width = len(columns) + int(has_rest)
        by_teacher = teacher_ids.argsort()
        teacher_starts = _starts(teacher_ids[by_teacher], teacher)
        local = slice(teacher_starts[rank], teacher_starts[rank + 1])
        aligned = teacher_ids[mine]
        is_aligned = len(teacher) == 1 or _all_owned(teacher_ids, owner, teacher)
        ordered = aligned if is_aligned else teacher_ids[by_teacher][local]
        of_rank = ordered - teacher[rank].start
        places = place if is_aligned else place[by_teacher]
        of_teacher = slice(starts[rank], starts[rank + 1]) if is_aligned else local
        return cls(
            count=count,
            has_rest=has_rest,
            student=columns,
            student_rest=_others(student[rank], columns),
            classes=classes,
            student_shard=VocabShard(count + len(student) * int(has_rest), first, first + width),
            teacher=of_rank,
            teacher_rest=_others(teacher[rank], of_rank),
            teacher_shard=VocabShard(count, of_teacher.start, of_teacher.stop),
            student_places=places,
            is_aligned=is_aligned,
        )

    def places_of(self, teacher_ids: Tensor, size: int) -> Tensor:
        """``[size]``: for each id of the teacher the student's class of its token, -1 for none.

        ``teacher_ids [P]`` are the ids of the pairs in the order of the student's ids, for columns
        that are aligned.
        """
        places = torch.full((size,), -1)
        places[teacher_ids] = self.student_places
        return places

    def to(self, device: torch.device) -> CommonColumns:
        """The columns with their tensors on a device."""
        moved = {
            name: value.to(device)
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return CommonColumns(**(vars(self) | moved))


def _others(shard: VocabShard, columns: Tensor) -> Tensor:
    """The real columns of a shard except these."""
    is_other = torch.ones(shard.real_width, dtype=torch.bool)
    is_other[columns] = False
    return is_other.nonzero().squeeze(1)


def _starts(ids: Tensor, shards: Sequence[VocabShard]) -> list[int]:
    """Where each shard begins in ascending ids, and the end."""
    edges = torch.tensor([shards[0].start, *(one.stop for one in shards)])
    edges[-1] = max(int(edges[-1]), shards[0].size)
    return torch.searchsorted(ids, edges).tolist()


def _all_owned(ids: Tensor, owner: Tensor, shards: Sequence[VocabShard]) -> bool:
    starts = torch.tensor([one.start for one in shards])
    stops = torch.tensor([one.stop for one in shards])
    return bool(((ids >= starts[owner]) & (ids < stops[owner])).all())


@dataclass(frozen=True)
class TeacherLayout:
    """A new numbering of the teacher's vocabulary, in which common tokens lie beside the student's.

    Each rank holds the common tokens of its student columns, in their order, and then an even part
    of the further ones. Padding is left out.

    Attributes:
        shards: the new shards of all ranks.
        old: the old shards of all ranks.
        old_ids: ``[V]``, the teacher's id of each new one.
        rank: this rank's place in the group.
        group: the ranks that share the vocabulary; None if this rank holds all of it.
    """

    shards: tuple[VocabShard, ...]
    old: tuple[VocabShard, ...]
    old_ids: Tensor
    rank: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(
        cls,
        student_ids: Tensor,
        teacher_ids: Tensor,
        student: Sequence[VocabShard],
        teacher: Sequence[VocabShard],
        group: dist.ProcessGroup | None,
    ) -> TeacherLayout:
        """From pairs ``[P]`` of global ids and all ranks' shards; no collective.

        Raises:
            ValueError: see `check_pairs`.
        """
        size, ranks = teacher[0].size, len(teacher)
        check_pairs(student_ids, teacher_ids, (student[0].size, size))
        order = student_ids.argsort()
        starts = _starts(student_ids[order], student)
        is_rest = torch.ones(size, dtype=torch.bool)
        is_rest[teacher_ids] = False
        rest = is_rest.nonzero().squeeze(1).tensor_split(ranks)
        parts: list[Tensor] = []
        for number in range(ranks):
            parts.append(
                torch.cat([teacher_ids[order[starts[number] : starts[number + 1]]], rest[number]])
            )
        shards, start = [], 0
        for part in parts:
            shards.append(VocabShard(size, start, start + len(part)))
            start += len(part)
        rank = 0 if group is None else dist.get_rank(group)
        return cls(tuple(shards), tuple(teacher), torch.cat(parts), rank, group)

    @cached_property
    def new_ids(self) -> Tensor:
        """``[V]``, the new id of each of the teacher's ids."""
        new = torch.empty_like(self.old_ids)
        new[self.old_ids] = torch.arange(len(new))
        return new

    @property
    def shard(self) -> VocabShard:
        """This rank's new columns."""
        return self.shards[self.rank]

    def rows(self, values: Tensor) -> Tensor:
        """This rank's new entries of ``[V, ...]``: head weight, bias, or transposed logits.

        Collective: over ``group`` one all-to-all of ``values``' real entries; none where it is
        None.
        """
        old, mine = self.old[self.rank], self.shard
        if self.group is None:
            return values.index_select(0, self.old_ids.to(values.device))
        sent, counts = [], []
        for target in self.shards:
            ids = self.old_ids[target.start : target.stop]
            ids = ids[(ids >= old.start) & (ids < old.stop)]
            sent.append(ids - old.start)
            counts.append(len(ids))
        wanted = self.old_ids[mine.start : mine.stop]
        stops = torch.tensor([one.stop for one in self.old])
        owner = torch.bucketize(wanted, stops, right=True)
        received = torch.bincount(owner, minlength=len(self.old)).tolist()
        buffer = values.index_select(0, torch.cat(sent).to(values.device))
        found = buffer.new_empty(len(wanted), *values.shape[1:])
        dist.all_to_all_single(found, buffer, received, counts, group=self.group)
        # Entries arrive by their old rank, and in the new order within each.
        place = torch.empty_like(wanted)
        place[owner.argsort(stable=True)] = torch.arange(len(wanted))
        return found.index_select(0, place.to(values.device))
