"""Fixtures shared by every folder of tests."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo workers, started at the first call and ended with the session."""
    workers = Pool()
    yield workers
    workers.close()
