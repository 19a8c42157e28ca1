"""The next token's logits of a Megatron-Core model, in any layout without context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import HiddenStateGPT, hidden_for_head, run_model
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.schedule import run_schedule


@dataclass(frozen=True)
class NextToken:
    """Answers tokens with the logits of the token that follows, the same on every rank.

    To be called by all ranks together with the same tokens, so that each of them can choose the
    next token by itself. Raises ConfigError for a context-parallel layout.
    """

    model: HiddenStateGPT
    architecture: Architecture
    groups: Groups
    device: torch.device

    def __post_init__(self) -> None:
        if self.groups.layout.context > 1:
            raise ConfigError(
                f"parallel.context={self.groups.layout.context}: text is written without context "
                "parallelism; set parallel.context=1"
            )

    @torch.no_grad()
    def __call__(self, tokens_bs: Tensor) -> Tensor:
        """Return the logits [b, vocabulary] in fp32 that follow `tokens_bs` (int64).

        Collective: those of one forward pass; tensor group, one all-gather of the last token's
        logits; pipeline group, one broadcast of them.
        """
        length = tokens_bs.shape[1]
        batch = _whole_document(self._padded(tokens_bs)).to(self.device)
        outputs = run_schedule(
            _forward,
            [self.model],
            [batch],
            groups=self.groups,
            micro_batch_size=batch.tokens_bs.shape[0],
            sequence_length=batch.tokens_bs.shape[1],
            forward_only=True,
            collect_outputs=True,
        )
        logits_bV = torch.empty(
            (tokens_bs.shape[0], self.architecture.vocab_size),
            dtype=torch.float32,
            device=self.device,
        )
        if self.groups.is_last_stage:
            logits_bV = self._logits(outputs[0], last=length - 1, rows=tokens_bs.shape[0])
        if self.groups.pipeline.size() > 1:
            last_stage = self.groups.pipeline.size() - 1
            dist.broadcast(logits_bV, group=self.groups.pipeline, group_src=last_stage)
        return logits_bV

    def _padded(self, tokens_bs: Tensor) -> Tensor:
        """Lengthen the rows to what sequence parallelism can split; what is added comes after."""
        size = self.groups.layout.tensor if self.groups.layout.sequence else 1
        return torch.nn.functional.pad(tokens_bs, (0, -tokens_bs.shape[1] % size))

    def _logits(self, hidden_sbh: Tensor, *, last: int, rows: int) -> Tensor:
        hidden_NH = hidden_for_head(hidden_sbh, groups=self.groups)
        hidden_bH = hidden_NH.unflatten(0, (rows, -1))[:, last]
        logits_bV = (hidden_bH.float() @ self.model.head_weight().float().T).contiguous()
        shards = [torch.empty_like(logits_bV) for _ in range(self.groups.tensor.size())]
        dist.all_gather(shards, logits_bV, group=self.groups.tensor)
        whole_bG = torch.cat(shards, dim=-1)[:, : self.architecture.vocab_size]
        rule = LogitRule(self.architecture.logit_softcap, self.architecture.logit_scale)
        return rule.apply_(whole_bG.contiguous())


def _whole_document(tokens_bs: Tensor) -> Batch:
    rows, length = tokens_bs.shape
    nothing_trained = torch.zeros_like(tokens_bs, dtype=torch.bool)
    index_s = torch.arange(length)
    return Batch(
        tokens_bs=tokens_bs,
        labels_bs=tokens_bs,
        ce_mask_bs=nothing_trained,
        kd_mask_bs=nothing_trained,
        position_ids_bs=index_s.expand(rows, -1),
        document_ids_bS=torch.zeros_like(tokens_bs),
        sequence_index_s=index_s,
        sample_ids_b=torch.arange(rows),
        isolate_documents=False,
    )


def _forward(iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    return run_model(model, next(iterator), context_size=1), _keep


def _keep(output: Tensor, *, non_loss_data: bool) -> Tensor:
    assert non_loss_data
    return output
