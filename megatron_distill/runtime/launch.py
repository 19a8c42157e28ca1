"""The launch of this process: alone, or as one rank of a world without a process group yet.

A rank may fail before there is a process group: its file is missing, its GPU is taken. The
rendezvous store then lets all ranks fail together.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from megatron_distill.errors import ConfigError, MegatronDistillError
from megatron_distill.log import get_logger
from megatron_distill.runtime.bridge import Bridge, open_bridge
from megatron_distill.runtime.collectives import ERROR_TYPES, together
from megatron_distill.runtime.heartbeats import Heartbeats
from megatron_distill.runtime.lone_failure import LoneFailure, PeerWatch, tell_torchrun
from megatron_distill.runtime.mcore_patches import prepare_megatron_core
from megatron_distill.runtime.roles import Role, Roles
from megatron_distill.runtime.termination import is_requested

_LOGGER = get_logger(__name__)
_COLLECTIVES: Final = {
    # A collective that fails or exceeds its timeout ends the process: torch's default.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # It leaves a trace of the last collectives of this rank, of which torch has a reader.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    # gloo, beside NCCL, connects the threads that exchange batches: when they use a connection, as
    # those of all ranks with all would be a million at 1,000 ranks.
    "TORCH_GLOO_LAZY_INIT": "1",
    # The order of pipeline messages on one stream is meant; torch would warn of it in every run.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_COPY_QUEUES: Final = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
_COPIES: Final = 8  # CUDA's own default
_SINGLE_QUEUE_BELOW: Final = 10  # the compute capability of Blackwell
_MOST_QUEUES: Final = 32


def prepare_collectives() -> None:
    """Set the variables of NCCL and gloo for a run on GPUs; call before there is a group."""
    for name, value in _COLLECTIVES.items():
        os.environ.setdefault(name, value)


def limit_queues() -> dict[str, str]:
    """Let kernels start in the order of their launches; call before anything starts CUDA.

    For tensor and context parallelism, whose collectives are launched before the computation that
    hides them. Before Blackwell that order takes a single hardware queue. Copies keep theirs: in
    one, weights or states on their way to the host would wait for copies that wait for a kernel.
    Returns the reason of each variable that was set.
    """
    capability, reasons = None if _QUEUES in os.environ else _compute_capability(), {}
    if capability is not None and capability < _SINGLE_QUEUE_BELOW:
        os.environ[_QUEUES] = "1"
        reasons[_QUEUES] = "collectives start before the kernels that hide them"
    if os.environ.get(_QUEUES) == "1" and _COPY_QUEUES not in os.environ:
        os.environ[_COPY_QUEUES] = str(_COPIES)
        reasons[_COPY_QUEUES] = "copies keep queues of their own"
    return reasons


def spread_queues() -> dict[str, str]:
    """Give each stream a hardware queue of its own; call before anything starts CUDA.

    For a teacher on ranks of its own: a thread exchanges answers while layers communicate, in no
    common order of the ranks. In one queue a message behind a collective that waits for a peer
    would never start, and the peer could wait for that very message. Returns the reason of each
    variable that was set, none where there is no GPU. Raises ConfigError: the environment asks for
    one queue, and there is a GPU.
    """
    is_ours = _QUEUES not in os.environ
    given = os.environ.setdefault(_QUEUES, str(_MOST_QUEUES))
    if _compute_capability() is None:
        return {}
    if given == "1":
        raise ConfigError(
            f"{_QUEUES}=1: messages of a teacher on ranks of its own and the collectives that wait "
            f"for them would share a queue: a deadlock. Unset it, or set {_QUEUES}={_MOST_QUEUES}"
        )
    reason = "no message of a teacher waits for a collective in the same queue"
    return {_QUEUES: reason} if is_ours else {}


def _compute_capability() -> int | None:
    """Return the major compute capability of the first GPU without starting CUDA, if known."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    failed = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(device))
        or nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor))
    )
    return None if failed else major.value


