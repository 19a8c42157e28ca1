"""A file whose bytes go to disk while more are written, so that the end need not wait for all."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FLUSH_BYTES = 2**27


class FlushedFile(io.FileIO):
    """A file for writing that flushes itself in a thread, every 128 MiB; raises OSError.

    A system that holds gigabytes unwritten stops whoever writes on until the disk has caught up.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "wb")
        self._unflushed = 0
        self._flush: threading.Thread | None = None
        self._failure: OSError | None = None

    def write(self, data: Buffer, /) -> int:
        """Write; raises what an earlier flush failed with."""
        count = super().write(data)
        self._unflushed += count
        if self._unflushed >= _FLUSH_BYTES and (self._flush is None or not self._flush.is_alive()):
            self._wait()
            self._unflushed = 0
            self._flush = threading.Thread(target=self._to_disk)
            self._flush.start()
        return count

    def close(self) -> None:
        """Wait for the flush that is under way, and close."""
        if not self.closed:
            try:
                self._wait()
            finally:
                super().close()

    def _wait(self) -> None:
        if self._flush is not None:
            self._flush.join()
            self._flush = None
        if self._failure is not None:
            # The system says it once; to fsync at the end the file would look whole.
            failure, self._failure = self._failure, None
            raise failure

    def _to_disk(self) -> None:
        try:
            os.fdatasync(self.fileno())
        except OSError as error:
            self._failure = error
