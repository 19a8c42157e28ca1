"""The stored values of a teacher's distributions, from hidden states, on vocabulary shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_distill.data.samples import Sample
from megatron_distill.ops import LogitRule, VocabShard
from megatron_distill.ops.frozen_head import OutputChunk, output_chunks, row_statistics
from megatron_distill.ops.topk import gather_ranks, select
from megatron_distill.ops.workspace import accumulation_dtype, chunk_tokens_for
from megatron_distill.runtime.batch import Batch, zigzag_index
from megatron_distill.signals import HiddenState
from megatron_distill.store import (
    CaptureSettings,
    DrawnEntries,
    PositionScalars,
    SampleRecord,
    TopKEntries,
    cut_to_mass,
)
from megatron_distill.store.sampling import draw_at, uniforms


@dataclass(frozen=True)
class CapturedPositions:
    """Stored values of positions: [N] of a rank, or [b, S] of whole sequences.

    integers [.., I] int32: the ids, followed by their draw counts if they were drawn.
    floats [.., F] fp32, columns in this order: log-sum-exp at temperature one and at each further
    one, entropy, label's log-probability; of a top-k also the log tail at each temperature, and the
    ids' log-probabilities.
    """

    integers: Tensor
    floats: Tensor

    def whole(self, batch: Batch, group: dist.ProcessGroup) -> CapturedPositions:
        """Return the values of whole sequences [b, S], the zig-zag of context ranks undone.

        Collective: `group`, two all-gathers of 4 bytes per number, where it has several ranks.
        """
        count, length = batch.tokens_bs.shape
        return CapturedPositions(
            *(
                _whole_sequences(values.view(count, length, -1), group)
                for values in (self.integers, self.floats)
            )
        )

    def on_host(self) -> CapturedPositions:
        """Return a copy in host memory."""
        return CapturedPositions(self.integers.cpu(), self.floats.cpu())


def _whole_sequences(values_bsC: Tensor, group: dist.ProcessGroup) -> Tensor:
    size = group.size()
    if size == 1:
        return values_bsC
    parts = gather_ranks(values_bsC, group)
    joined = torch.cat(parts.unbind(), dim=1)
    order = [
        zigzag_index(joined.shape[1], rank=rank, size=size, device=joined.device)
        for rank in range(size)
    ]
    whole = torch.empty_like(joined)
    whole[:, torch.cat(order)] = joined
    return whole


@dataclass(frozen=True)
class PositionCapture:
    """Turns a teacher's hidden states into stored values; logits exist for one token chunk only.

    Attributes:
        settings: of the capture.
        shard: this rank's columns.
        group: the ranks that hold the remaining columns.
        chunk_tokens: tokens whose logits exist at one time; None: the objective's default.
    """

    settings: CaptureSettings
    shard: VocabShard
    group: dist.ProcessGroup
    chunk_tokens: int | None = None

    @torch.no_grad()
    def __call__(self, state: HiddenState, batch: Batch) -> CapturedPositions:
        """Return the stored values of this rank's positions [N], in (b, s) order.

        A top-k's values are bitwise equal to the objective's selection from a live teacher, for the
        same micro-batch and layout.

        Collective: tensor group, per chunk those of `row_statistics` and of `select` or `draw_at`.
        """
        assert batch.trained_rows_n is not None
        rule = state.rule
        labels, device = batch.labels_bs.reshape(-1), state.hidden.device
        keep = self._keep_top_k
        if self.settings.mode == "sampled":
            keep = partial(self._keep_draws, fractions=_fractions(batch, self.settings))
        found: CapturedPositions | None = None
        for chunk in output_chunks(
            state,
            batch.trained_rows_n,
            chunk_tokens=self.chunk_tokens or chunk_tokens_for(self.shard.width, device),
            columns=self.shard.real_width,
        ):
            part = keep(chunk, rule, labels[chunk.rows])
            if found is None:
                found = CapturedPositions(
                    *(one.new_empty(len(labels), one.shape[1]) for one in vars(part).values())
                )
            found.integers[chunk.rows] = part.integers
            found.floats[chunk.rows] = part.floats
        assert found is not None, "a micro-batch has positions"
        return found

    def _keep_top_k(self, chunk: OutputChunk, rule: LogitRule, labels: Tensor) -> CapturedPositions:
        further = self.settings.temperatures
        statistics = row_statistics(
            chunk.raw, rule, self.shard, self.group, labels=labels, temperatures=further
        )
        kept = select(
            chunk.raw,
            rule,
            self.shard,
            self.group,
            k=self.settings.k,
            temperatures=(1.0, *further),
        )
        rows = [*statistics.log_sum_exp, statistics.entropy, statistics.label_log_prob]
        rows += [one.log_tail for one in kept]
        floats = torch.cat([torch.stack([row.float() for row in rows], 1), kept[0].log_probs], 1)
        return CapturedPositions(kept[0].ids.int(), floats)

    def _keep_draws(
        self, chunk: OutputChunk, rule: LogitRule, labels: Tensor, *, fractions: Tensor
    ) -> CapturedPositions:
        statistics = row_statistics(chunk.raw, rule, self.shard, self.group, labels=labels)
        dtype = accumulation_dtype(chunk.raw.dtype)
        log_probs = rule.apply_(chunk.raw.to(dtype, copy=True))
        log_probs.sub_(statistics.log_sum_exp[0].to(dtype).unsqueeze(1))
        ids, counts = draw_at(log_probs, fractions[chunk.rows.cpu()], self.shard, self.group)
        rows = [*statistics.log_sum_exp, statistics.entropy, statistics.label_log_prob]
        floats = torch.stack([row.float() for row in rows], 1)
        return CapturedPositions(torch.cat([ids, counts], 1).to(floats.device), floats)


def _fractions(batch: Batch, settings: CaptureSettings) -> Tensor:
    """Return uniform numbers [N, M] for this rank's positions, from sample id and position."""
    assert settings.sampling_seed is not None
    batch = batch.on_host
    length = batch.document_ids_bS.shape[1]
    of_samples = [
        uniforms(
            seed=settings.sampling_seed,
            sample_id=max(0, sample_id),  # negative ids are not stored
            first=0,
            positions=length,
            draws=settings.k,
        )
        for sample_id in batch.sample_ids_b.tolist()
    ]
    return torch.cat([numbers[batch.sequence_index_s] for numbers in of_samples])