def local_size() -> int:
    """Return the ranks of this launch on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


_MESSAGE_SECONDS = 10.0
_MEETING_SECONDS = 600.0  # the slowest rank may still be importing from a shared disk
_LOOK_SECONDS = (0.01, 1.0)  # between looks at the store, first and most


@dataclass(frozen=True)
class Launch:
    """This process's rank and the size of the launch; `store` is None in a world of one process.

    `teacher_ranks`: the last ranks of the launch, which run a teacher each in a world of its own.
    Empty: there is one world of all ranks. See `Roles`.
    """

    rank: int
    size: int
    store: dist.Store | None
    teacher_ranks: tuple[tuple[str, int], ...] = ()

    @classmethod
    def from_environment(cls) -> Launch:
        """Read torchrun's environment variables; without torchrun the world is this process.

        Collective: the whole world, rendezvous at the store.
        """
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), None)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return cls(0, 1, None)
        timeout = timedelta(seconds=_MEETING_SECONDS)
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        # torchrun keeps its store when it starts the ranks again.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, size, dist.PrefixStore(f"attempt/{attempt}", store))

    @property
    def roles(self) -> Roles:
        """The roles of all ranks."""
        return Roles(self.size, self.teacher_ranks)

    @property
    def role(self) -> Role:
        """This rank's role."""
        return self.roles.of(self.rank)

    @contextmanager
    def together(self, name: str, *, patient: bool = False) -> Iterator[None]:
        """Run a block that may fail on some ranks; its outcome is the same on all ranks.

        `name` identifies the block and is used once. `patient`: peers may take any time, until the
        run is to stop. Raises the error of one failed rank.

        Collective: all ranks of the launch, through the store or as `collectives.together`.
        """
        if self.store is None:
            if dist.is_initialized():
                with together():
                    yield
            else:
                yield
            return
        failure: MegatronDistillError | None = None
        try:
            yield
        except ERROR_TYPES as error:
            failure = error
        self._agree(name, failure, patient=patient)

    def require_equal(self, name: str, value: str, *, difference: Callable[[str], str]) -> None:
        """Raise ConfigError unless the value is that of rank 0; call it inside `together`.

        `difference` returns the error's message from rank 0's value.
        """
        if self.store is None:
            return
        if self.rank == 0:
            self.store.set(name, value)
        self.store.wait([name], timedelta(seconds=_MEETING_SECONDS))
        first = self.store.get(name).decode()
        if first != value:
            raise ConfigError(difference(first))

    def _agree(self, name: str, failure: MegatronDistillError | None, *, patient: bool) -> None:
        assert self.store is not None
        if failure is not None:
            message = json.dumps([ERROR_TYPES.index(type(failure)), str(failure)])
            self.store.set(f"{name}/error", message)
        if self.store.add(f"{name}/arrived", 1) == self.size:
            self.store.set(f"{name}/all", "here")
        try:
            if patient:
                self._wait(f"{name}/all")
            else:
                self.store.wait([f"{name}/all"], timedelta(seconds=_MEETING_SECONDS))
        except dist.DistStoreError:
            if patient:
                raise
            arrived = self.store.add(f"{name}/arrived", 0)
            raise ConfigError(
                f"only {arrived} of {self.size} ranks started within {_MEETING_SECONDS:.0f} s; "
                "check the output of the missing ranks, and the nodes that torchrun was started "
                "on"
            ) from failure
        if self.store.check([f"{name}/error"]):
            kind, message = json.loads(self.store.get(f"{name}/error"))
            raise ERROR_TYPES[kind](message) from failure

    def _wait(self, key: str) -> None:
        """Wait for a key without a limit; once the run is to stop, for ranks that are alive.

        A peer that reads a large model comes later. One that was killed, for which torchrun asks
        all others to stop, does not. Raises DistStoreError then.
        """
        assert self.store is not None
        beats = Heartbeats(self.store, self.size)
        pause = _LOOK_SECONDS[0]
        # Not `Store.wait`, during which the thread that watches for failed peers could not look.
        while not self.store.check([key]):
            if is_requested() and (silent := beats.silent()):
                names = self.roles.names(silent)
                raise dist.DistStoreError(f"no sign of {names}, and the run is to stop")
            time.sleep(pause)
            pause = min(2 * pause, _LOOK_SECONDS[1])

    def status_of(self, work: Callable[[], None]) -> int:
        """Do the work of a script, write the message of its error, and return the exit status.

        All ranks raise an error together, so its message is written once.
        """
        try:
            work()
        except MegatronDistillError as error:
            self._say(f"error: {error}", kind=type(error).__name__)
            return 1
        return 0

    def _say(self, text: str, *, kind: str) -> None:
        """Write the last message: to torchrun, which ends its report with it, or to stderr."""
        # One rank per node writes, because each node's torchrun reports separately. torchrun ends
        # the writer once another rank exits with an error, so all other ranks wait for the message.
        written = f"message/{os.environ.get('GROUP_RANK', '0')}"
        if int(os.environ.get("LOCAL_RANK", self.rank)) != 0:
            if self.store is not None:
                with suppress(dist.DistError):
                    self.store.wait([written], timedelta(seconds=_MESSAGE_SECONDS))
            return
        if not tell_torchrun(text, kind=kind):
            sys.stderr.write(f"\n{text}\n")
        if self.store is not None:
            with suppress(dist.DistError):
                self.store.set(written, "yes")


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Device:
    """The device of this process, the backend of its collectives, and how it fails.

    `alone` is entered inside everything that cleans up: a rank that fails alone must not wait.
    `bridge` connects the student's ranks with those of teachers; None: all ranks are of one world.
    `joined`: seconds since the epoch when the ranks met; None: of a world from before.
    """

    kind: str  # "cpu" or "cuda"
    backend: str  # "gloo" or "nccl"
    torch_device: torch.device
    alone: LoneFailure = LoneFailure()
    bridge: Bridge | None = None
    joined: float | None = None

    def meet(self, name: str) -> AbstractContextManager[None]:
        """Return `Bridge.meet`; without a bridge the block is one of this world alone."""
        return nullcontext() if self.bridge is None else self.bridge.meet(name)


