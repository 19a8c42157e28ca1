"""A model's architecture and the source of its weights: a seed, a folder or a checkpoint.

Two sources of the same weights have the same digest. It is made of one whole number per tensor, the
sum of a hash of each number and its place, so that ranks add up those of their parts.
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
from megatron_distill.models.weight_sums import window_sum
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
    "is_comparable",
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


_BLOCK_NUMBERS = 2**24  # of a tensor, read from a file at once
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

    Collective: `group`, one all-gather of a short object, one all-reduce of 8 bytes per tensor (of
    each layer and expert).
    """
    architecture = source.architecture
    if source.open_weights is None:
        drawn = {"seed": seed, "init_std": architecture.init_std}
        if architecture.positions == "learned":
            drawn["positions"] = architecture.max_position_embeddings
        return _digest({"architecture": _fields(architecture), "random": drawn})
    sums = torch.zeros(len(_numbers(architecture)), dtype=torch.int64)
    with together(group=group):
        share = blocks_by_rank(list(_blocks(architecture)), group.size())[group.rank()]
        _add_blocks(sums, source, share)
    return _digest_of_sums(architecture, sums, group)


@torch.no_grad()
def live_digest(
    chunks: Sequence[HiddenStateGPT], architecture: Architecture, *, groups: Groups
) -> str:
    """Return the digest of weights as the ranks hold them: that of `teacher_digest` once saved.

    The same in every layout, for models whose chunks are whole (without `shard_weights`). No weight
    is moved, and the host waits for the device once.

    Collective: world, one all-reduce of 8 bytes per tensor (of each layer and expert).
    """
    numbers = _numbers(architecture)
    shapes = [parameter.shape for parameter, _ in placed(architecture)]
    device = next(chunks[0].parameters()).device
    sums = torch.zeros(len(numbers), dtype=torch.int64, device=device)
    for key, place, part in own_parts(chunks, groups):
        assert part.data is not None
        assert part.flattened_range is None
        number, start = numbers[key, place], part.global_offset[part.prepend_axis_num :]
        sums[number] += window_sum(part.data, start=start, shape=shapes[number])
    return _digest_of_sums(architecture, sums, groups.world)


def _digest_of_sums(architecture: Architecture, sums: Tensor, group: dist.ProcessGroup) -> str:
    """Return the digest of a model from each rank's part of the sums of its tensors."""
    if group.size() > 1:
        device = "cpu" if dist.get_backend(group) == "gloo" else torch.device("cuda")
        sums = sums.to(device)
        dist.all_reduce(sums, group=group)
    named = {
        f"{parameter.key} {list(place)} {list(parameter.shape)}": number
        for (parameter, place), number in zip(placed(architecture), sums.tolist(), strict=True)
    }
    return _digest({"architecture": _fields(architecture), "sums": named})


def _numbers(architecture: Architecture) -> dict[tuple[str, LayerIndex], int]:
    """Return the number of each tensor of a model, in the order of `placed`, by name and place."""
    return {(one.key, place): number for number, (one, place) in enumerate(placed(architecture))}


def _fields(architecture: Architecture) -> dict[str, object]:
    """Return what of an architecture is in a digest."""
    fields = model_fields(architecture)
    for name, default in _LATER_FIELDS.items():
        if fields.get(name, default) == default:
            fields.pop(name, None)
    # A rotary model is the same for any length; learned positions are weights and have a shape.
    fields.pop("max_position_embeddings")
    return fields


def _digest(content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return f"v2:{hashlib.sha256(text.encode()).hexdigest()}"


def is_comparable(digest: str) -> bool:
    """Whether a stored digest of a teacher is of this form; the first one began with sha256."""
    return not digest.startswith("sha256:")


def _blocks(architecture: Architecture) -> Iterator[TensorRows]:
    """Cut all tensors into blocks of rows, by their shapes alone."""
    for parameter, place in placed(architecture):
        most = max(1, _BLOCK_NUMBERS // torch.Size(parameter.shape[1:]).numel())
        for start in range(0, parameter.shape[0], most):
            rows = min(most, parameter.shape[0] - start)
            yield TensorRows(parameter, place, torch.float32, start, rows)


def _add_blocks(sums: Tensor, source: ModelSource, blocks: list[TensorRows]) -> None:
    """Read blocks of rows and add their hashes to the sums of their tensors, int64 [tensors]."""
    assert source.open_weights is not None
    windows = WindowReader(source.open_weights())
    numbers = _numbers(source.architecture)
    for block in blocks:
        key, place = block.parameter.key, block.place
        source_place = place
        if place and source.keep_layers is not None:
            source_place = (source.keep_layers[place[0]], *place[1:])
        start = (block.start, *(0 for _ in block.shape[1:]))
        window = windows.read(key, source_place, start, block.shape, block.dtype)
        sums[numbers[key, place]] += window_sum(window, start=start, shape=block.parameter.shape)
