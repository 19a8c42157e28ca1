"""Every change that lets Megatron-Core run without CUDA and without Transformer Engine.

Megatron-Core depends on CUDA in three ways, each with one remedy here:

* calls into ``torch.cuda`` (device, streams, random state): replaced by host equivalents;
* literals inside functions (``device="cuda"``, ``"torch.cuda.FloatTensor"``): the constant in the
  function's compiled code is replaced, so that the rest of the function is unchanged;
* features that need a CUDA kernel: replaced functions.

Each entry is checked when it is applied. A missing function or literal is an error, because the
installed release then differs from the release that the entries were written for.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.runtime.imports import (
    SUPPORTED_RELEASES,
    hidden,
    hide,
    require_release,
    uncollected_import,
)

_LOGGER = get_logger(__name__)

# Warnings about optional packages or Megatron-Core's own use of deprecated functions.
_UPSTREAM_REMARKS = (
    r"Apex is not installed.*",
    r".*[Tt]ransformer[ _]?[Ee]ngine.*not (installed|found).*",
    r"full scope is deprecated.*",
    r"`torch\.distributed\.\w+` is deprecated.*",
    r"The \.grad attribute of a Tensor that is not a leaf.*",  # views of the distributed optimizer
    r"`load_state_dict` is deprecated.*",  # called by Megatron-Core's sharded checkpoints
    r"Please use DTensor instead.*",
)

# A warning about CUDA streams, without meaning on a CPU.
_CUDA_REMARKS = (r"When using async grad allreduce it is recommended to set .*",)

_FLOAT = {"torch.cuda.FloatTensor": "torch.FloatTensor"}
_HALF = {
    ("torch.cuda.HalfTensor", "torch.cuda.BFloat16Tensor"): (
        "torch.HalfTensor",
        "torch.BFloat16Tensor",
    )
}
_DEVICE = {"cuda": "cpu"}


@dataclass(frozen=True)
class LiteralChange:
    """Constants to replace in one upstream function, and the reason."""

    module: str
    function: str
    constants: dict[Any, Any]
    reason: str


LITERAL_CHANGES = (
    LiteralChange(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_no_pipelining",
        _DEVICE,
        "the token counter is created on the CUDA device",
    ),
    LiteralChange(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_pipelining_without_interleaving",
        _DEVICE,
        "the token counter is created on the CUDA device",
    ),
    LiteralChange(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_pipelining_with_interleaving",
        _DEVICE,
        "the token counter is created on the CUDA device",
    ),
    LiteralChange(
        "megatron.core.optimizer.optimizer",
        "MixedPrecisionOptimizer.__init__",
        _DEVICE,
        "the overflow flag and the unit scale are created on the CUDA device",
    ),
    LiteralChange(
        "megatron.core.optimizer.optimizer",
        "FP32Optimizer.__init__",
        _DEVICE,
        "the unit scale is created on the CUDA device",
    ),
    LiteralChange(
        "megatron.core.optimizer.optimizer",
        "Float16OptimizerWithFloat16Params.__init__",
        {**_FLOAT, **_HALF},
        "parameters are sorted by the name of their CUDA tensor type",
    ),
    LiteralChange(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer._build_model_and_main_param_groups",
        {**_FLOAT, **_HALF},
        "parameters are sorted by the name of their CUDA tensor type",
    ),
    LiteralChange(
        "megatron.core.optimizer.distrib_optimizer",
        "DistributedOptimizer.__init__",
        _HALF,
        "half-precision parameters are found by the name of their CUDA tensor type",
    ),
    LiteralChange(
        "megatron.core.optimizer.clip_grads",
        "get_grad_norm_fp32",
        _DEVICE,
        "the norm is accumulated on the CUDA device",
    ),
    LiteralChange(
        "megatron.core.optimizer.clip_grads",
        "clip_grad_by_total_norm_fp32",
        {**_FLOAT, **_DEVICE},
        "gradients are checked by the name of their CUDA tensor type",
    ),
)


class HostStream:
    """A stream without effect: work on the host is already sequential."""

    def __init__(self, *_: object, **__: object) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, _: object) -> None:
        """Return at once; the other stream's work is done."""

    def wait_event(self, _: object) -> None:
        """Return at once; the event has happened."""

    def synchronize(self) -> None:
        """Return at once; the stream's work is done."""

    def record_event(self, _: object = None) -> HostEvent:
        """Return an event that has happened."""
        return HostEvent()


class HostEvent:
    """An event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        """Do nothing; the event has happened."""

    def wait(self, *_: object) -> None:
        """Return at once; the event has happened."""

    def synchronize(self) -> None:
        """Return at once; the event has happened."""

    def query(self) -> bool:
        """Return True; the event has happened."""
        return True


def _nothing(*_: object, **__: object) -> None:
    return None


@contextlib.contextmanager
def _host_stream_context(_: object) -> Iterator[None]:
    yield


def _host_device() -> torch.device:
    return torch.device("cpu")


def _host_tensor(tensor: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return tensor


def _host_rng_state(*_: object, **__: object) -> torch.Tensor:
    return torch.get_rng_state()


def _set_host_rng_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


@contextlib.contextmanager
def _fork_host_rng(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Run a block under one of the tracker's named random states.

    Upstream's version warns if the host state changes during the block; here that change is
    intended.
    """
    outside = torch.get_rng_state()
    torch.set_rng_state(tracker.states_[name])
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)