def select_device(*, device: str, backend: str) -> Device:
    """Return this process's device: CUDA and NCCL with a GPU, else CPU and gloo.

    `device` is "auto", "cpu" or "cuda", `backend` "auto", "gloo" or "nccl". Raises ConfigError
    for a missing device or a backend that does not support it.
    """
    available = torch.cuda.is_available()
    kind = ("cuda" if available else "cpu") if device == "auto" else device
    if kind == "cuda" and not available:
        raise ConfigError(
            "runtime.device is cuda, but torch sees no CUDA device; set runtime.device=cpu or "
            "install a CUDA build of torch"
        )
    chosen = ("nccl" if kind == "cuda" else "gloo") if backend == "auto" else backend
    if chosen == "nccl" and kind == "cpu":
        raise ConfigError(
            "runtime.backend is nccl, which needs CUDA devices; set runtime.backend=gloo"
        )
    if kind == "cpu":
        return Device(kind, chosen, torch.device("cpu"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    visible = torch.cuda.device_count()
    if visible == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        local_rank = 0  # each rank sees its own GPU only, as under `srun --gpus-per-task=1`
    if local_rank >= visible:
        raise ConfigError(
            f"local rank {local_rank} has no GPU of its own: torch sees {visible}; start torchrun "
            f"with --nproc-per-node {visible} or set runtime.device=cpu"
        )
    return Device(kind, chosen, torch.device("cuda", local_rank))


def claim_device(device: Device, launch: Launch) -> None:
    """Raise ConfigError if another rank of this machine has the same GPU, which NCCL refuses."""
    if device.backend != "nccl" or launch.store is None:
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    node = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '0')}"
    if launch.store.add(f"gpu/{node}/{visible}/{device.torch_device.index}", 1) > 1:
        raise ConfigError(
            f"{launch.roles.name(launch.rank)} has the same GPU as another rank of "
            f"{socket.gethostname()}: CUDA_VISIBLE_DEVICES={visible} in both. Give each rank a GPU "
            "of its own, or start fewer ranks per node"
        )


