"""A rank's model chunks: ids to hidden states, through the layers, and to logits.

Chunks of several pipeline stages pass hidden states [N, H] on, and nothing but drawn ids back.

Shapes: N positions, H hidden size, V real columns of the head on this rank, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.generation.attend import Step
from megatron_distill.models.generation.cache import KeyShape
from megatron_distill.models.generation.layer import GenerationNorm, Layer, summed
from megatron_distill.models.generation.linear import Linear, WeightCopies
from megatron_distill.models.generation.rotation import paired_order, rotary_table
from megatron_distill.models.gpt import HiddenStateGPT, vocab_shard
from megatron_distill.models.layer_kinds import LayerKinds, rotary_angles
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import HiddenState

__all__ = ["ModelChunk", "Stage"]

# Tensors on their way to other stages: rows in flight have one each, and their drawn ids.
_SENDS_PER_STAGE = 2
_PAIRED_SHARE = 0.25  # of the bytes of copies: those for products save more time


@dataclass(frozen=True)
class ModelChunk:
    """The layers of one model chunk; `first_layer` is its first one's number on this rank."""

    layers: tuple[Layer, ...]
    first_layer: int


@dataclass
class Stage:
    """The chunks of this rank, with the ends of the model that it has.

    Made anew for each request, because norms may hold copies of weights.
    """

    chunks: tuple[ModelChunk, ...]
    architecture: Architecture
    groups: Groups
    device: torch.device
    dtype: torch.dtype
    shard: VocabShard
    model: Sequence[HiddenStateGPT]
    final_norm: GenerationNorm | None  # on the last stage
    head: Tensor | None  # this rank's rows, on the last stage
    is_paired: bool  # the numbers of queries and keys, as `paired_order`
    tables: list[Tensor] = field(default_factory=list)  # `rotary_table` of each distinct rotation
    copies: WeightCopies = field(default_factory=WeightCopies)
    _sends: list[tuple[dist.Work, Tensor]] = field(default_factory=list)
    _real_head: Linear | None = field(init=False, default=None)  # the rows of real columns

    def __post_init__(self) -> None:
        if self.head is not None:
            self._real_head = Linear(self.head[: self.shard.real_width].t(), None, self.copies)

    @classmethod
    def of(
        cls,
        model: Sequence[HiddenStateGPT],
        architecture: Architecture,
        *,
        groups: Groups,
        device: torch.device,
        vocab_size: int | None,
    ) -> Stage:
        """Take the weights of a rank's model chunks; `vocab_size` as in `vocab_shard`."""
        kinds = LayerKinds.of(architecture)
        chunks, first, copies = [], 0, WeightCopies()
        order_d = _order(model, architecture, groups, copies)
        for chunk in model:
            layers = tuple(
                Layer.of(
                    module,
                    kinds=kinds,
                    groups=groups,
                    rotary_width=chunk.rotary_size,
                    order_d=order_d,
                    copies=copies,
                )
                for module in chunk.decoder.layers
            )
            chunks.append(ModelChunk(layers, first))
            first += len(layers)
        norm = model[-1].decoder.final_layernorm if groups.is_last_stage else None
        return cls(
            tuple(chunks),
            architecture,
            groups,
            device,
            model[0].config.params_dtype,
            vocab_shard(architecture, groups, tokens=vocab_size),
            model,
            None
            if norm is None
            else GenerationNorm.of(norm.weight, getattr(norm, "bias", None), model[-1].config),
            model[-1].head_weight().detach() if groups.is_last_stage else None,
            is_paired=order_d is not None,
            copies=copies,
        )

    @property
    def key_shapes(self) -> list[KeyShape]:
        """The keys of each layer of this rank, in the order of calls."""
        return [layer.keys for chunk in self.chunks for layer in chunk.layers]

    def run(self, number: int, ids_N: Tensor, step: Step) -> Tensor | None:
        """Run chunk `number` of this rank on new positions; returns [N, H] after the last one.

        ids_N: read where the model begins. Elsewhere the hidden state comes from the stage before,
        and goes to the stage after; then the result is None.

        Collective: pipeline group, one receive and one send of H numbers per position; from the
        last stage to the first in `Groups.pipeline_back`. And those of the layers.
        """
        is_first = self.groups.is_first_stage and number == 0
        is_last = self.groups.is_last_stage and number == len(self.chunks) - 1
        if is_first:
            hidden_NH = self._embedded(ids_N, step.positions_N)
        else:
            hidden_NH = self._received(ids_N.shape[0])
        rotations = [table.index_select(0, step.positions_N).unbind(1) for table in self.tables]
        chunk = self.chunks[number]
        for index, layer in enumerate(chunk.layers, chunk.first_layer):
            hidden_NH = layer(hidden_NH, rotations, partial(step.attend, index, layer.core))
        if is_last:
            return hidden_NH
        self._send(hidden_NH)
        return None

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits of this rank's real columns, fp32 [N, V]; on the last stage."""
        assert self.final_norm is not None
        assert self._real_head is not None
        logits_NV = self._real_head(self.final_norm(hidden_NH)).float()
        rule = LogitRule(self.architecture.logit_softcap, self.architecture.logit_scale)
        return rule.apply_(logits_NV)

    def states(self, hidden_NH: Tensor) -> HiddenState:
        """Return normalised hidden states with this rank's head; on the last stage."""
        assert self.final_norm is not None
        assert self.head is not None
        return HiddenState(
            self.final_norm(hidden_NH),
            self.head,
            self.architecture.logit_softcap,
            self.architecture.logit_scale,
        )

    def _embedded(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Return the embeddings [N, H]. Collective: tensor group, one all-reduce of them."""
        model = self.model[0]
        words = model.embedding.word_embeddings
        if self.groups.tensor.size() == 1:
            hidden_NH = F.embedding(ids_N, words.weight)
        else:
            rows = words.weight.shape[0]
            local_N = ids_N - self.groups.tensor.rank() * rows
            outside_N = (local_N < 0) | (local_N >= rows)
            hidden_NH = F.embedding(local_N.masked_fill(outside_N, 0), words.weight)
            hidden_NH = summed(hidden_NH.masked_fill(outside_N[:, None], 0.0), self.groups.tensor)
        if self.architecture.positions == "learned":
            table = model.embedding.position_embeddings.weight
            # A row that ended already may run past the last position until it is dropped.
            hidden_NH = hidden_NH + F.embedding(positions_N.clamp(max=table.shape[0] - 1), table)
        if model.embedding_scale != 1.0:
            hidden_NH = hidden_NH * model.embedding_scale
        return hidden_NH

    def reserve(self, positions: int) -> None:
        """Compute the rotations of positions up to this number, once for all steps."""
        model = self.model[0]
        if not model.rotations or (self.tables and self.tables[0].shape[0] >= positions):
            return
        head, width = self.architecture.head_size, model.rotary_size
        index_1s = torch.arange(positions, device=self.device)[None]
        self.tables = []
        for rotation in model.rotations:
            angles_sr = rotary_angles(
                index_1s, rotary_size=width, base=rotation.base, scaling=rotation.scaling
            )[:, 0, 0]
            self.tables.append(
                rotary_table(angles_sr, head_size=head, dtype=self.dtype, paired=self.is_paired)
            )

    def _received(self, rows: int) -> Tensor:
        hidden_NH = torch.empty(
            (rows, self.architecture.hidden_size), dtype=self.dtype, device=self.device
        )
        is_from_last = self.groups.is_first_stage  # a further chunk of it
        group = self.groups.pipeline_back if is_from_last else self.groups.pipeline
        dist.recv(hidden_NH, group=group, group_src=(group.rank() - 1) % group.size())
        return hidden_NH

    def _send(self, hidden_NH: Tensor) -> None:
        """Send without waiting, so that a stage with other rows to run does not stand still."""
        is_to_first = self.groups.is_last_stage
        group = self.groups.pipeline_back if is_to_first else self.groups.pipeline
        hidden_NH = hidden_NH.contiguous()
        work = dist.isend(hidden_NH, group=group, group_dst=(group.rank() + 1) % group.size())
        assert work is not None
        self._hold(work, hidden_NH)

    def broadcast(self, values: Tensor) -> None:
        """Send the last stage's values to all stages; the last stage does not wait.

        Collective: `Groups.pipeline_back`, one broadcast of the tensor.
        """
        group = self.groups.pipeline_back
        is_source = self.groups.is_last_stage
        work = dist.broadcast(values, group=group, group_src=group.size() - 1, async_op=is_source)
        if is_source:
            self._hold(work, values)

    def _hold(self, work: dist.Work, tensor: Tensor) -> None:
        """Keep a tensor until it has arrived; the oldest is waited for where many are on their way.

        The stage after takes them in this order, and has all that it needs for the oldest.
        """
        self._sends = [(sent, part) for sent, part in self._sends if not sent.is_completed()]
        self._sends.append((work, tensor))
        while len(self._sends) > _SENDS_PER_STAGE * self.groups.pipeline.size():
            self._sends.pop(0)[0].wait()

    def finish(self) -> None:
        """Wait until everything that was sent has arrived."""
        for work, _ in self._sends:
            work.wait()
        self._sends.clear()


def _order(
    model: Sequence[HiddenStateGPT],
    architecture: Architecture,
    groups: Groups,
    copies: WeightCopies,
) -> Tensor | None:
    """Return `paired_order` where a CPU may copy the weights that make the heads; None elsewhere.

    Ranks that share a group of heads have slices of its rows, and none of whole heads.
    """
    layers = [layer for chunk in model for layer in chunk.decoder.layers]
    weights = [layer.self_attention.linear_qkv.weight for layer in layers]
    if not model[0].rotations or groups.tensor.size() > architecture.num_kv_heads:
        return None
    if not copies.reserve(weights, share=_PAIRED_SHARE):
        return None
    return paired_order(architecture.head_size, model[0].rotary_size)
