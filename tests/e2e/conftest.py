"""What every end-to-end run starts from."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.runs import (
    GPT_LIKE,
    MOE,
    STUDENT,
    TEACHER,
    Inputs,
    train_tokenizer,
    write_corpus,
)


@pytest.fixture(scope="session")
def inputs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """One corpus, one tokenizer and the configurations that all end-to-end tests vary."""
    found = Inputs(tmp_path_factory.mktemp("e2e"))
    write_corpus(found.corpus)
    assert pool.run(1, train_tokenizer, found, timeout=120.0) == [301]
    for name, student in (("dense", STUDENT), ("gpt", GPT_LIKE), ("moe", MOE)):
        found.write(name, student, TEACHER)
    return found


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
