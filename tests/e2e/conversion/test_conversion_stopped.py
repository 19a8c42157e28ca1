"""A conversion that is interrupted, killed, or runs out of disk leaves what was there before."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.distributed.hugging_face_models import save_model, stored_tensors
from tests.distributed.pool import Pool
from tests.e2e.converting import TOOL, convert
from tests.e2e.failing import message
from tests.e2e.processes import PATIENCE, SIGNALLING_TORCHRUN, TORCHRUN, torchrun, wait_until
from tests.e2e.runs import environment
from tests.support.store_samples import contents

ATTEMPTS = 5
Sources = dict[str, tuple[str, ...]]


def commands(pool: Pool, root: Path, **changes: int) -> Sources:
    """Make a model and its checkpoint; return the commands that convert them, up to the output."""
    save_model(root / "hf", "llama2", **changes)
    endings = convert(pool, "import", "--hf", root / "hf", "--output", root / "checkpoint")
    assert [ending.status for ending in endings] == [0, 0], endings
    return {
        "import": ("import", "--hf", str(root / "hf"), "--output"),
        "export": ("export", "--checkpoint", str(root / "checkpoint"), "--hf"),
    }


@pytest.fixture(scope="module")
def small(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Half a megabyte."""
    return commands(pool, tmp_path_factory.mktemp("small"), hidden_size=128)


@pytest.fixture(scope="module")
def large(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """So many bytes that writing them takes longer than noticing that it began."""
    root = tmp_path_factory.mktemp("large")
    return commands(pool, root, vocab_size=300_000, hidden_size=256)


@pytest.mark.parametrize(("command", "world"), [("import", 2), ("export", 1)])
def test_a_real_disk_that_fills_up_while_converting(
    pool: Pool, small: Sources, small_disk: Callable[[str], Path], command: str, world: int
) -> None:
    disk = small_disk("400k")
    output = folder_with_notes(disk / "out")
    before = contents(disk)
    words = (*small[command], output, "--overwrite")
    text = message(convert(pool, *words, world=world, free=1 << 40))
    assert f"writing {output} failed" in text
    assert "No space left on device" in text
    assert contents(disk) == before
    assert [path.name for path in disk.iterdir()] == ["out"]


@pytest.mark.parametrize("command", ["import", "export"])
def test_a_parent_that_cannot_be_written(
    pool: Pool, small: Sources, small_disk: Callable[[str], Path], command: str
) -> None:
    disk = small_disk("9m")
    assert "is a mount point" in message(convert(pool, *small[command], disk))
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    text = message(convert(pool, *small[command], disk / "out"))
    assert f"cannot write {disk}/out: Read-only file system" in text


def is_writing(output: Path) -> bool:
    partial = output.with_name(f"{output.name}.partial")
    files = [*partial.glob("*.distcp"), *partial.glob("*.safetensors")]
    return any(file.stat().st_size > 2**20 for file in files if file.exists())


def folder_with_notes(output: Path) -> Path:
    """Make the folder that a conversion is to replace."""
    output.mkdir(parents=True)
    (output / "notes").write_text("mine")
    return output


def stop(process: psutil.Process) -> None:
    """Stop a process, and wait until it stands, or has ended."""
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        wait_until(lambda: process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))


def has_signal(process: psutil.Process) -> bool:
    """Whether a signal waits until the process goes on."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return any(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))


def writing(words: tuple[str, ...], folder: Path) -> tuple[psutil.Popen, Path]:
    """A conversion that stands in the middle of its writing, and its output.

    One that has ended before it was noticed is followed by another one.
    """
    for attempt in range(ATTEMPTS):
        output = folder_with_notes(folder / str(attempt) / "out")
        process = psutil.Popen(
            [sys.executable, str(TOOL), *words, str(output), "--overwrite"],
            env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        while process.poll() is None and not is_writing(output):
            time.sleep(0.001)
        stop(process)
        if is_writing(output):
            return process, output
        process.kill()
        reported = process.communicate()
    raise AssertionError(f"no writing was noticed: {reported}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"), [("import", signal.SIGINT), ("export", signal.SIGTERM)]
)
def test_an_interrupted_conversion_leaves_the_old_folder(
    large: Sources, tmp_path: Path, command: str, number: signal.Signals
) -> None:
    process, output = writing(large[command], tmp_path)
    process.send_signal(number)
    process.resume()
    time.sleep(0.01)
    if process.poll() is None:
        process.send_signal(number)  # as by an impatient user, or by torchrun too
    written, reported = process.communicate(timeout=PATIENCE)
    assert process.returncode == 128 + number, reported
    assert "Traceback" not in reported + written
    assert "stopped; nothing was written" in reported
    assert contents(output.parent) == {"out/notes": b"mine"}
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "launcher"),
    [("import", TORCHRUN), ("export", SIGNALLING_TORCHRUN)],
    ids=["import, torchrun", "export, wrapper"],
)
def test_two_interrupted_ranks_leave_the_old_folder(
    large: Sources, tmp_path: Path, command: str, launcher: tuple[str, ...]
) -> None:
    for attempt in range(ATTEMPTS):
        output = folder_with_notes(tmp_path / str(attempt) / "out")
        words = [*large[command], str(output), "--overwrite"]
        with torchrun(tmp_path, words, launcher=launcher, script=TOOL) as started:
            started.wait_until(lambda output=output: is_writing(output))  # type: ignore[misc]
            ranks = started.ranks()
            for rank in ranks:
                stop(rank)
            if len(ranks) < 2 or not is_writing(output):  # it was noticed too late
                continue
            started.process.send_signal(signal.SIGINT)
            wait_until(lambda ranks=ranks: all(map(has_signal, ranks)))  # type: ignore[misc]
            for rank in ranks:
                rank.resume()
            assert started.wait() != 0
            started.wait_for_all()
        break
    text = started.log.read_text()
    assert "stopped; nothing was written" in text, text
    # By themselves, before torchrun kills what is left after half a minute.
    assert started.statuses()[0] in ("130", "143"), text
    assert contents(output.parent) == {"out/notes": b"mine"}
    assert [path.name for path in output.parent.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["import", "export"])
def test_a_killed_conversion_leaves_a_partial_folder_that_the_next_one_replaces(
    pool: Pool, small: Sources, large: Sources, tmp_path: Path, command: str
) -> None:
    process, output = writing(large[command], tmp_path)
    process.kill()
    process.communicate()
    assert sorted(path.name for path in output.parent.iterdir()) == ["out", "out.partial"]
    assert contents(output) == {"notes": b"mine"}
    (ending,) = convert(pool, *small[command], output, "--overwrite", world=1)
    assert ending.status == 0, ending.stderr
    assert [path.name for path in output.parent.iterdir()] == ["out"]
    assert not (output / "notes").exists()
    if command == "export":
        expected, found = stored_tensors(Path(small["import"][2])), stored_tensors(output)
        assert expected.keys() == found.keys()
        assert all(found[name].equal(value) for name, value in expected.items())
