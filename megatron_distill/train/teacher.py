"""The live teacher: frozen, in the student's ranks, heard before the student's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_distill.models.architecture import Architecture
from megatron_distill.models.gpt import HiddenStateGPT, hidden_for_head, run_model
from megatron_distill.runtime.batch import Batch
from megatron_distill.runtime.groups import Groups
from megatron_distill.signals import HiddenState
from megatron_distill.train.schedule import run_schedule


@dataclass(frozen=True)
class OnlineTeacher:
    """A frozen model that answers each micro-batch with its final hidden state and its head shard.

    The hidden states of a whole step are kept on the last stage, in the layout in which the model
    leaves them (the sequence split under sequence parallelism); no logits are.
    """

    model: HiddenStateGPT
    architecture: Architecture
    head_weight: Tensor | None  # rows of the student's vocabulary shard; on the last stage only
    groups: Groups
    sequence_length: int

    @torch.no_grad()
    def signals(self, batches: Sequence[Batch]) -> Sequence[HiddenState] | Sequence[None]:
        """Return one signal per micro-batch on the last pipeline stage, None elsewhere.

        Collective: the forward half of `run_schedule`, then per micro-batch one all-gather of the
        hidden state in the tensor group under sequence parallelism, when the signal is built.
        """
        context_size = self.groups.context.size()
        outputs = run_schedule(
            partial(_forward, context_size=context_size),
            [self.model],
            list(enumerate(batches)),
            groups=self.groups,
            micro_batch_size=batches[0].tokens_bs.shape[0],
            sequence_length=self.sequence_length,
            forward_only=True,
            collect_outputs=True,
        )
        if self.head_weight is None:
            return [None] * len(batches)
        return [
            HiddenState(
                hidden=hidden_for_head(hidden_sbh, groups=self.groups),
                weight=self.head_weight,
                logit_softcap=self.architecture.logit_softcap,
                logit_scale=self.architecture.logit_scale,
            )
            for hidden_sbh in outputs
        ]


def _forward(
    iterator: Iterator[tuple[int, Batch]], model: torch.nn.Module, *, context_size: int
) -> tuple[Tensor, Callable[..., Tensor]]:
    number, batch = next(iterator)
    output = run_model(model, batch, context_size=context_size, micro_batch=number)
    return output, _keep_output


def _keep_output(output: Tensor, *, non_loss_data: bool) -> Tensor:
    assert non_loss_data
    return output
