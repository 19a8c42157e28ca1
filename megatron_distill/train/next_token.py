"""Logits of a Megatron-Core model for inspection, in any layout without context parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import HiddenStateGPT, hidden_for_head, run_model
from megatron_distill.ops import LogitRule
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.train.step import run_schedule


@torch.no_grad()
def logits_after(
    model: HiddenStateGPT,
    tokens_bs: Tensor,
    *,
    positions: slice,
    architecture: Architecture,
    groups: Groups,
    device: torch.device,
    vocab_size: int | None = None,
) -> Tensor:
    """Return the logits [b, positions, vocabulary] in fp32 behind some positions, on every rank.

    For inspection, not for training: the logits are whole here. `vocab_size`: ids of the tokenizer;
    the columns of further rows are left out. None: all rows of the model.

    Collective: those of one forward pass; tensor group, one all-gather of the logits; pipeline
    group, one broadcast of them.
    """
    batch = Batch.untrained(_padded(tokens_bs, groups)).to(device)
    outputs = run_schedule(
        _forward,
        [model],
        [batch],
        groups=groups,
        micro_batch_size=batch.tokens_bs.shape[0],
        sequence_length=batch.tokens_bs.shape[1],
        forward_only=True,
        collect_outputs=True,
    )
    wanted = len(range(*positions.indices(tokens_bs.shape[1])))
    logits_bpG = torch.empty(
        (tokens_bs.shape[0], wanted, vocab_size or architecture.vocab_size),
        dtype=torch.float32,
        device=device,
    )
    if groups.is_last_stage:
        hidden_NH = hidden_for_head(outputs[0], groups=groups)
        hidden_bpH = hidden_NH.unflatten(0, (tokens_bs.shape[0], -1))[:, positions]
        whole_bpG = _whole_logits(model, hidden_bpH[:, :wanted], architecture, groups)
        logits_bpG = whole_bpG[..., : logits_bpG.shape[-1]].contiguous()
    if groups.pipeline.size() > 1:
        last_stage = groups.pipeline.size() - 1
        dist.broadcast(logits_bpG, group=groups.pipeline, group_src=last_stage)
    return logits_bpG


def _padded(tokens_bs: Tensor, groups: Groups) -> Tensor:
    """Pad the rows at the end to a length that sequence parallelism can split."""
    size = groups.layout.tensor if groups.layout.sequence else 1
    return torch.nn.functional.pad(tokens_bs, (0, -tokens_bs.shape[1] % size))


def _whole_logits(
    model: HiddenStateGPT, hidden_bpH: Tensor, architecture: Architecture, groups: Groups
) -> Tensor:
    logits_bpV = (hidden_bpH.float() @ model.head_weight().float().T).contiguous()
    shards = [torch.empty_like(logits_bpV) for _ in range(groups.tensor.size())]
    dist.all_gather(shards, logits_bpV, group=groups.tensor)
    whole_bpG = torch.cat(shards, dim=-1)[..., : architecture.vocab_size]
    rule = LogitRule(architecture.logit_softcap, architecture.logit_scale)
    return rule.apply_(whole_bpG.contiguous())


def _forward(iterator: Iterator[Batch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    return run_model(model, next(iterator), context_size=1), _as_output


def _as_output(output: Tensor, *, non_loss_data: bool) -> Tensor:
    assert non_loss_data
    return output
