"""A process that prints its two workers' ids and goes on; a test kills it."""

from __future__ import annotations

import itertools
import sys
import time
from multiprocessing import active_children

from megatron_distill.data.worker_processes import worker_map


def slowly(item: int) -> int:
    time.sleep(0.05)
    return item


if __name__ == "__main__":
    with worker_map(slowly, itertools.count(), workers=2) as results:
        for result in results:
            if result == 4:
                sys.stdout.write(" ".join(str(child.pid) for child in active_children()) + "\n")
                sys.stdout.flush()
