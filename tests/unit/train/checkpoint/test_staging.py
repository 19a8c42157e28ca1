"""The buffer of asynchronous saves on a GPU, on tensors that claim to be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megatron_distill.errors import CheckpointError
from megatron_distill.runtime.mcore_patches import prepare_megatron_core

prepare_megatron_core(on_cuda=False)

from megatron_distill.train.checkpoint.shards import Staging, TensorWindow  # noqa: E402


class OnDevice(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


class Status(Enum):
    success = 0
    refused = 2


@dataclass
class Driver:
    """CUDA's functions for host memory; notes what is locked and how often it was waited for."""

    locked: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    waits: int = 0
    status: Status = Status.success
    cudaError = Status

    def cudaHostRegister(self, address: int, count: int, flags: int) -> Status:  # noqa: N802
        assert flags == 0
        self.calls += 1
        if self.status is Status.success:
            self.locked[address] = count
        return self.status

    def cudaHostUnregister(self, address: int) -> Status:  # noqa: N802
        del self.locked[address]
        return Status.success

    def wait(self) -> None:
        self.waits += 1


@pytest.fixture
def driver() -> Iterator[Driver]:
    found = Driver()
    stream = SimpleNamespace(synchronize=found.wait)
    with (
        patch("torch.cuda.cudart", lambda: found),
        patch("torch.cuda.check_error", lambda status: status),
        patch("torch.cuda.current_stream", lambda: stream),
    ):
        yield found


def windows(*counts: int) -> list[TensorWindow]:
    return [
        TensorWindow(str(count), torch.arange(float(count)).as_subclass(OnDevice), (0,), (count,))
        for count in counts
    ]


def test_memory_is_locked_once_and_each_save_waits_once(driver: Driver) -> None:
    staging = Staging()
    for save in (1, 2):
        copies = staging.copies(windows(3, 40))
        assert all(not copy.data.is_cuda for copy in copies)
        assert [copy.data.tolist() for copy in copies] == [list(range(3)), list(range(40))]
        assert driver.waits == save
    assert driver.calls == 1
    ((address, count),) = driver.locked.items()
    assert address == copies[0].data.data_ptr()
    assert count == 64 + 192  # bytes, of a cache line each
    staging.copies(windows(300))
    assert driver.calls == 2
    assert list(driver.locked.values()) == [1216]
    staging.release()
    assert driver.locked == {}


def test_a_refusal_names_the_key_and_the_amount(driver: Driver) -> None:
    driver.status = Status.refused
    with pytest.raises(CheckpointError, match=r"checkpoint\.asynchronous needs .* GB"):
        Staging().copies(windows(3))
