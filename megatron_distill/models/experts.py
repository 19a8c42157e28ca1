"""Layers of experts: their router, and the release of its state after a forward pass."""

from __future__ import annotations

import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


def release_routing(model: nn.Module) -> None:
    """Detach the routing state of each layer of experts after its forward pass.

    Upstream's dispatchers store the probabilities of the last tokens with their autograd graph. The
    graph references the parameters' gradient hooks, and these the model. The garbage collector
    cannot see this cycle, partly in C++: without the detach, models and process groups of earlier
    runs stay in memory.
    """
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.register_forward_hook(_detach_routing)


def _detach_routing(layer: MoELayer, *_: object) -> None:
    fields = vars(layer.token_dispatcher)
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            fields[name] = value.detach()


class SequenceBalancedRouter(TopKRouter):
    """Megatron-Core's router, its auxiliary loss weighted by all positions of the micro-batch.

    Upstream multiplies the mean auxiliary loss of a micro-batch by the positions of one sequence on
    one rank; the step divides by those of the global batch. The correct value is the mean over
    sequences. So the factor must count every sequence of the micro-batch, with the positions of all
    tensor and context ranks.
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
        """Attach the loss to `activation` [positions of this rank, experts], and return that.

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
