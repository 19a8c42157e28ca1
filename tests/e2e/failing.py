"""The entry script called in pool workers, with its output and its exit status."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock, patch

from tests.distributed.pool import Pool
from tests.e2e.runs import SECONDS

SCRIPT = Path(__file__).parents[2] / "launch" / "pretrain_distill.py"


@dataclass(frozen=True)
class Ending:
    """How one rank ended: exit status, and what it wrote to stderr and to stdout."""

    status: int
    stderr: str
    stdout: str = ""


def script(path: Path) -> ModuleType:
    """Import a script from its file, as nothing else imports it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def file_size_limit(limit: int | None) -> Iterator[None]:
    """Let writing fail beyond so many bytes of a file, as on a disk that fills up."""
    if limit is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def call_script(
    rank: int,
    world: int,
    path: Path,
    words: Sequence[str],
    limits: dict[int, int] | None = None,
    variables: dict[str, str] | None = None,
    free: int | None = None,
) -> Ending:
    """Call a script's main function as torchrun would, or alone on one rank.

    `limits` are the bytes that a file may have on some ranks, `free` those free on the disk.
    """
    places = {"RANK": str(rank), "LOCAL_RANK": str(rank), **(variables or {})}
    disk = patch("shutil.disk_usage", return_value=Mock(free=free))
    stderr, stdout = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, places),
        disk if free is not None else contextlib.nullcontext(),
        contextlib.redirect_stderr(stderr),
        contextlib.redirect_stdout(stdout),
        file_size_limit((limits or {}).get(rank)),
    ):
        status = script(path).main(words)
    return Ending(status, stderr.getvalue(), stdout.getvalue())


def call_alone(pool: Pool, path: Path, *words: object) -> Ending:
    """Call a script in one pool worker."""
    (ending,) = pool.run(1, call_script, path, [str(word) for word in words], timeout=SECONDS)
    return ending  # type: ignore[no-any-return]


def call(
    pool: Pool,
    config: Path,
    output: Path,
    *overrides: str,
    world: int = 2,
    limits: dict[int, int] | None = None,
) -> list[Ending]:
    """Call the script on every rank; no answer within SECONDS is a failure."""
    arguments = ["--config", str(config), f"output={output}", *overrides]
    return pool.run(world, call_script, SCRIPT, arguments, limits, timeout=SECONDS)


def message(endings: Sequence[Ending]) -> str:
    """Return the one message of a run that failed on all ranks."""
    assert [ending.status for ending in endings] == [1] * len(endings)
    assert not any("Traceback" in ending.stderr for ending in endings)
    first, *others = (ending.stderr for ending in endings)
    assert not any("error: " in stderr for stderr in others)
    assert first.count("\nerror: ") == 1, first
    return first.split("\nerror: ")[1].strip()
