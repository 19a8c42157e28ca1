"""Layers of experts: routing, the dispatch of tokens, and the experts' products.

Where one rank has all of every expert (one tensor and one expert rank), nothing here waits for the
device. The number of rows is that of the tokens times the experts per token, and the experts'
counts stay on the device. With several ranks the host waits once per layer and forward pass, for
the sizes of the exchange: see docs/internals/scaling.md. The experts of Transformer Engine, which
run with FP8 or on several ranks, wait too: their grouped product takes the counts as numbers of the
host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import (
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAlltoAllTokenDispatcher,
    MoETokenDispatcher,
)
from torch import Tensor, nn

from megatron_distill.models.architecture import Architecture
from megatron_distill.runtime.segments import copied

# Major compute capabilities with a kernel; elsewhere torch multiplies expert by expert, with counts
# that the host waits for.
_CUDA_MAJORS = (9, 10)


def grouped_experts_run(
    architecture: Architecture, dtype: torch.dtype, device: torch.device, *, tensor: int
) -> bool:
    """Return whether `GroupedExperts` can compute a model's experts.

    tensor: ranks that share one expert.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    if device.type == "cuda":
        has_kernel = dtype is torch.bfloat16
        has_kernel &= torch.cuda.get_device_capability(device)[0] in _CUDA_MAJORS
    else:
        has_kernel = dtype in (torch.bfloat16, torch.float32)
    return has_kernel and architecture.groups_experts(dtype.itemsize, tensor=tensor)


class GroupedExperts(MegatronModule):
    """Experts without biases, whose first and second products are one grouped product each.

    Its tensors in a checkpoint are those of Megatron-Core's `SequentialMLP`, one per expert.
    Shapes: n rows, e experts of this rank, H hidden size, f inner width on this rank, i = f or 2 f
    with a gate.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        assert not config.add_bias_linear
        assert config.moe_ffn_hidden_size is not None
        self.expert_group, self.tensor_group = pg_collection.ep, pg_collection.expt_tp
        self.data_group = pg_collection.expt_dp
        inner = config.moe_ffn_hidden_size // self.tensor_group.size()
        rows = inner * (2 if config.gated_linear_unit else 1)
        hidden = config.hidden_size
        self.weight1 = _weight(num_local_experts, rows, hidden, split=1, config=config)
        self.weight2 = _weight(num_local_experts, hidden, inner, split=2, config=config)

    def forward(self, rows_nH: Tensor, counts_e: Tensor, weights_n: Tensor) -> tuple[Tensor, None]:
        """Compute each expert's rows [n, H], ordered by expert, times their routing weights [n].

        counts_e: rows of each expert, on any device.
        """
        if not rows_nH.shape[0]:
            return self._of_no_rows(rows_nH, weights_n), None
        ends_e = counts_e.cumsum(0).to(torch.int32)
        if ends_e.device != rows_nH.device:
            ends_e = copied(ends_e, rows_nH.device)
        inner_ni = F.grouped_mm(rows_nH, self.weight1.transpose(1, 2), offs=ends_e)
        inner_nf = self._activated(inner_ni, weights_n.unsqueeze(-1))
        return F.grouped_mm(inner_nf, self.weight2.transpose(1, 2), offs=ends_e), None

    def _activated(self, inner_ni: Tensor, weights_n1: Tensor) -> Tensor:
        config = self.config
        if config.bias_activation_fusion:  # on for SwiGLU only
            fused: Tensor = weighted_bias_swiglu_impl(inner_ni, None, weights_n1, False)
            return fused
        if config.gated_linear_unit:
            gate_nf, up_nf = inner_ni.chunk(2, dim=-1)
            inner_nf = config.activation_func(gate_nf) * up_nf
        else:
            inner_nf = config.activation_func(inner_ni)
        return (inner_nf * weights_n1).to(inner_nf.dtype)

    def _of_no_rows(self, rows_nH: Tensor, weights_n: Tensor) -> Tensor:
        """Return an empty output that depends on all inputs and both weights.

        A weight's gradient of zeros starts its reduction, and a routing weight's the exchange with
        ranks that have rows.
        """
        nothing = rows_nH.new_zeros(())
        for part in (self.weight1, self.weight2, weights_n):
            nothing = nothing + 0 * part.sum()
        return rows_nH * nothing.to(rows_nH.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> ShardedStateDict:
        """Describe each expert's matrices, under the names of `SequentialMLP`."""
        names = {"weight1": "linear_fc1.weight", "weight2": "linear_fc2.weight"}
        return {
            f"{prefix}{name}": ShardedTensorFactory(
                f"{prefix}experts.{stored}",
                getattr(self, name),
                lambda key, data, replica, _, name=name: list(
                    self._pieces(name, key, data, replica, sharded_offsets)
                ),
                lambda pieces, name=name: torch.cat(pieces).view_as(getattr(self, name)),
                (0, 0, self.data_group.rank()),
            )
            for name, stored in names.items()
        }

    @torch.no_grad()
    def _pieces(
        self,
        name: str,
        key: str,
        data: Tensor,
        replica: ReplicaId,
        offsets: Sequence[tuple[int, int, int]],
    ) -> Iterator[ShardedTensor]:
        """Yield the parts of a weight: one per expert, or its gate and its rows up."""
        rank, size = self.tensor_group.rank(), self.tensor_group.size()
        first = self.expert_group.rank() * data.shape[0]
        total = self.expert_group.size() * data.shape[0]
        axis = len(offsets)
        halves = 2 if name == "weight1" and self.config.gated_linear_unit else 1
        split = axis + (1 if name == "weight1" else 2)
        for index, matrix in enumerate(data):
            for half, part in enumerate(matrix.chunk(halves)):
                yield ShardedTensor.from_rank_offsets(
                    key,
                    part,
                    *offsets,
                    (axis, first + index, total),
                    (split, half * size + rank, halves * size),
                    replica_id=replica,
                    prepend_axis_num=axis + 1,
                )


