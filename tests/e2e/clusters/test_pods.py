"""The pods of a JobSet as two processes of this machine: to the end, and a wrong setting."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from megatron_distill.launching.records import Launches, Status
from tests.distributed.pool import Pool
from tests.e2e.forked_launches import ForkedLaunch
from tests.e2e.processes import PATIENCE, ROOT
from tests.e2e.runs import course, environment, run, step_records
from tests.support.slurm_cluster import free_ports

pytestmark = pytest.mark.slow

SAVING = ("train.steps=3", "checkpoint.save=true")


def run_pods(attempt: int, *words: str) -> tuple[list[int], str]:
    """Run two pods to their end; returns their exit statuses and what they wrote."""
    command = [sys.executable, "-m", "megatron_distill.launching.pod", "--job", "distill",
               "--attempt", str(attempt), "--pods", "localhost,127.0.0.1", "--port",
               str(free_ports(1)[0]), "--ranks-per-node", "1", "--max-starts", "2"]  # fmt: skip
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory()))
        logs, pods = [place / "0", place / "1"], []
        for index, log in enumerate(logs):
            variables = environment(DISTILL_NODE_INDEX=str(index))
            pod = ForkedLaunch.start([*command, "--", "train", *words], variables, log, folder=ROOT)
            stack.callback(pod.end)
            pods.append(pod)
        statuses = [pod.wait(PATIENCE) for pod in pods]
        return statuses, "".join(log.read_text() for log in logs)


def test_pods_train_as_one_job_and_end_when_it_is_done(
    pool: Pool, dense: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    # A JobSet of the same name was stopped and deleted.
    before = output / "launches" / "distill-0"
    before.mkdir(parents=True)
    (before / "rank_00000.unfinished").touch()
    statuses, text = run_pods(0, str(dense), f"output={output}", *SAVING)
    assert statuses == [0, 0], text
    reference = run(pool, 2, dense, tmp_path / "reference", *SAVING)
    assert course(step_records(output)) == course(reference)
    launches = Launches(output / "launches", output, "")
    (launch,) = launches.all()
    outcome = launches.outcome(launch)
    assert outcome is not None
    assert outcome.status is Status.DONE
    statuses, text = run_pods(1, str(dense), f"output={output}", *SAVING)
    assert statuses == [0, 0], text
    assert "nothing to do" in text


def test_pods_end_their_job_after_an_error_in_the_settings(dense: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    statuses, text = run_pods(0, str(dense), f"output={output}", *SAVING, "parallel.tensor=4")
    assert statuses == [78, 78], text
    assert "parallel.tensor" in text
    assert "Traceback" not in text
