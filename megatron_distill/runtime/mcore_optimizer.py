"""What of Megatron-Core's optimizers is mended."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def mend_loading() -> None:
    """Let the distributed optimizer be loaded from tensors that are not all there.

    torch's Adam counts its steps per parameter; the count is loaded on its own, but upstream looks
    for it among the parameter's tensors. In fp32 the weights that the optimizer steps are the
    model's own, which need no second place in a checkpoint. What is missing stays as it is. A
    second call does nothing.
    """
    kind = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    upstream = kind._set_main_param_and_optimizer_states  # noqa: SLF001
    if upstream.__module__ == __name__:
        return

    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        present = self._get_main_param_and_optimizer_states(model_param)
        upstream(self, model_param, {**present, **tensors})

    kind._set_main_param_and_optimizer_states = set_states  # noqa: SLF001


def mend_gathering() -> None:
    """Gather parameters as late as asked for, but wait for them; for gloo.

    Its all-gather, asynchronous and coalesced, corrupts the heap of a process that allocates
    meanwhile: with torch 2.13 most runs of a minute died of SIGSEGV or "unaligned tcache chunk". A
    second call does nothing.
    """
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    kind = buffers._ParamAndGradBucketGroup  # noqa: SLF001
    upstream = kind.start_param_sync
    if upstream.__module__ == __name__:
        return

    def start_param_sync(self: Any, **_: object) -> None:
        upstream(self, force_sync=True)

    kind.start_param_sync = start_param_sync


def mend_gradient_norm() -> None:
    """Measure and scale gradients where they are, if neither Transformer Engine nor Apex does it.

    Upstream's stand-in for their kernels fetches the norm of every gradient to the host, one by
    one, and scales into temporaries. A second call changes nothing.
    """
    gradients = importlib.import_module("megatron.core.optimizer.clip_grads")
    stand_ins = importlib.import_module("megatron.core.utils")
    if gradients.multi_tensor_applier is stand_ins.local_multi_tensor_applier:
        vars(gradients)["l2_norm_impl"] = _norm
        vars(gradients)["multi_tensor_scale_impl"] = _scale


def _norm(_: int, __: Tensor, lists: Sequence[list[Tensor]], ___: bool) -> tuple[Tensor, None]:
    """Return the Euclidean norm of all gradients as one vector, fp32 [1]."""
    norms = torch._foreach_norm(lists[0])  # noqa: SLF001
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def _scale(_: int, __: Tensor, lists: Sequence[list[Tensor]], factor: float) -> None:
    """Scale gradients in place; upstream names each list as its own destination."""
    sources, destinations = lists
    assert all(a is b for a, b in zip(sources, destinations, strict=True))
    torch._foreach_mul_(destinations, factor)