def _weight(
    experts: int, rows: int, columns: int, *, split: int, config: TransformerConfig
) -> nn.Parameter:
    """Return an uninitialised weight with the marks of Megatron-Core's expert layers."""
    device = torch.cuda.current_device()
    values = torch.empty(experts, rows, columns, dtype=config.params_dtype, device=device)
    weight = nn.Parameter(values)
    set_tensor_model_parallel_attributes(tensor=weight, is_parallel=True, dim=split, stride=1)
    weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
    return weight


class OwnTokens(MoETokenDispatcher):
    """Orders a rank's tokens by expert, where one rank has all experts; nothing is sent.

    Shapes: n tokens, k experts per token, E experts.
    """

    def dispatch_preprocess(
        self, tokens: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens as [n, H], and their weights [n, E]."""
        self.shape = tokens.shape
        self.routing_nE = routing_map
        return tokens.view(-1, tokens.shape[-1]), probs

    def token_dispatch(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return both: no other rank needs them."""
        return tokens, probs

    def dispatch_postprocess(self, tokens: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [n k, H] ordered by expert, each expert's count, and the rows' weights."""
        rows, weights, self.places = _ordered_by_expert(
            tokens, self.routing_nE, probs, per_token=self.config.moe_router_topk
        )
        counts_E = self.routing_nE.sum(dim=0)
        self.routing_nE = torch.empty(0)
        return rows, counts_E, weights

    def combine_preprocess(self, rows: Tensor) -> Tensor:
        """Return the sums [n, H] over each token's experts."""
        places = self.places
        del self.places  # two numbers a row, which only a backward pass keeps
        return _FromExperts.apply(rows, places)

    def token_combine(self, tokens: Tensor) -> Tensor:
        """Return the tokens: no other rank has a part of them."""
        return tokens

    def combine_postprocess(self, tokens: Tensor) -> Tensor:
        """Return the tokens in the shape in which they came."""
        return tokens.view(self.shape)


class SentTokens(MoEAlltoAllTokenDispatcher):
    """Megatron-Core's exchange of tokens, whose rows are ordered without a wait for the device.

    Upstream's own ordering selects by a mask, twice in a layer. Each selection waits for its number
    of rows, and so for everything before it, although that number is known. Here one wait is left:
    for the sizes of the exchange, after the rows have been ordered. The order is upstream's.
    """

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the rows [n k, H] ordered by expert, and their weights.

        Collective: ranks of the experts, one all-gather of the experts' counts.
        """
        assert self.shared_experts is None
        assert not self.config.moe_router_padding_for_quantization
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        rows, weights, self.places = _ordered_by_expert(
            hidden_states.view(-1, self.hidden_shape[-1]),
            routing_map,
            probs,
            per_token=self.config.moe_router_topk,
        )
        return rows, weights

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sums over each token's experts, in the shape in which the tokens came."""
        places = self.places
        del self.places
        sums_nH: Tensor = _FromExperts.apply(permutated_local_input_tokens, places)
        return sums_nH.view(self.hidden_shape)


def _ordered_by_expert(
    tokens_nH: Tensor, routing_nE: Tensor, probs_nE: Tensor, *, per_token: int
) -> tuple[Tensor, Tensor, _Places]:
    """Return rows [n k, H], their weights, and their places: by expert, then by token."""
    chosen_nk = routing_nE.to(torch.int32).topk(per_token, dim=1).indices
    chosen_nk = chosen_nk.sort(dim=1).values
    order = chosen_nk.flatten().argsort(stable=True)
    places = _Places(order, per_token)
    weights = probs_nE.gather(1, chosen_nk).flatten().index_select(0, order)
    return _ToExperts.apply(tokens_nH, places), weights, places


class _Places:
    """Rows ordered by expert: `token` of each row; `row` of each token's k experts, in a line."""

    def __init__(self, order: Tensor, per_token: int) -> None:
        self.per_token = per_token
        self.token = order // per_token
        rows = torch.arange(order.numel(), device=order.device)
        self.row = torch.empty_like(order).scatter_(0, order, rows)

    def rows_of(self, tokens_nH: Tensor) -> Tensor:
        """Return each row's token."""
        return tokens_nH.index_select(0, self.token)

    def sums_of(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, in a fixed order."""
        return rows.index_select(0, self.row).unflatten(0, (-1, self.per_token)).sum(dim=1)


class _ToExperts(torch.autograd.Function):
    """Tokens to rows; gradients are sums in a fixed order, which torch's own are not on CUDA."""

    @staticmethod
    def forward(ctx: Any, tokens_nH: Tensor, places: _Places) -> Tensor:
        ctx.places = places
        return places.rows_of(tokens_nH)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.places.sums_of(gradient), None


class _FromExperts(torch.autograd.Function):
    """Rows to tokens: the reverse."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: _Places) -> Tensor:
        ctx.places = places
        return places.sums_of(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.places.rows_of(gradient), None


def prepare_experts(model: nn.Module, *, groups: ProcessGroupCollection) -> None:
    """Give layers of experts their dispatcher, and release their routing after a forward pass."""
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            if groups.tp_ep.size() == 1:
                layer.token_dispatcher = OwnTokens(layer.config, groups)
            elif _orders_by_masks(layer.token_dispatcher):
                layer.token_dispatcher = SentTokens(
                    layer.num_local_experts, layer.local_expert_indices, layer.config, groups
                )
            layer.register_forward_hook(_release_routing)


def _orders_by_masks(dispatcher: MoETokenDispatcher) -> bool:
    is_exchange = isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
    return is_exchange and not dispatcher.config.moe_permute_fusion


def _release_routing(layer: MoELayer, *_: object) -> None:
    """Detach the routing state of a layer.

    Upstream's dispatchers store the probabilities of the last tokens with their autograd graph. The
    graph references the parameters' gradient hooks, and these the model. The garbage collector
    cannot see this cycle, partly in C++: without the detach, models and process groups of earlier
    runs stay in memory.
    """
    fields = vars(layer.token_dispatcher)
    for name, value in fields.items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            fields[name] = value.detach()


class SequenceBalancedRouter(TopKRouter):
    """Megatron-Core's router, its auxiliary loss weighted by all positions of the micro-batch.

    Upstream multiplies the mean auxiliary loss of a micro-batch by the positions of one sequence on
    one rank. The step divides by those of the global batch. The correct value is the mean over
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
