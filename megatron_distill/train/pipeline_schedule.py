"""Megatron-Core's pipeline schedules behind one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_distill.runtime.groups import Groups

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[Tensor, Callable[..., Any]]]


def run_schedule(
    forward_step: ForwardStep,
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    *,
    groups: Groups,
    micro_batch_size: int,
    sequence_length: int,
    forward_only: bool = False,
    collect_outputs: bool = False,
) -> list[Any]:
    """Run the stock schedule that fits the chunks: no pipeline, 1F1B, or interleaved.

    `forward_step(iterator, chunk)` takes its item from the iterator over `micro_batches`; each
    model chunk has a separate iterator. Returns the loss function's report per micro-batch
    on the last stage, an empty list elsewhere. With `collect_outputs` the loss function is called
    as `loss_function(output, non_loss_data=True)`.

    Collective: pipeline group, one send and one receive of [s, b, h] per micro-batch, stage
    boundary and direction; plus those of the models and of the loss function.
    """
    schedule = get_forward_backward_func(
        pp_size=groups.pipeline.size(), vp_size=len(chunks) if len(chunks) > 1 else None
    )
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=sequence_length,
        micro_batch_size=micro_batch_size,
        decoder_seq_length=sequence_length,
        forward_only=forward_only,
        collect_non_loss_data=collect_outputs,
    )