# name in torch.cuda -> host equivalent
TORCH_CUDA_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "current_device": _host_device,
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "manual_seed": torch.manual_seed,
    "get_rng_state": _host_rng_state,
    "set_rng_state": _set_host_rng_state,
    "Stream": HostStream,
    "Event": HostEvent,
    "stream": _host_stream_context,
    "current_stream": HostStream,
    "default_stream": HostStream,
}


def _upstream(module: str, path: str) -> tuple[Any, str, Any]:
    """Return (owner, attribute name, object) of a dotted path inside an upstream module."""
    parts = path.split(".")
    try:
        owner = reduce(getattr, parts[:-1], importlib.import_module(module))
        return owner, parts[-1], getattr(owner, parts[-1])
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"megatron-core {version('megatron-core')} has no {module}.{path}, which the CPU "
            f"patches change; install one of {', '.join(SUPPORTED_RELEASES)}"
        ) from error


def _with_constants(
    code: types.CodeType, constants: dict[Any, Any], seen: set[Any]
) -> types.CodeType:
    """Return the code object with constants replaced, nested functions included."""

    def exchange(constant: Any) -> Any:
        if isinstance(constant, types.CodeType):
            return _with_constants(constant, constants, seen)
        if isinstance(constant, str | tuple) and constant in constants:
            seen.add(constant)
            return constants[constant]
        return constant

    return code.replace(co_consts=tuple(exchange(constant) for constant in code.co_consts))


def change_literals(change: LiteralChange) -> None:
    """Replace the literals of one upstream function in place.

    Raises ConfigError if the function or one of the literals does not exist.
    """
    _, _, found = _upstream(change.module, change.function)
    function = inspect.unwrap(getattr(found, "__func__", found))  # class methods are bound
    seen: set[Any] = set()
    code = _with_constants(function.__code__, change.constants, seen)
    missing = set(change.constants) - seen
    if missing:
        raise ConfigError(
            f"{change.module}.{change.function} does not contain {sorted(map(str, missing))}, "
            f"which the CPU patches replace ({change.reason}); install megatron-core "
            f"{', '.join(SUPPORTED_RELEASES)}"
        )
    function.__code__ = code


def prepare_megatron_core(*, on_cuda: bool, transformer_engine: str = "auto") -> None:
    """Import Megatron-Core without its warnings; patch it if CUDA or Transformer Engine is missing.

    Must come before any other import of `megatron.core`; a second call does nothing.
    `transformer_engine` is "auto" (used on CUDA if it can be imported), "on" or "off". Raises
    ConfigError for "on" where it cannot be used, and if the installed release of Megatron-Core is
    not supported: see `require_release`.
    """
    require_release(on_cuda=on_cuda)
    for message in _UPSTREAM_REMARKS if on_cuda else _UPSTREAM_REMARKS + _CUDA_REMARKS:
        warnings.filterwarnings("ignore", message=message)
    if transformer_engine == "on" and not on_cuda:
        raise ConfigError(
            "runtime.transformer_engine is on, which needs CUDA, and this run is on a CPU; set it "
            "to auto or off"
        )
    if not on_cuda or transformer_engine == "off":
        hide("transformer_engine")
    # Its inference engines, which are not used here, import wandb wherever it is installed.
    with hidden("wandb"), uncollected_import("megatron.core"):
        if on_cuda:
            importlib.import_module("megatron.core")
        else:
            hide("apex")  # its optimizers run on CUDA only
            _patch_for_cpu()
    if not on_cuda:
        mend_gathering()
    if not has_transformer_engine():
        _require_no_transformer_engine(transformer_engine)
        # The router compares this name with None, but it is defined only if the import succeeds.
        router = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        vars(router)["te_general_gemm"] = None
    mend_gradient_norm()
    mend_loading()
    mend_recomputed_norms()


def has_transformer_engine() -> bool:
    """Return whether Megatron-Core has imported all that it uses of Transformer Engine.

    An installed release may still lack a module that this Megatron-Core imports, or may not fit
    the installed torch.
    """
    names = ("extensions.transformer_engine", "models.gpt.gpt_layer_specs")
    return all(importlib.import_module(f"megatron.core.{name}").HAVE_TE for name in names)


def _require_no_transformer_engine(wanted: str) -> None:
    """Raise ConfigError if Transformer Engine was asked for; log why an installed one is unused."""
    if wanted == "off" or (wanted == "auto" and find_spec("transformer_engine") is None):
        return
    try:
        for name in ("transformer_engine.pytorch", "transformer_engine.pytorch.fp8"):
            importlib.import_module(name)
        reason = f"megatron-core {version('megatron-core')} does not fit its release"
    except (ImportError, OSError) as error:
        reason = str(error)
    if wanted == "on":
        raise ConfigError(
            f"runtime.transformer_engine is on, but it cannot be used: {reason}; install "
            "megatron-distill[gpu], see docs/running.md, or set the key to auto or off"
        )
    _LOGGER.warning("the layers are torch's: Transformer Engine cannot be used: %s", reason)


