"""Routing of tokens to experts: an auxiliary loss that no layout changes, no graph kept."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


def release_routing(model: nn.Module) -> None:
    """Let each layer of experts forget, after its forward pass, the graph that it has computed.

    Upstream's dispatchers keep the probabilities of the last tokens, with all that they were
    computed from. The graph holds the parameters' gradient hooks and these the model, a cycle in
    part outside of Python, which no collector finds: models and process groups of one run after
    another stay for as long as the process lives.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.register_forward_hook(_detach_routing)


def _detach_routing(layer: MoELayer, *_: object) -> None:
    kept = vars(layer.token_dispatcher)
    for name, value in kept.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            kept[name] = value.detach()


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
