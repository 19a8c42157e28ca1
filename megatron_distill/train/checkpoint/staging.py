"""Host memory for copies of shards, used again from save to save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_distill.errors import CheckpointError
from megatron_distill.train.checkpoint.shards import Window

_ALIGNMENT = 64  # bytes; of every dtype, and of a cache line


class Staging:
    """A buffer of the size of this rank's file, page-locked where it is filled from a GPU.

    The memory is allocated in the first save: its first touch is slow, and so is page-locking.
    torch's page-locked tensors would have the next power of two in bytes. Raises CheckpointError
    where the memory cannot be page-locked.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._is_locked = False

    @torch.no_grad()
    def copies(self, windows: Sequence[Window]) -> list[Window]:
        """Return the windows with their values in the buffer, valid until the next call.

        Copies from a GPU are started on the current stream, after its work, and waited for once.
        """
        on_device = any(window.data.is_cuda for window in windows)
        self._reserve(sum(_aligned(window.data.nbytes) for window in windows), locked=on_device)
        copied, at = [], 0
        for window in windows:
            data = window.data
            room = self._buffer[at : at + data.nbytes].view(data.dtype).view(data.shape)
            room.copy_(data, non_blocking=True)
            copied.append(replace(window, data=room))
            at += _aligned(data.nbytes)
        if on_device:
            torch.cuda.current_stream().synchronize()
        return copied

    def release(self) -> None:
        """Free the memory."""
        if self._is_locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._buffer.data_ptr()))
            self._is_locked = False
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, count: int, *, locked: bool) -> None:
        if self._buffer.numel() >= count:
            return
        self.release()
        self._buffer = torch.empty(count, dtype=torch.uint8)
        if locked:
            cuda = torch.cuda.cudart()
            status = cuda.cudaHostRegister(self._buffer.data_ptr(), count, 0)
            if status != cuda.cudaError.success:
                raise CheckpointError(
                    f"checkpoint.asynchronous needs {count / 1e9:.2f} GB of page-locked host "
                    f"memory on this rank, which CUDA refused ({status}); free host memory, or set "
                    "checkpoint.asynchronous=false"
                )
            self._is_locked = True


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT
