"""Which teacher a store is of: a digest of what it computes, whatever layout or file holds it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.differences import model_fields
from megatron_distill.models.parameters import placed
from megatron_distill.models.weights import WindowReader
from megatron_distill.runtime.collectives import together
from megatron_distill.train.assemble_origin import Origin
from megatron_distill.train.checkpoint_import import Block, shares

_BLOCK_NUMBERS = 2**24  # a part of what is digested, so that it must not change


def teacher_digest(origin: Origin, *, seed: int, group: dist.ProcessGroup) -> str:
    """Return the digest of a model's weights as fp32 values by name, and of what it does with them.

    The same for every layout, and for a Hugging Face folder and a checkpoint made from it. Random
    weights are digested as `seed` and the architecture that they are drawn for. Reads all weights
    once, each rank of `group` its share. Raises CheckpointError on all ranks.

    Collective: `group`, two all-gathers of short objects (32 bytes per 2^24 numbers).
    """
    architecture = origin.architecture
    fields = model_fields(architecture)
    # Rotary models are the same for any length; learned positions are weights, with their shape.
    fields.pop("max_position_embeddings")
    if origin.open_weights is None:
        drawn = {"seed": seed, "init_std": architecture.init_std}
        if architecture.positions == "learned":
            drawn["positions"] = architecture.max_position_embeddings
        return _digest({"architecture": fields, "random": drawn})
    mine: dict[str, str] = {}
    with together(group=group):
        share = shares(list(_blocks(architecture)), group.size())[group.rank()]
        mine = _digests(origin, share)
    parts: list[dict[str, str]] = [{} for _ in range(group.size())]
    dist.all_gather_object(parts, mine, group=group)
    weights = {name: digest for part in parts for name, digest in part.items()}
    return _digest({"architecture": fields, "weights": weights})


def _digest(content: dict[str, object]) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _blocks(architecture: Architecture) -> Iterator[Block]:
    """Cut all tensors into blocks of rows, by their shapes alone."""
    for parameter, place in placed(architecture):
        most = max(1, _BLOCK_NUMBERS // torch.Size(parameter.shape[1:]).numel())
        for start in range(0, parameter.shape[0], most):
            rows = min(most, parameter.shape[0] - start)
            yield Block(parameter, place, torch.float32, start, rows)


def _digests(origin: Origin, blocks: list[Block]) -> dict[str, str]:
    assert origin.open_weights is not None
    windows = WindowReader(origin.open_weights())
    found = {}
    for block in blocks:
        key, place = block.parameter.key, block.place
        source_place = place
        if place and origin.keep_layers is not None:
            source_place = (origin.keep_layers[place[0]], *place[1:])
        start = (block.start, *(0 for _ in block.shape[1:]))
        window = windows.read(key, source_place, start, block.shape, block.dtype)
        content = window.contiguous().view(-1).view(torch.uint8).numpy()
        name = f"{key} {list(place)} {block.start} {list(block.shape)}"
        found[name] = hashlib.sha256(content.data).hexdigest()
    return found
