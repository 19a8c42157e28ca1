"""A model's architecture and the source of its weights: a seed, a folder or a checkpoint.

Two sources of the same weights have the same digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture, model_fields
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import HiddenStateGPT, build_gpt
from megatron_distill.models.hugging_face.description import ModelDescription
from megatron_distill.models.hugging_face.family import family_named
from megatron_distill.models.hugging_face.model import describe_checked
from megatron_distill.models.parameters import LayerIndex, placed
from megatron_distill.models.sharded_weights import build_sharded, shard_ranks
from megatron_distill.models.weights import (
    WeightSource,
    WindowReader,
    fill,
    initialise_part,
    own_parts,
    read_part,
)
from megatron_distill.runtime.collectives import from_first_rank, together
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.convert.stream import TensorRows, blocks_by_rank

__all__ = [
    "ModelSource",
    "describe_on_first_rank",
    "live_digest",
    "teacher_digest",
]


_LOGGER = get_logger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model's architecture and the source of its weights; `open_weights` None: random ones.

    keep_layers: the layers of the source that the model has; None: all.
    """

    architecture: Architecture
    open_weights: Callable[[], WeightSource] | None = None
    keep_layers: tuple[int, ...] | None = None

    def build(
        self, execution: Execution, *, groups: Groups, seed: int, interleaved: bool = True
    ) -> list[HiddenStateGPT]:
        """Build this rank's chunks with the source's weights, or random ones of `seed`.

        With `execution.weight_shards` one frozen chunk, sharded where several ranks have the same
        weights. Raises CheckpointError on all ranks.
        """
        if execution.weight_shards is not None:
            if max(shard_ranks(groups)) > 1:
                return [self._build_sharded(execution, groups=groups, seed=seed)]
            if groups.world.rank() == 0:
                _LOGGER.warning(
                    "shard_weights = true has no effect where no two ranks have the same weights"
                )
            execution = replace(execution, weight_shards=None)
        chunks = build_gpt(
            self.architecture,
            groups=groups,
            execution=execution,
            seed=seed if self.open_weights is None else None,
            interleaved=interleaved,
        )
        if self.open_weights is not None:
            with together():
                fill(chunks, self.open_weights(), groups=groups, keep_layers=self.keep_layers)
        return chunks

    def _build_sharded(self, execution: Execution, *, groups: Groups, seed: int) -> HiddenStateGPT:
        chunk: HiddenStateGPT | None = None
        with together():
            if self.open_weights is None:
                write = partial(initialise_part, architecture=self.architecture, seed=seed)
            else:
                source = self.open_weights()
                write = partial(read_part, source=source, keep_layers=self.keep_layers)
            chunk = build_sharded(
                self.architecture, groups=groups, execution=execution, write=write
            )
        assert chunk is not None, "its error has been raised"
        return chunk


def describe_on_first_rank(folder: Path) -> ModelDescription:
    """Return the result of `describe_checked`, read on one rank; raises on all ranks.

    Collective: world, one broadcast of a short object.
    """

    def plain() -> tuple[str, dict[str, object]]:
        described = describe_checked(folder)
        return described.family.model_type, described.architecture.as_dict()

    model_type, fields = from_first_rank(plain)
    family = family_named(model_type, where=str(folder))
    return ModelDescription(family, Architecture.from_dict(fields))


_BLOCK_NUMBERS = 2**24  # a part of the digest, so it must not change
# Fields that are in the digest only where they are not at these values, so that digests of models
# without them stay as they were.
_LATER_FIELDS: dict[str, object] = {
    "moe.dense_layers": (),
    "moe.shared_ffn_hidden_size": None,
    "moe.shared_gate": False,
    "moe.score": "softmax",
    "moe.correction_bias": False,
    "moe.groups": None,
    "moe.groups_per_token": None,
    "moe.weight_scale": 1.0,
}


def teacher_digest(source: ModelSource, *, seed: int, group: dist.ProcessGroup) -> str:
    """Return the digest of a model's weights as named fp32 values, and of its architecture.

    The same for every layout, and for a Hugging Face folder and a checkpoint made from it. Random
    weights are digested as `seed` and their architecture. Reads all weights
    once, each rank of `group` its share. Raises CheckpointError on all ranks.

    Collective: `group`, two all-gathers of short objects (32 bytes per 2^24 numbers).
    """
    architecture = source.architecture
    fields = _fields(architecture)
    if source.open_weights is None:
        drawn = {"seed": seed, "init_std": architecture.init_std}
        if architecture.positions == "learned":
            drawn["positions"] = architecture.max_position_embeddings
        return _digest({"architecture": fields, "random": drawn})
    own: dict[str, str] = {}
    with together(group=group):
        share = blocks_by_rank(list(_blocks(architecture)), group.size())[group.rank()]
        own = _digests(source, share)
    return _digest_of_all(fields, own, group)


