"""A model that reads rows in steps, goes back over their last positions, and gives its states.

Shapes: N new positions of all rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from megatron_distill.models.generation.attend import Append, Step, step_for
from megatron_distill.models.generation.cache import (
    Cache,
    KeyShape,
    bytes_per_row,
    integers,
    layer_bytes_per_row,
)
from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.generation.stage import Stage
from megatron_distill.models.gpt import align_head
from megatron_distill.ops import VocabShard

__all__ = ["Reader"]


@dataclass
class Reader:
    """One of two models whose probabilities are compared; its head has the columns of both.

    Attributes:
        cache: of the rows that are read, with a slot per position also where a layer has a window.
    """

    stage: Stage
    cache: Cache | None = None

    @classmethod
    def of(cls, model: CachedGPT, shard: VocabShard) -> Reader:
        """Take the weights of a model; its head gets the columns of `shard`.

        Collective: tensor group, one all-gather of the head where its columns differ.
        """
        stage = Stage.of(
            model.chunks,
            model.architecture,
            groups=model.groups,
            device=model.device,
            vocab_size=model.vocab_size,
        )
        head = stage.head
        if head is not None:
            head = align_head(head, own=stage.shard, wanted=shard, group=model.groups.tensor)
        stage = replace(stage, head=head, shard=shard)
        stage.reserve(model.positions)
        return cls(stage)

    @property
    def shapes(self) -> list[KeyShape]:
        """The keys of each layer, of all positions."""
        return [replace(shape, window=None) for shape in self.stage.key_shapes]

    @property
    def position_bytes(self) -> int:
        """Bytes of the cache for one position of a row."""
        return bytes_per_row(self.shapes, 1, self.stage.dtype)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values, joined for a step, for one position of a row."""
        is_capped = self.stage.architecture.attention_softcap is not None
        return layer_bytes_per_row(self.shapes, 1, self.stage.dtype, is_capped=is_capped)

    def begin(self, rows: Sequence[Sequence[int]], slots: int) -> Tensor | None:
        """Read the first ids of rows, as `read`; `slots` 0: nothing is read after them."""
        shapes = self.shapes if slots else self.stage.key_shapes
        stage = self.stage
        self.cache = Cache.empty(shapes, len(rows), slots, dtype=stage.dtype, device=stage.device)
        return self.read(rows)

    def read(self, rows: Sequence[Sequence[int]]) -> Tensor | None:
        """Read new ids of each row; returns hidden states [N, H] on the last stage.

        Collective: those of `Stage.run`.
        """
        assert self.cache is not None
        flat = [token for row in rows for token in row]
        if not flat:
            return None
        ids_N = integers(flat, self.stage.device)
        return self._through(ids_N, step_for(self.cache, [len(row) for row in rows]))

    def read_next(self, ids_b: Tensor) -> Tensor | None:
        """Read one new id of each row, as `read`; the host does not wait for them."""
        assert self.cache is not None
        if any(shape.window for shape in self.stage.key_shapes):  # the cache has no ring
            return self._through(ids_b, step_for(self.cache, [1] * self.cache.rows))
        return self._through(ids_b, Append(self.cache))

    def _through(self, ids_N: Tensor, step: Step) -> Tensor | None:
        hidden_NH = None
        for number in range(len(self.stage.chunks)):
            hidden_NH = self.stage.run(number, ids_N, step)
        step.finish()
        return hidden_NH

    def drop_last(self, counts: Sequence[int]) -> None:
        """Forget the last positions of each row."""
        assert self.cache is not None
        self.cache.drop_last(counts)

    def reduce_to(self, rows: Sequence[int]) -> None:
        """Drop all but some of the rows."""
        assert self.cache is not None
        if len(rows) < self.cache.rows:
            self.cache.reduce_to(rows)
