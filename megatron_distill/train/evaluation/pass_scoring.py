"""The scorer of models with sharded weights, which are whole only within a pass of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.evaluation.requests import Interrupted, Request, Score
from megatron_distill.evaluation.score_batches import RankBatch, scored_rows, waves_of
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import HiddenStateGPT, hidden_for_head, run_model
from megatron_distill.ops import VocabShard
from megatron_distill.ops.target_scores import target_scores
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.collectives import any_rank
from megatron_distill.runtime.groups import Groups
from megatron_distill.runtime.segments import copied
from megatron_distill.signals import HiddenState
from megatron_distill.train.step import run_schedule

__all__ = ["PassScorer"]

# Lengths are multiples of it, so that kernels see few shapes.
_LENGTH_MULTIPLE: Final = 8


@dataclass(frozen=True)
class PassScorer:
    """Scores answers with passes of the model's modules over whole sequences; see `Scorer`.

    A model whose layers are sharded over its replicas gathers them in these passes, and has no
    cache. The data-parallel and the context-parallel ranks share the rows, each with whole
    sequences, and all run the same number of micro-batches of the same shape. The head is applied
    to the answers' positions alone.

    Attributes:
        chunk: the model in evaluation mode, as this rank holds it.
        shard: the columns of this rank's rows of the output head.
        positions: longest input in tokens.
        batch_tokens: tokens of one micro-batch.
        stop_requested: whether this rank has been asked to stop.
    """

    chunk: HiddenStateGPT
    architecture: Architecture
    shard: VocabShard
    groups: Groups
    device: torch.device
    positions: int
    batch_tokens: int
    stop_requested: Callable[[], bool] = lambda: False

    def score(
        self, requests: Sequence[Request], *, advanced: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Return the scores; see `Scorer`.

        Collective: those of the schedule, and of `target_scores` per micro-batch on the last stage.
        Per wave of micro-batches one all-reduce of 8 bytes in the world. At the end 16 bytes per
        request, reduced over data and context ranks and broadcast over the pipeline.
        """
        groups, device = self.groups, self.device
        stages, ranks = groups.pipeline.size(), groups.data_context
        rows = scored_rows(requests, self.positions)
        multiple = math.lcm(_LENGTH_MULTIPLE, groups.layout.tensor if groups.layout.sequence else 1)
        found = torch.zeros(len(requests), 2, dtype=torch.float64, device=device)
        waves = waves_of(
            rows,
            ranks=ranks.size(),
            # With pipeline stages, twice as many as stages: they work at the same time.
            micro_batches=1 if stages == 1 else 2 * stages,
            tokens=self.batch_tokens,
            multiple=multiple,
        )
        done = 0
        for wave in waves:
            if any_rank(self.stop_requested(), device=device, group=groups.world):
                raise Interrupted
            self._add(found, wave.of_rank(ranks.rank()))
            done += len(wave.rows)
            if advanced is not None:
                advanced(done * len(requests) // len(rows))
        return self._shared(found, [len(request.answer) for request in requests])

    def _shared(self, found_R2: Tensor, lengths: Sequence[int]) -> list[Score]:
        """Share the sums of all ranks: log-probabilities, and tokens that are not greedy."""
        groups = self.groups
        if groups.data_context.size() > 1:
            dist.all_reduce(found_R2, group=groups.data_context)
        if groups.pipeline.size() > 1:
            last = groups.pipeline.size() - 1
            dist.broadcast(found_R2, group=groups.pipeline, group_src=last)
        pairs = found_R2.tolist()
        assert len(pairs) == len(lengths), (len(pairs), len(lengths))
        return [Score(log_prob, not misses) for log_prob, misses in pairs]

    @torch.no_grad()
    def _add(self, found_R2: Tensor, batches: Sequence[RankBatch]) -> None:
        """Run one wave and add its scores to those of their requests."""
        groups = self.groups
        sequences, length = batches[0].tokens_bs.shape
        reports = run_schedule(
            self._forward,
            [self.chunk],
            batches,
            groups=groups,
            micro_batch_size=sequences,
            # The schedule divides by the context ranks, which here have whole sequences.
            sequence_length=length * groups.context.size(),
            forward_only=True,
            collect_outputs=True,
        )
        for requests_Q, scores_Q2 in reports:
            found_R2.index_add_(0, requests_Q, scores_Q2)

    def _forward(
        self, iterator: Iterator[RankBatch], chunk: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor]]]:
        batch = next(iterator)
        tokens_bs = torch.from_numpy(batch.tokens_bs)
        shape = self.architecture
        # Padding beyond learned positions takes the last one.
        last = shape.max_position_embeddings - 1 if shape.positions == "learned" else None
        inputs = Batch.untrained(tokens_bs, last_position=last).copied_to(self.device)
        return run_model(chunk, inputs, context_size=1), partial(self._scores, batch=batch)

    def _scores(
        self, hidden_sbh: Tensor, *, batch: RankBatch, non_loss_data: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the request of each scored id, and its log-probability and whether it is a miss.

        Shapes: int64 [Q] and fp64 [Q, 2].
        """
        assert non_loss_data
        device = self.device
        positions, place = np.unique(batch.flat, return_inverse=True)
        hidden_NH = hidden_for_head(hidden_sbh, groups=self.groups)
        shape = self.architecture
        state = HiddenState(
            hidden=hidden_NH[copied(torch.from_numpy(positions), device)],
            weight=self.chunk.head_weight().detach(),
            logit_softcap=shape.logit_softcap,
            logit_scale=shape.logit_scale,
        )
        found = target_scores(
            state,
            self.shard,
            self.groups.tensor,
            rows=place.tolist(),
            ids=copied(torch.from_numpy(batch.ids), device),
        )
        scores_Q2 = torch.stack((found.log_prob, (~found.is_greedy).double()), 1)
        return copied(torch.from_numpy(batch.requests), device), scores_Q2
