"""Routing of tokens to experts, with an auxiliary loss that no layout changes."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class SequenceBalancedRouter(TopKRouter):
    """Megatron-Core's router, its auxiliary loss weighted by all positions of the micro-batch.

    Upstream multiplies the mean auxiliary loss of a micro-batch by the positions of one sequence
    on one rank, and the step divides by the positions of the global batch. What is meant is the
    mean over sequences: the factor must count every sequence of the micro-batch and the positions
    that the other tensor and context ranks hold.
    """

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: dist.ProcessGroup,
        reduce_group_has_dp: bool = False,
        valid_token_count: int | Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """Attach the loss to `activation` [positions of this rank, experts] and return that.

        `reduce_group` holds the ranks that share the micro-batch's sequences.
        """
        return super().attach_and_log_load_balancing_loss(
            activation,
            aux_loss_coeff,
            aux_loss,
            aux_loss_name,
            reduce_group,
            reduce_group_has_dp,
            valid_token_count=activation.shape[0] * reduce_group.size(),
        )
