"""Digests of the texts that figures are of: equal ones are the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_distill.runtime.batch import Batch, StepBatches
from megatron_distill.runtime.groups import Groups

__all__ = ["hash_of_held_out", "hash_of_ids"]


class _Part(NamedTuple):
    """This rank's positions ``[s]`` of a sample: where they are, tokens, labels and weights."""

    sample: int
    places: NDArray[np.int64]
    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float32]


def hash_of_ids(texts: Sequence[Sequence[Sequence[int]]]) -> str:
    """Return the digest of texts in their order, each of several parts, as prompt and answer."""
    found = hashlib.sha256()
    for text in texts:
        for ids in text:
            found.update(np.int64(len(ids)).tobytes())
            found.update(np.array(ids, "<i4").tobytes())
    return f"sha256:{found.hexdigest()}"


def hash_of_held_out(steps: Sequence[StepBatches], groups: Groups) -> str:
    """Return the digest of held-out samples in their order: tokens, labels and their weights.

    The same in every layout and on every rank. The batches of a step are whole for a moment.

    Collective: context group, per step one all-gather of 28 bytes per position. Data x context
    group, at the end one of 40 bytes per sample.
    """
    own: dict[int, bytes] = {}
    for step in steps:
        parts = [part for batch in step.micro_batches for part in _parts(batch.on_host)]
        shared: list[list[_Part] | None] = [parts]
        if groups.context.size() > 1:
            shared = [None] * groups.context.size()
            dist.all_gather_object(shared, parts, group=groups.context)
        # The ranks of a group have the same samples in the same order.
        for pieces in zip(*(one for one in shared if one is not None), strict=True):
            # A sample without weight may fill up a batch, and counts as no text.
            if any(piece.weights.any() for piece in pieces):
                own[pieces[0].sample] = _digest(pieces)
    everywhere: list[dict[int, bytes] | None] = [None] * groups.data_context.size()
    dist.all_gather_object(everywhere, own, group=groups.data_context)
    merged = {sample: found for part in everywhere if part for sample, found in part.items()}
    whole = hashlib.sha256(b"".join(merged[sample] for sample in sorted(merged)))
    return f"sha256:{whole.hexdigest()}"


def _parts(batch: Batch) -> Iterator[_Part]:
    places = batch.sequence_index_s.numpy()
    columns = (batch.tokens_bs, batch.labels_bs, batch.kd_weights_bs.to(torch.float32))
    rows = zip(batch.sample_ids_b.tolist(), *(one.numpy() for one in columns), strict=True)
    for sample, tokens, labels, weights in rows:
        yield _Part(sample, places, tokens, labels, weights)


def _digest(pieces: Sequence[_Part]) -> bytes:
    order = np.concatenate([piece.places for piece in pieces]).argsort()
    tokens, labels, weights = (
        np.concatenate([getattr(piece, name) for piece in pieces])[order]
        for name in ("tokens", "labels", "weights")
    )
    found = hashlib.sha256(tokens.astype("<i8").tobytes())
    found.update(labels.astype("<i8").tobytes())
    found.update(weights.astype("<f4").tobytes())
    return found.digest()
