"""Experts of one layer on rows that every tensor rank has alike.

Shapes: N positions, H hidden size, E experts of the model, e of this rank, k per position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_distill.runtime.groups import Groups

__all__ = ["ExpertLayer"]


@dataclass(frozen=True)
class ExpertLayer:
    """Router, this rank's experts, and the expert of all positions, if there is one.

    The tensor ranks share each expert's rows, or, with several expert ranks, hold different ones.
    """

    router: Any
    experts: Any
    shared: Callable[[Tensor], Tensor] | None
    shared_gate: Tensor | None
    per_position: int  # experts of each position
    expert_group: dist.ProcessGroup
    sharing_group: dist.ProcessGroup  # ranks that share one expert
    tensor_group: dist.ProcessGroup

    @classmethod
    def of(
        cls, module: Any, shared: Callable[[Tensor], Tensor] | None, *, groups: Groups
    ) -> ExpertLayer:
        """Take the modules of upstream's layer; `shared`: computes this rank's part."""
        return cls(
            router=module.router,
            experts=module.experts,
            shared=shared,
            shared_gate=None if shared is None else module.shared_experts.gate_weight,
            per_position=module.config.moe_router_topk,
            expert_group=groups.megatron.ep,
            sharing_group=groups.megatron.expt_tp,
            tensor_group=groups.tensor,
        )

    def __call__(self, x_NH: Tensor) -> Tensor:
        """Return the output of the layer [N, H], whole on every rank.

        All expert ranks call it together with the same N.

        Collective: several expert ranks: expert group, one all-gather and one all-reduce of H
        numbers per position and rank. Otherwise tensor group, one all-reduce of H numbers. A shared
        expert beside expert ranks: one more.
        """
        probs_NE, routing_NE = self.router(x_NH[:, None])
        size, rank = self.expert_group.size(), self.expert_group.rank()
        if size == 1:
            output = self._routed(x_NH, probs_NE, routing_NE)
        else:
            rows, own = x_NH.shape[0], probs_NE.shape[1] // size
            mine = slice(rank * own, (rank + 1) * own)
            everyone = _from_all(x_NH, self.expert_group)
            probs = _from_all(probs_NE * routing_NE, self.expert_group)[:, mine]
            chosen = _from_all(routing_NE.to(x_NH.dtype), self.expert_group)[:, mine] > 0
            output = self._routed(everyone, probs, chosen)
            dist.all_reduce(output, group=self.expert_group)
            output = output[rank * rows : (rank + 1) * rows]
        both_split = self.sharing_group.size() == self.tensor_group.size()
        if not both_split and self.sharing_group.size() > 1:
            dist.all_reduce(output, group=self.sharing_group)
        extra = None if self.shared is None else self._of_all(x_NH)
        if extra is not None and both_split:
            output, extra = output + extra, None
        if both_split and self.tensor_group.size() > 1:
            dist.all_reduce(output, group=self.tensor_group)
        if extra is not None:
            dist.all_reduce(extra, group=self.tensor_group)
            output = output + extra
        return output

    def _routed(self, x_NH: Tensor, probs: Tensor, routing: Tensor) -> Tensor:
        """Return the sum over this rank's experts; probs and routing [N, e]."""
        if self.expert_group.size() == 1:  # then the count is known without the device
            count = x_NH.shape[0] * self.per_position
            expert_of_row, position = routing.t().nonzero_static(size=count).unbind(1)
        else:
            expert_of_row, position = routing.t().nonzero(as_tuple=True)
        weights = probs[position, expert_of_row]
        output, bias = self.experts(x_NH.index_select(0, position), routing.sum(dim=0), weights)
        if bias is not None:
            output = output + bias
        if self.expert_group.size() == 1:  # k rows of each position, side by side
            order = position.argsort(stable=True)
            rows = output.index_select(0, order)
            return rows.view(x_NH.shape[0], self.per_position, x_NH.shape[1]).sum(1)
        sums = torch.zeros_like(x_NH)
        if x_NH.device.type == "cpu":
            return sums.index_add_(0, position, output)
        # On a GPU this one adds in the order of the rows: equal runs write equal texts.
        return sums.index_put_((position,), output, accumulate=True)

    def _of_all(self, x_NH: Tensor) -> Tensor:
        assert self.shared is not None
        output = self.shared(x_NH)
        if self.shared_gate is None:
            return output
        return output * torch.sigmoid(F.linear(x_NH, self.shared_gate))


def _from_all(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(ranks, part.contiguous(), group=group)
    return torch.cat(ranks)
