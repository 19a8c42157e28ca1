"""Fixtures shared by every folder of tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.distributed.pool import Pool


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
