"""Log-probabilities of written ids by the forward pass of training, without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.generation.model import CachedGPT
from megatron_distill.models.gpt import hidden_for_head, run_model, vocab_shard
from megatron_distill.ops.target_scores import target_scores
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.segments import copied
from megatron_distill.signals import HiddenState
from megatron_distill.train.step import run_schedule

__all__ = ["forward_log_probs"]

# Lengths on a rank are multiples of it, as FP8 needs.
_LENGTH_MULTIPLE: Final = 8
_Ids = tuple[int, ...]


class _Read(NamedTuple):
    """A micro-batch of one text on this context rank, and its positions before written ids.

    number: of the text. rows: these positions among the rank's, ascending. places: of the ids in
    the written text.
    """

    number: int
    batch: Batch
    rows: list[int]
    places: list[int]
    ids: list[int]


@torch.no_grad()
def forward_log_probs(
    model: CachedGPT, texts: Sequence[tuple[_Ids, _Ids]]
) -> list[tuple[float, ...]]:
    """Return the log-probability of each written id of (prompt, written ids) pairs.

    Of the softmax of the logits at temperature one, uncut, as `Written.log_probs`. The modules run
    as in training, in the layout's schedule and with its sequence and context shards, but without
    dropout. Each text is a micro-batch; all replicas read all texts. Every prompt has an id.

    Collective: those of the schedule, and of `target_scores` per text on the last stage. At the end
    8 bytes per id of the longest text and text, over the context and the pipeline group.
    """
    if not texts:
        return []
    groups, device = model.groups, model.device
    longest = max(len(written) for _, written in texts)
    found = torch.zeros(len(texts), longest, dtype=torch.float64, device=device)
    reads = _micro_batches(model, texts)
    was_training = [chunk.training for chunk in model.chunks]
    for chunk in model.chunks:
        chunk.eval()
    try:
        reports = run_schedule(
            partial(_forward, model=model),
            model.chunks,
            reads,
            groups=groups,
            micro_batch_size=1,
            sequence_length=reads[0].batch.document_ids_bS.shape[1],
            forward_only=True,
            collect_outputs=True,
        )
    finally:
        for chunk, training in zip(model.chunks, was_training, strict=True):
            chunk.train(training)
    for read, log_probs_Q in zip(reads, reports, strict=False):  # none but on the last stage
        found[read.number, copied(torch.tensor(read.places, dtype=torch.int64), device)] = (
            log_probs_Q
        )
    if groups.context.size() > 1:
        dist.all_reduce(found, group=groups.context)
    if groups.pipeline.size() > 1:
        dist.broadcast(found, group=groups.pipeline, group_src=groups.pipeline.size() - 1)
    rows = zip(found.tolist(), texts, strict=True)
    return [tuple(row[: len(written)]) for row, (_, written) in rows]


def _micro_batches(model: CachedGPT, texts: Sequence[tuple[_Ids, _Ids]]) -> list[_Read]:
    """Return this rank's micro-batches of one length, as many as the schedule divides by stages."""
    groups, shape = model.groups, model.architecture
    context, stages = groups.context.size(), groups.pipeline.size()
    multiple = _LENGTH_MULTIPLE * (groups.layout.tensor if groups.layout.sequence else 1)
    multiple *= 2 * context if context > 1 else 1
    length = max(len(prompt) + len(written) - 1 for prompt, written in texts)
    length += -length % multiple
    last = shape.max_position_embeddings - 1 if shape.positions == "learned" else None
    reads = []
    # An interleaved schedule takes whole rounds; the added texts give what theirs gave already.
    for turn in range(len(texts) + -len(texts) % stages):
        number = turn % len(texts)
        prompt, written = texts[number]
        ids = (*prompt, *written)[:-1]
        tokens_1S = torch.tensor([[*ids, *[0] * (length - len(ids))]])
        whole = Batch.untrained(tokens_1S, last_position=last)
        own = whole.context_shard(groups.context.rank(), context)
        first = len(prompt) - 1  # the position that predicts the first written id
        rows = [
            (row, position - first)
            for row, position in enumerate(own.sequence_index_s.tolist())
            if first <= position < len(ids)
        ]
        places = [place for _, place in rows]
        reads.append(
            _Read(
                number,
                own.copied_to(model.device),
                [row for row, _ in rows],
                places,
                [written[place] for place in places],
            )
        )
    return reads


def _forward(
    iterator: Iterator[_Read], chunk: torch.nn.Module, *, model: CachedGPT
) -> tuple[Tensor, Callable[..., Any]]:
    read = next(iterator)
    hidden_sbh = run_model(chunk, read.batch, context_size=model.groups.context.size())
    return hidden_sbh, partial(_log_probs, model=model, read=read)


def _log_probs(hidden_sbh: Tensor, *, model: CachedGPT, read: _Read, non_loss_data: bool) -> Tensor:
    """Return the log-probabilities of the written ids after this rank's positions, fp64 [Q]."""
    assert non_loss_data
    groups, shape = model.groups, model.architecture
    state = HiddenState(
        hidden=hidden_for_head(hidden_sbh, groups=groups),
        weight=model.chunks[-1].head_weight().detach(),
        logit_softcap=shape.logit_softcap,
        logit_scale=shape.logit_scale,
    )
    found = target_scores(
        state,
        vocab_shard(shape, groups, tokens=model.vocab_size),
        groups.tensor,
        rows=read.rows,
        ids=copied(torch.tensor(read.ids, dtype=torch.int64), model.device),
    )
    return found.log_prob
