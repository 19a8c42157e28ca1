"""Fixtures shared by every folder of tests."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.distributed.pool import Pool

# A deadline would depend on what else the machine does; laws that need more examples ask for them.
hypothesis.settings.register_profile("tests", deadline=None, max_examples=40)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo workers, started at the first call and ended with the session."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A process that computes with one thread, as a measure of row blocks needs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a memory file system of a given size, where this process may."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("mounting a file system is not permitted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