@torch.no_grad()
def live_digest(
    chunks: Sequence[HiddenStateGPT], architecture: Architecture, *, groups: Groups
) -> str:
    """Return the digest of weights as the ranks hold them: that of `teacher_digest` once saved.

    The same in every layout, for models whose chunks are whole (without `shard_weights`). One block
    of 2^24 numbers at a time is laid together, and digested by one rank.

    Collective: world, per block a reduction to one rank (4 bytes per number), one all-gather of
    short objects.
    """
    world = groups.world
    parts: dict[tuple[str, LayerIndex], list[ShardedTensor]] = {}
    for key, place, part in own_parts(chunks, groups):
        parts.setdefault((key, place), []).append(part)
    blocks = list(_blocks(architecture))
    by_rank = blocks_by_rank(blocks, world.size())
    owners = [rank for rank, share in enumerate(by_rank) for _ in share]
    device = next(chunks[0].parameters()).device
    own: dict[str, str] = {}
    for block, owner in zip(blocks, owners, strict=True):
        # As whole numbers, whose sum with zeros keeps every bit.
        bits = torch.zeros(block.shape, dtype=torch.int32, device=device)
        for part in parts.get((block.parameter.key, block.place), ()):
            _lay(part, block, bits)
        if world.size() > 1:
            dist.reduce(bits, group=world, group_dst=owner)
        if world.rank() == owner:
            own[_name(block)] = _sha256(bits)
    return _digest_of_all(_fields(architecture), own, world)


def _lay(part: ShardedTensor, block: TensorRows, bits: Tensor) -> None:
    """Copy the numbers of a part that are in a block to their places, as bits of fp32."""
    assert part.data is not None
    assert part.flattened_range is None
    row, *columns = part.global_offset[part.prepend_axis_num :]
    first, last = max(row, block.start), min(row + part.data.shape[0], block.start + block.rows)
    if first >= last:
        return
    wide = zip(columns, part.data.shape[1:], strict=True)
    window = (slice(first - block.start, last - block.start), *(slice(a, a + n) for a, n in wide))
    values = part.data[first - row : last - row].float().contiguous()
    bits[window].copy_(values.view(torch.int32))


def _fields(architecture: Architecture) -> dict[str, object]:
    """Return what of an architecture is in a digest."""
    fields = model_fields(architecture)
    for name, default in _LATER_FIELDS.items():
        if fields.get(name, default) == default:
            fields.pop(name, None)
    # A rotary model is the same for any length; learned positions are weights and have a shape.
    fields.pop("max_position_embeddings")
    return fields


def _digest_of_all(fields: dict[str, object], own: dict[str, str], group: dist.ProcessGroup) -> str:
    """Return the digest of a model from those of all ranks' blocks."""
    parts: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(parts, own, group=group)
    weights = {name: digest for part in parts for name, digest in part.items()}
    return _digest({"architecture": fields, "weights": weights})


def _digest(content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _blocks(architecture: Architecture) -> Iterator[TensorRows]:
    """Cut all tensors into blocks of rows, by their shapes alone."""
    for parameter, place in placed(architecture):
        most = max(1, _BLOCK_NUMBERS // torch.Size(parameter.shape[1:]).numel())
        for start in range(0, parameter.shape[0], most):
            rows = min(most, parameter.shape[0] - start)
            yield TensorRows(parameter, place, torch.float32, start, rows)


def _digests(source: ModelSource, blocks: list[TensorRows]) -> dict[str, str]:
    assert source.open_weights is not None
    windows = WindowReader(source.open_weights())
    found = {}
    for block in blocks:
        key, place = block.parameter.key, block.place
        source_place = place
        if place and source.keep_layers is not None:
            source_place = (source.keep_layers[place[0]], *place[1:])
        start = (block.start, *(0 for _ in block.shape[1:]))
        window = windows.read(key, source_place, start, block.shape, block.dtype)
        found[_name(block)] = _sha256(window)
    return found


def _name(block: TensorRows) -> str:
    return f"{block.parameter.key} {list(block.place)} {block.start} {list(block.shape)}"


def _sha256(values: Tensor) -> str:
    content = values.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.sha256(content.data).hexdigest()
