"""Memory of a GPU between processes: who may share it, and how it is named. Without a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_distill.errors import ConfigError
from megatron_distill.train.teachers.device_slots import (
    open_memory,
    require_peer,
    share_memory,
    share_with,
)

KEY = "teacher.transfer.backend"
HANDLES = (3, b"\x01\x02", 64, 0, b"/torch_1", 7, b"\xff\x00", True)


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Memory whose allocator is told to be CUDA's."""
    found = torch.zeros(64, dtype=torch.uint8)
    segment = {"address": found.data_ptr(), "total_size": 64, "is_expandable": False}
    properties = SimpleNamespace(uuid="GPU-a")
    for name, value in (
        ("get_allocator_backend", lambda: "native"),
        ("memory_snapshot", lambda: [segment]),
        ("get_device_properties", lambda _: properties),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    return found


@pytest.mark.parametrize("cause", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_memory_that_cannot_be_shared_is_refused_by_name(
    whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", cause)
    if cause.startswith("backend"):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    else:
        (segment,) = torch.cuda.memory_snapshot()
        segment["is_expandable"] = True
    with pytest.raises(ConfigError, match=f"{KEY} = 'ipc'.*{cause}.*set {KEY} to nccl or gloo"):
        share_memory(whole, KEY)


def test_a_driver_that_does_not_share_is_named(whole: torch.Tensor) -> None:
    # Memory of a CPU has no handle.
    with pytest.raises(ConfigError, match="does not share memory between processes of "):
        share_memory(whole, KEY)


def test_handles_travel_as_json_and_open_on_the_own_device(
    whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[Any, ...]] = []

    def open_shared(*handles: Any) -> torch.UntypedStorage:
        opened.append(handles)
        return whole.untyped_storage()

    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: HANDLES)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(open_shared))
    published = json.loads(json.dumps(share_memory(whole, KEY)))
    found = open_memory(published, torch.device("cpu", 0), KEY)
    assert published[0] == "GPU-a"
    assert opened == [(0, *HANDLES[1:])]
    assert found.data_ptr() == whole.data_ptr()
    assert found.shape == (64,)


def test_each_sender_has_a_count_of_its_own(
    whole: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter(range(7, 10))  # torch makes one whenever memory is shared
    monkeypatch.setattr(
        torch.UntypedStorage, "_share_cuda_", lambda _: (*HANDLES[:5], next(counts), *HANDLES[6:])
    )
    published = json.loads(json.dumps(share_with(whole, (2, 5), KEY)))
    assert published.keys() == {"2", "5"}
    assert [shared[6] for shared in published.values()] == [7, 8]


@pytest.mark.parametrize(
    ("gpus", "reaches", "expected"),
    [
        (["GPU-b"], True, "teacher.0 does not see the GPU of student.1, GPU-a.*'5'; let each rank"),
        (["GPU-b", "GPU-a"], False, "of teacher.0 cannot access the memory of that of student.1"),
        (["GPU-b", "GPU-a"], True, None),
        (["GPU-a"], False, None),  # its own
    ],
)
def test_a_gpu_that_cannot_write_the_slots_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], reaches: bool, expected: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    properties = [SimpleNamespace(uuid=gpu) for gpu in gpus]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: reaches)
    names = {"receiver": "student.1", "sender": "teacher.0"}

    def require() -> None:
        require_peer(["GPU-a", *HANDLES], torch.device("cuda", 0), key=KEY, **names)

    if expected is None:
        require()
        return
    with pytest.raises(ConfigError, match=f"{KEY} = 'ipc': .*{expected}"):
        require()
