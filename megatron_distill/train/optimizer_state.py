"""What an optimizer puts into a checkpoint and takes from one: moments, and nothing of its layout.

Megatron-Core would also keep its parameter groups. How many there are depends on the layout, and
they hold settings that would silently win over the configuration of a resumed run. Both are the
run's own here; the number of steps that were applied is all that Adam needs besides its moments.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase
from megatron.core.optimizer.optimizer import ChainedOptimizer

# What the distributed optimizer and the other one call the fp32 weights of a bf16 model.
_SHARDED_MASTER = "optimizer.state.param."
_MASTER = "optimizer.state.fp32_param."


def allocate_moments(optimizer: ChainedOptimizer) -> None:
    """Give torch's Adam the state that its first step would give it.

    Megatron-Core describes the state to a checkpoint by what is there, and without Transformer
    Engine or Apex it cannot do so before the first step: neither to load, nor to save after a step
    that was not applied.
    """
    for adam in _torch_adams(optimizer):
        allocate_adam(adam)


def allocate_adam(adam: torch.optim.Adam) -> None:
    """Give one Adam the state that its first step would give it."""
    for group in adam.param_groups:
        on_device = group["capturable"] or group["fused"]
        for parameter in group["params"]:
            adam.state[parameter] = {
                "step": torch.zeros((), device=parameter.device if on_device else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def without_layout(state: dict[str, Any], *, has_master_weights: bool) -> dict[str, Any]:
    """Return an optimizer's sharded state in the form that any other optimizer can be filled from.

    Weights that are stepped in fp32 and rounded for the model have one name, whoever holds them;
    where the model itself is fp32, they are its weights and are left out.
    """
    kept: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            kept[key] = without_layout(value, has_master_weights=has_master_weights)
        elif not _is_master(value):
            kept[key] = value
        elif has_master_weights:
            value.key = value.key.replace(_SHARDED_MASTER, _MASTER, 1)
            kept[key] = value
    return kept


def _is_master(leaf: Any) -> bool:
    return isinstance(leaf, ShardedBase) and leaf.key.startswith(_SHARDED_MASTER)


def shards_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an optimizer's sharded state that belongs into a checkpoint."""
    shards, _ = extract_matching_values(state, lambda leaf: isinstance(leaf, ShardedBase))
    return shards


def load_optimizer(
    optimizer: ChainedOptimizer,
    state: dict[str, Any],
    shards: dict[str, Any],
    *,
    applied_steps: int,
) -> None:
    """Continue from a checkpoint.

    `state` is the optimizer's own sharded state, `shards` what was loaded for `shards_of(state)`,
    `applied_steps` how often the saved optimizer had stepped.
    """
    filled = _filled(state, shards)
    single = len(optimizer.chained_optimizers) == 1
    for part in [filled] if single else filled.values():
        _set_steps(part, applied_steps)
    optimizer.load_state_dict(filled)
    for adam in _torch_adams(optimizer):
        # Upstream hands one tensor to all parameters, and each would count in it.
        for moments in adam.state.values():
            moments["step"] = moments["step"].clone()


def _torch_adams(optimizer: ChainedOptimizer) -> list[torch.optim.Adam]:
    inner = [part.optimizer for part in optimizer.chained_optimizers]
    return [adam for adam in inner if isinstance(adam, torch.optim.Adam)]


def _filled(own: Any, loaded: Any) -> Any:
    """Put what was loaded where the sharded leaves stand."""
    if isinstance(own, dict):
        return {key: _filled(value, _at(loaded, key)) for key, value in own.items()}
    if isinstance(own, list):
        return [_filled(value, _at(loaded, index)) for index, value in enumerate(own)]
    if isinstance(own, ShardedBase):
        assert loaded is not None
        return loaded
    return own.unwrap() if isinstance(own, LocalNonpersistentObject) else own


def _at(loaded: Any, place: Any) -> Any:
    """Return an entry of a dict or a list; what holds no shard is in neither."""
    if isinstance(loaded, list):
        return loaded[place] if place < len(loaded) else None
    return None if loaded is None else loaded.get(place)


def _set_steps(part: dict[str, Any], steps: int) -> None:
    """Set the number of steps in every form in which Megatron-Core's optimizers read it."""
    inner = part.get("optimizer", part)
    for group in inner["param_groups"]:
        group["step"] = steps
    if "state" in inner:
        inner["state"]["common_step"] = torch.tensor(float(steps))
