"""What Megatron-Core's distributed optimizer needs mended to be loaded, on any device."""

from __future__ import annotations

import importlib
from typing import Any

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