def start_distributed(device: Device, launch: Launch, *, timeout_seconds: float) -> None:
    """Initialise the default process group: the torchrun world, or one process without torchrun.

    With several roles each has a default group of its own.

    Collective: the whole world, rendezvous.
    """
    if dist.is_initialized():
        return
    store, role = launch.store or dist.HashStore(), launch.role
    dist.init_process_group(
        device.backend,
        store=dist.PrefixStore(f"world/{role.name}", store),
        rank=launch.rank - role.first,
        world_size=role.size,
        timeout=timedelta(seconds=timeout_seconds),
        # With its device NCCL connects at once, and splits communicators for further groups.
        device_id=device.torch_device if device.backend == "nccl" else None,
    )


@contextmanager
def joined_world(
    *,
    device: str,
    backend: str,
    threads: int | None,
    timeout_seconds: float,
    transformer_engine: str = "auto",
    splits_layers: bool = False,
    launch: Launch | None = None,
) -> Iterator[Device]:
    """Join the torchrun world, or a world of one without torchrun, and leave it at the end.

    Import Megatron-Core inside, not before. An existing process group is used and not destroyed.
    Raises ConfigError, on all ranks, for a missing device or backend. An error in the block that is
    no MegatronDistillError is taken for one of this rank alone and ends the process.
    `splits_layers`: layers are split by tensor or context parallelism, see `limit_queues`; teachers
    on ranks of their own need `spread_queues`.

    Collective: the whole world, rendezvous.
    """
    launch = launch or Launch.from_environment()
    with launch.together("device"):
        if device != "cpu":
            _choose_queues(launch, splits_layers=splits_layers)
        selected = select_device(device=device, backend=backend)
        claim_device(selected, launch)
        if selected.kind == "cuda":
            prepare_collectives()
            # Before an import that starts CUDA, which would be on the first GPU.
            torch.cuda.set_device(selected.torch_device)
        if threads is not None:
            torch.set_num_threads(threads)
        prepare_megatron_core(
            on_cuda=selected.kind == "cuda", transformer_engine=transformer_engine
        )
    is_ours = not dist.is_initialized()
    store = launch.store if is_ours else None
    alone = LoneFailure(launch.rank, launch.roles, store)
    leaves_together = launch.size == 1
    try:
        with PeerWatch(alone, patience_seconds=timeout_seconds), alone:
            start_distributed(selected, launch, timeout_seconds=timeout_seconds)
            bridge = _bridge(launch, timeout_seconds)
            yield replace(selected, alone=alone, bridge=bridge, joined=time.time())
        leaves_together = True
    except MegatronDistillError:
        leaves_together = True
        raise
    finally:
        # An interrupted rank leaves without its peers, for which NCCL would wait.
        if is_ours and leaves_together:
            dist.destroy_process_group()


def _choose_queues(launch: Launch, *, splits_layers: bool) -> None:
    """Set the hardware queues that this launch needs, and log once what was set."""
    reasons: dict[str, str] = {}
    if launch.roles.are_split:
        reasons = spread_queues()
    elif splits_layers:
        reasons = limit_queues()
    if reasons and launch.rank == 0:
        texts = [f"{name}={os.environ[name]} ({reason})" for name, reason in reasons.items()]
        _LOGGER.info("set, as the environment does not: %s", ", ".join(texts))


def _bridge(launch: Launch, timeout_seconds: float) -> Bridge | None:
    if not launch.roles.are_split:
        return None
    assert launch.store is not None, "several roles take a launch of several processes"
    return open_bridge(
        launch.rank,
        launch.roles,
        launch.store,
        meet=partial(launch.together, patient=True),
        timeout_seconds=timeout_seconds,
    )
