"""Overlap of tensor-parallel messages with products, by Transformer Engine's user buffers.

A layer's products begin on the rows that have arrived, and send the rows that are done. Transformer
Engine keeps the buffers of one model in a variable of its module: one set of a fixed shape. A run
has two models, so each has a set of its own here, put in place before its layers run.

Written against the source of Transformer Engine 2.9 to 2.11; not yet run on a GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_distill.errors import ConfigError

__all__ = ["BufferShape", "TensorOverlap", "UserBuffers"]

_KEY = "runtime.tp_comm_overlap"
_BASE = "transformer_engine.pytorch.module.base"
# Transformer Engine registers 32 buffers in a process: one of its own, and 12 for a set.
_MOST_SETS = 2
_SWITCHES = (
    "ub_overlap_ag_fprop",
    "ub_overlap_rs_fprop",
    "ub_overlap_ag_dgrad",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)


class BufferShape(NamedTuple):
    """Sizes of a set of buffers.

    positions: of a micro-batch on the tensor ranks together. is_fp8: products are in FP8.
    """

    positions: int
    hidden_size: int
    tensor: int
    is_fp8: bool


@dataclass(eq=False)
class UserBuffers:
    """The sets of buffers of a process, at most two."""

    _sets: dict[BufferShape, Mapping[Any, Any]] = field(default_factory=dict)

    def of(self, shape: BufferShape) -> Mapping[Any, Any]:
        """Return the set of a shape; models of one shape share it.

        A set has 12 buffers of positions x hidden_size, and a reduced one in the ring. Raises
        ConfigError for a third shape, or a GPU without multicast.

        Collective: world, the creation of a group and the exchange of memory handles.
        """
        if shape not in self._sets:
            base = importlib.import_module(_BASE)
            self._require_room(shape)
            _require_multicast()
            modes = base.UserBufferQuantizationMode
            base.destroy_ub()  # forgets the set in place, which stays alive here
            base.initialize_ub(
                shape=[shape.positions, shape.hidden_size],
                tp_size=shape.tensor,
                quantization_modes=[modes.FP8 if shape.is_fp8 else modes.NONE],
                dtype=torch.bfloat16,
                bootstrap_backend="nccl",
            )
            self._sets[shape] = base._ub_communicators  # noqa: SLF001
        return self._sets[shape]

    def attach(self, layers: nn.Module, shape: BufferShape) -> None:
        """Let a stage's layers run with the buffers of their shape.

        layers: Megatron-Core's block of layers. Collective: as `of`.
        """
        in_place = _InPlace(self.of(shape), shape, layers)
        layers.register_forward_pre_hook(in_place.before, with_kwargs=True)
        layers.register_forward_hook(in_place.after)

    def close(self) -> None:
        """Free all buffers."""
        if self._sets:
            self._sets.clear()
            importlib.import_module(_BASE).destroy_ub()

    def _require_room(self, shape: BufferShape) -> None:
        known = list(self._sets)
        if any(one.tensor != shape.tensor for one in known):
            sizes = f"{known[0].tensor} and {shape.tensor}"
            raise ConfigError(
                f"{_KEY} = true: Transformer Engine has buffers for one tensor-parallel size in a "
                f"process, and the models have {sizes}; set {_KEY}=false or one size"
            )
        if len(known) == _MOST_SETS:
            shapes = ", ".join(f"{one.positions} x {one.hidden_size}" for one in [*known, shape])
            raise ConfigError(
                f"{_KEY} = true: Transformer Engine has room for {_MOST_SETS} shapes of buffers, "
                f"and the models' positions x hidden sizes are {shapes}. Set {_KEY}=false, or give "
                "a teacher ranks of its own"
            )


@dataclass(frozen=True)
class TensorOverlap:
    """The overlap of a model's tensor-parallel messages, in the buffers of its process.

    samples: of a micro-batch. length: positions of a sample, on all context ranks together.
    """

    buffers: UserBuffers
    samples: int
    length: int


@dataclass(eq=False)
class _InPlace:
    """Hooks that put a model's buffers in place where its layers run.

    The pass that needs gradients leaves them, because its backward pass needs them too. All others
    put back the set that they found: a teacher's pass may be between a student's two.
    """

    buffers: Mapping[Any, Any]
    shape: BufferShape
    layers: nn.Module
    before_us: Any = None
    is_on: bool = True

    def __post_init__(self) -> None:
        self.switches = [
            (module, name)
            for module in self.layers.modules()
            for name in _SWITCHES
            if getattr(module, name, False)
        ]

    def before(self, layers: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Put the buffers in place; off for a micro-batch of another size, as in an evaluation."""
        self.before_us = _put(self.buffers)
        hidden: Tensor | None = named.get("hidden_states", arguments[0] if arguments else None)
        if hidden is None:
            hidden = layers.input_tensor  # type: ignore[assignment]  # from the stage before
        assert hidden is not None
        fits = hidden.shape[0] * hidden.shape[1] * self.shape.tensor == self.shape.positions
        if fits is not self.is_on:
            self.is_on = fits
            for module, name in self.switches:
                setattr(module, name, fits)

    def after(self, *_: object) -> None:
        """Put back the buffers of another model, unless a backward pass of this one follows."""
        if not torch.is_grad_enabled():
            _put(self.before_us)


def _put(buffers: Any) -> Any:
    """Put a set of buffers in place, and return the one that was."""
    base: Any = importlib.import_module(_BASE)
    found = base._ub_communicators  # noqa: SLF001
    base._ub_communicators = buffers  # noqa: SLF001
    return found


def _require_multicast() -> None:
    """Raise ConfigError where Transformer Engine would refuse the GPUs."""
    if importlib.import_module("transformer_engine_torch").device_supports_multicast():
        return
    if not int(os.environ.get("UB_SKIPMC", "0")):
        raise ConfigError(
            f"{_KEY} = true: these GPUs, their driver or their CUDA have no multicast; set "
            f"UB_SKIPMC=1 in the environment to use CUDA IPC, or {_KEY}=false"
        )
