"""TensorBoard and Weights & Biases."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_distill.errors import ConfigError
from megatron_distill.train.metrics import TensorBoardSink, WandbSink

SOURCES = {"wiki": {"ce_loss": 4.125}}
VALIDATION = {
    "step": 2,
    "validation": {"ce_loss": 4.25, "top1_agreement": 0.5, "sources": SOURCES},
}

QUIZ = {"acc": 0.5, "n": 14, "groups": {"0": {"acc": 0.25}}, "not_comparable": ["limit"]}
EVALUATION = {"step": 2, "evaluation": {"student": {"quiz": QUIZ}, "teacher": {"quiz": QUIZ}}}


def step_record(step: int, loss: float) -> dict[str, object]:
    return {"step": step, "tokens": step * 100, "ce_loss": loss}


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_holds_every_scalar_at_its_step(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, resume_step=0)
    sink.write(step_record(1, 5.0))
    sink.write(step_record(2, 4.5))
    sink.write(VALIDATION)
    sink.write(EVALUATION)
    sink.close()
    assert scalars(tmp_path, "evaluation/student/quiz/acc") == [(2, 0.5)]
    assert scalars(tmp_path, "evaluation/teacher/quiz/n") == [(2, 14.0)]
    assert scalars(tmp_path, "train/ce_loss") == [(1, 5.0), (2, 4.5)]
    assert scalars(tmp_path, "train/tokens") == [(1, 100.0), (2, 200.0)]
    assert scalars(tmp_path, "validation/ce_loss") == [(2, 4.25)]
    assert scalars(tmp_path, "validation/top1_agreement") == [(2, 0.5)]
    assert scalars(tmp_path, "validation/sources/wiki/ce_loss") == [(2, 4.125)]


def test_tensorboard_shows_a_resumed_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = TensorBoardSink(tmp_path, resume_step=0)
    for step in range(1, 5):
        killed.write(step_record(step, 5.0))
    killed.close()
    # Event files are told apart and ordered by the second in their name.
    monkeypatch.setattr("time.time", lambda: 4_000_000_000.0)
    resumed = TensorBoardSink(tmp_path, resume_step=2)
    for step in range(3, 6):
        resumed.write(step_record(step, 4.0))
    resumed.close()
    expected = [(1, 5.0), (2, 5.0), (3, 4.0), (4, 4.0), (5, 4.0)]
    assert scalars(tmp_path, "train/ce_loss") == expected


def test_a_missing_tensorboard_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"logging\.tensorboard=true.*pip install tensorboard"):
        TensorBoardSink(tmp_path, resume_step=0)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every connection to another machine fails, and there is no login to find."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/dev/null")
    yield
    import wandb

    wandb.teardown()


def wandb_sink(output: Path, *, mode: str = "offline", resume_step: int = 0) -> WandbSink:
    return WandbSink(
        output,
        project="distill",
        name="a name",
        mode=mode,
        settings={"train": {"steps": 20}},
        resume_step=resume_step,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "did not come true in 240 seconds"
        time.sleep(0.05)


def run_files(output: Path) -> list[Path]:
    return sorted(output.glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.slow
def test_wandb_offline_writes_a_run_without_network_and_goes_on_under_its_id(
    tmp_path: Path, no_network: None
) -> None:
    sink = wandb_sink(tmp_path)
    sink.write(step_record(1, 5.0))
    sink.write(VALIDATION)
    sink.close()
    (first,) = run_files(tmp_path)
    run_id = (tmp_path / "wandb_run_id").read_text().strip()
    assert first.name == f"run-{run_id}.wandb"
    words = (b"train/ce_loss", b"validation/top1_agreement", b"distill", b"a name")
    # wandb's own process writes the file, a moment after it has reported the run as finished.
    wait_until(lambda: all(word in first.read_bytes() for word in words))

    wandb_sink(tmp_path, resume_step=1).close()
    assert {file.name for file in run_files(tmp_path)} == {first.name}
    wandb_sink(tmp_path, resume_step=0).close()
    assert len({file.name for file in run_files(tmp_path)}) == 2, "a new run has a new id"


def test_wandb_online_without_a_login_is_a_config_error(tmp_path: Path, no_network: None) -> None:
    with pytest.raises(ConfigError, match=r"logging\.wandb\.mode=online.*mode=offline"):
        wandb_sink(tmp_path, mode="online")


def test_a_missing_wandb_names_the_package_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logging\.wandb.*pip install wandb"):
        wandb_sink(tmp_path)
