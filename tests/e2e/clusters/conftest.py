"""The Slurm that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slurm_cluster import Cluster, missing_programs, slurm_cluster


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The Slurm of the file; a failed test leaves no job that holds the nodes of the next one."""
    yield slurm
    slurm.cancel_jobs()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A Slurm of four nodes."""
    missing = missing_programs()
    if missing:
        pytest.skip(f"needs Debian's slurm-wlm and munge: there is no {', '.join(missing)}")
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), nodes=("n1", "n2", "n3", "n4")) as found:
        yield found
