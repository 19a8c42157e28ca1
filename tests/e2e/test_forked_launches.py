"""A forked process has the parent, streams, variables and exit status of a real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.e2e.forked_launches import ForkedLaunch, run_forked
from tests.e2e.runs import environment

PARENT = """\
import os, subprocess, sys
print("parent", os.getpid(), sys.argv[1:], os.getcwd(), flush=True)
child = subprocess.Popen(
    [sys.executable, "-u", "child.py", str(os.getpid())],
    stdout=subprocess.PIPE, env={**os.environ, "RANK": "3"}, start_new_session=True, text=True,
)
written, _ = child.communicate()
print(written.strip(), child.returncode, "megatron.core" in sys.modules)
"""
CHILD = """\
import os, sys
print(os.getppid() == int(sys.argv[1]), os.getsid(0) == os.getpid(), os.environ["RANK"])
sys.stderr.write("an error\\n")
os.kill(os.getpid(), 9) if "KILLED" in os.environ else sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parent.py").write_text(PARENT)
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path


@pytest.mark.parametrize("status", [3, -9])
def test_a_program_and_the_one_it_starts(pool: Pool, folder: Path, status: int) -> None:
    variables = environment(**({"KILLED": "yes"} if status < 0 else {}))
    words = [sys.executable, "parent.py", "a", "b"]
    done = run_forked(words, variables, folder, seconds=60.0)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "an error\n"
    first, second = done.stdout.splitlines()
    assert first.split(maxsplit=2)[2] == f"['a', 'b'] {folder}"
    assert int(first.split()[1]) != os.getpid()
    assert second == f"True True 3 {status} True"


def test_the_status_of_the_launch_itself(pool: Pool, folder: Path) -> None:
    words = [sys.executable, "child.py", "0"]
    for changes, status in (({}, 3), ({"KILLED": "yes"}, -9)):
        log = folder / "log"
        launch = ForkedLaunch.start(words, environment(RANK="1", **changes), log, folder=folder)
        assert launch.wait(60.0) == status
        assert log.read_text().splitlines() == ["False True 1", "an error"]