def _patch_for_cpu() -> None:
    if torch.cuda.current_device is _host_device:
        return
    # Decorators compile fused element-wise functions at import. This package does not use them, and
    # loading the compiler costs every process four seconds.
    with patch.object(torch, "compile", _leave_uncompiled):
        importlib.import_module("megatron.core")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    for name, replacement in TORCH_CUDA_REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    # The optimizer's checkpoint moves tensors with `.cuda()` before it sends them.
    torch.Tensor.cuda = _host_tensor  # type: ignore[assignment,method-assign]
    for change in LITERAL_CHANGES:
        change_literals(change)
    for module, path, replacement in _function_replacements():
        owner, name, _ = _upstream(module, path)
        setattr(owner, name, replacement)


def _leave_uncompiled(function: Any = None, **_: object) -> Any:
    return function if function is not None else lambda decorated: decorated


def _function_replacements() -> tuple[tuple[str, str, Any], ...]:
    """Return (module, path, replacement) of functions that no literal change can fix."""
    random = "megatron.core.tensor_parallel.random"
    return (
        # Both use the CUDA generators of torch._C.
        (random, "_get_cuda_rng_state", _host_rng_state),
        (random, "_set_cuda_rng_state", _set_host_rng_state),
        # Recomputation and dropout fork a CUDA state and require an unchanged host state.
        (random, "CudaRNGStatesTracker.fork", _fork_host_rng),
    )


def mend_loading() -> None:
    """Let the distributed optimizer load an incomplete set of tensors per parameter.

    torch's Adam counts its steps per parameter; the count is loaded separately, but upstream
    requires it among the parameter's tensors. In fp32 the optimizer steps the model's own weights,
    which a checkpoint stores once. Missing tensors retain their values. A second call does nothing.
    """
    kind = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    upstream = kind._set_main_param_and_optimizer_states  # noqa: SLF001
    if upstream.__module__ == __name__:
        return

    def set_states(self: Any, model_param: Tensor, tensors: dict[str, Tensor]) -> None:
        present = self._get_main_param_and_optimizer_states(model_param)
        upstream(self, model_param, {**present, **tensors})

    kind._set_main_param_and_optimizer_states = set_states  # noqa: SLF001


def mend_recomputed_norms() -> None:
    """Let norms be recomputed without Transformer Engine.

    Upstream takes a missing FP8 setting for one that is on, and asks Transformer Engine for its
    recipe. A second call does nothing.
    """
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    upstream = random.CheckpointWithoutOutput.__init__
    if upstream.__module__ == __name__:
        return

    def create(self: Any, fp8: Any = None) -> None:
        upstream(self, fp8=fp8 or None)

    random.CheckpointWithoutOutput.__init__ = create


def mend_gathering() -> None:
    """Start the delayed all-gathers of parameters one by one; for gloo.

    gloo's asynchronous, coalesced all-gather corrupts the heap if the process allocates meanwhile.
    With torch 2.13 most runs of a minute died of SIGSEGV or "unaligned tcache chunk"; without the
    coalescing manager none did. A second call does nothing.
    """
    buffers = importlib.import_module("megatron.core.distributed.param_and_grad_buffer")
    kind = buffers._ParamAndGradBucketGroup  # noqa: SLF001
    upstream = kind.start_param_sync
    if upstream.__module__ == __name__:
        return

    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        gathers = _Gathers(buffers.dist_all_gather_func)
        names = {"_coalescing_manager": gathers.opened, "dist_all_gather_func": gathers.start}
        # Upstream's code with two other names; its reductions use the first one too, as it is.
        types.FunctionType(upstream.__code__, {**vars(buffers), **names})(self, force_sync)

    kind.start_param_sync = start_param_sync


class _Gathers:
    """The all-gathers of one group of buckets, in the place of upstream's coalesced one."""

    def __init__(self, all_gather: Callable[..., Any]) -> None:
        self._all_gather = all_gather
        self._started: list[Any] = []

    @contextlib.contextmanager
    def opened(self, *_: object, **__: object) -> Iterator[_Gathers]:
        """Return the handle of the gathers that the block starts."""
        yield self

    def start(self, *tensors: Tensor, **named: Any) -> None:
        """Start one gather, or complete it if it is synchronous."""
        work = self._all_gather(*tensors, **named)
        if work is not None:
            self._started.append(work)

    def wait(self) -> None:
        """Wait for all of them."""
        for work in self._started:
            work.wait()


def mend_gradient_norm() -> None:
    """Compute the gradient norm and scale gradients on their device if TE and Apex are missing.

    Upstream's fallback for the kernels of Transformer Engine and Apex copies every gradient's norm
    to the host, one by one, and scales into temporaries. A second call changes nothing.
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
    """Scale gradients in place; upstream passes each list as its own destination."""
    sources, destinations = lists
    assert all(a is b for a, b in zip(sources, destinations, strict=True))
    torch._foreach_mul_(destinations, factor)