def build_records(
    samples: Sequence[Sample], found: CapturedPositions, settings: CaptureSettings
) -> Iterator[SampleRecord]:
    """Yield the records of a micro-batch's samples; rows without a sample have none.

    `found` is of whole sequences, on the host.
    """
    integers, floats = found.integers.numpy(), found.floats.numpy()
    for row, sample in enumerate(samples):
        if sample.sample_id < 0:
            continue
        record = _record(sample, integers[row], floats[row], settings)
        yield record if settings.top_p is None else cut_to_mass(record, settings.top_p)


def _record(
    sample: Sample,
    integers_SI: NDArray[np.int32],
    floats_SF: NDArray[np.float32],
    settings: CaptureSettings,
) -> SampleRecord:
    further = len(settings.temperatures)
    columns = np.ascontiguousarray(floats_SF[:, : 2 * (1 + further) + 2].T)
    sums, (entropy, label) = columns[: 1 + further], columns[1 + further : 3 + further]
    ids = np.ascontiguousarray(integers_SI[:, : settings.k])
    entries: TopKEntries | DrawnEntries
    if settings.mode == "sampled":
        entries = DrawnEntries(ids, np.ascontiguousarray(integers_SI[:, settings.k :]))
    else:
        tails = columns[3 + further :]
        entries = TopKEntries(
            ids_SK=ids,
            log_probs_SK=np.ascontiguousarray(floats_SF[:, -settings.k :]),
            log_tail_S=tails[0],
            temperatures=settings.temperatures,
            log_sum_exp_TS=sums[1:] if further else None,
            log_tail_TS=tails[1:] if further else None,
        )
    return SampleRecord(
        sample_id=sample.sample_id,
        tokens_S1=sample.tokens_S1,
        document_ids_S1=sample.document_ids_S1,
        flags_S1=sample.flags_S1,
        entries=entries,
        scalars=PositionScalars(sums[0], entropy, label),
    )
