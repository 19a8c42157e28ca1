"""The log of metrics: JSON lines, resumption, scalars for trackers."""

import json
import logging
import shutil
from pathlib import Path

import pytest

from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.train.metrics import JsonLinesSink, MetricsLog, flat_scalars, to_json


def step_record(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "tokens": step * 100, "ce_loss": 5.0 - 0.125 * step, **values}


def write_run(path: Path, steps: range, *, resume_step: int) -> None:
    with MetricsLog([JsonLinesSink(path, resume_step=resume_step)]) as log:
        for step in steps:
            log.write(step_record(step))
            if step % 4 == 0:
                log.write({"step": step, "validation": {"ce_loss": 4.5}})


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_a_log_that_was_removed_is_told_at_the_end_of_a_run(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with checkpoint.save=false, whose saves do not find that."""
    monkeypatch.setattr(logging.getLogger("megatron_distill"), "propagate", True)
    for number, (is_removed, failed) in enumerate([(False, False), (True, True), (True, False)]):
        log = path.with_name(str(number)) / "metrics.jsonl"
        sink = JsonLinesSink(log, resume_step=0)
        sink.write(step_record(1))
        if is_removed:
            shutil.rmtree(log.parent)
        assert not caplog.messages
        sink.close(failed=failed)
    (text,) = {*caplog.messages}
    assert text == (
        f"{log} is gone, removed or renamed since the start of this run, and its figures with it; "
        "start it again, and leave the folder in place"
    )


def test_a_record_is_in_the_file_before_the_log_is_closed(path: Path) -> None:
    sink = JsonLinesSink(path, resume_step=0)
    sink.write(step_record(1, kd_loss=0.1))
    assert read(path) == [{"step": 1, "tokens": 100, "ce_loss": 4.875, "kd_loss": 0.1}]
    sink.close()


@pytest.mark.parametrize("resume_step", [0, 1, 4, 6, 7])
def test_resuming_a_killed_run_leaves_the_file_of_an_uninterrupted_one(
    path: Path, tmp_path: Path, resume_step: int
) -> None:
    write_run(path, range(1, 8), resume_step=0)
    write_run(path, range(resume_step + 1, 13), resume_step=resume_step)
    whole = tmp_path / "whole.jsonl"
    write_run(whole, range(1, 13), resume_step=0)
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("torn", ['{"step": 4, "ce_lo', "{", '{"step": 3}', '{"step": 9, "a": 1}'])
def test_a_torn_last_line_is_dropped_whatever_step_it_names(path: Path, torn: str) -> None:
    write_run(path, range(1, 4), resume_step=0)
    before = path.read_bytes()
    with path.open("a") as file:
        file.write(torn)
    JsonLinesSink(path, resume_step=3).close()
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage", [b"\x00\x00\x00", b"not json", b"[1, 2]", b'{"tokens": 3}', b"", b"\xff\xfe{}"]
)
def test_a_damaged_line_is_dropped_and_reported(
    path: Path, damage: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_distill"), "propagate", True)
    write_run(path, range(1, 4), resume_step=0)
    before = path.read_bytes()
    first, rest = before.split(b"\n", 1)
    path.write_bytes(first + b"\n" + damage + b"\n" + rest)
    JsonLinesSink(path, resume_step=3).close()
    assert path.read_bytes() == before
    assert f"{path}: dropped lines that are not records: [2]" in caplog.text


def test_a_whole_file_is_not_rewritten(path: Path) -> None:
    write_run(path, range(1, 4), resume_step=0)
    before = path.stat().st_ino
    JsonLinesSink(path, resume_step=3).close()
    assert path.stat().st_ino == before
    JsonLinesSink(path, resume_step=2).close()
    assert path.stat().st_ino != before, "what is dropped is dropped by replacing the file"
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_log_whose_checkpoints_are_gone_is_set_aside(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron_distill"), "propagate", True)
    before = []
    for last in (8, 9, 8):
        path.parent.mkdir(exist_ok=True)
        path.write_text('{"step": 0, "evaluation": {}}\n')  # an evaluation before the first step
        write_run(path, range(1, last), resume_step=0)
        before.append(path.read_bytes())
        JsonLinesSink(path, resume_step=0).close()
        assert read(path) == [{"step": 0, "evaluation": {}}]
    names = ["metrics.step_0000007.jsonl", "metrics.step_0000008.jsonl"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["metrics.jsonl", *names]
    assert [(path.parent / name).read_bytes() for name in names] == before[:2]
    assert f"{path} has 8 records up to step 7, but there is no checkpoint" in caplog.text
    assert str(path.parent / names[0]) in caplog.text
    path.write_text('{"step": 7}\n')
    JsonLinesSink(path, resume_step=0).close()
    assert (path.parent / "metrics.step_0000007.2.jsonl").read_text() == '{"step": 7}\n'


def test_non_finite_values_are_null_and_named() -> None:
    record = step_record(
        3,
        kd_loss=float("nan"),
        grad_norm=float("inf"),
        validation={"ce_loss": float("-inf"), "kd_loss": 1.0},
    )

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    read_back = json.loads(to_json(record), parse_constant=refuse)
    assert read_back == {
        "step": 3,
        "tokens": 300,
        "ce_loss": 4.625,
        "kd_loss": None,
        "grad_norm": None,
        "validation": {"ce_loss": None, "kd_loss": 1.0},
        "not_finite": {
            "kd_loss": "NaN",
            "grad_norm": "Infinity",
            "validation.ce_loss": "-Infinity",
        },
    }


def test_floats_are_written_without_loss() -> None:
    value = 0.1 + 0.2
    assert json.loads(to_json({"step": 1, "ce_loss": value}))["ce_loss"] == value


def test_scalars_are_the_numbers_under_the_name_of_their_part() -> None:
    record = step_record(2, skipped=True, note="x", missing=None)
    assert dict(flat_scalars(record)) == {"train/tokens": 200.0, "train/ce_loss": 4.75}
    validation = {"step": 2, "validation": {"ce_loss": 4.5, "samples": 8}}
    assert dict(flat_scalars(validation)) == {"validation/ce_loss": 4.5, "validation/samples": 8.0}


def test_a_record_inside_a_record_is_flattened_under_its_whole_path() -> None:
    sources = {"wiki": {"ce_loss": 2.5, "ce_tokens": 7}, "code": {"ce_tokens": 0}}
    step = {"step": 1, "ce_loss": 2.5, "sources": sources}
    assert dict(flat_scalars(step)) == {
        "train/ce_loss": 2.5,
        "train/sources/wiki/ce_loss": 2.5,
        "train/sources/wiki/ce_tokens": 7.0,
        "train/sources/code/ce_tokens": 0.0,
    }
    validation = {"step": 1, "validation": {"kd_loss": 1.0, "sources": {"a": {"ce_loss": 3.0}}}}
    assert dict(flat_scalars(validation)) == {
        "validation/kd_loss": 1.0,
        "validation/sources/a/ce_loss": 3.0,
    }
    timers = {"small": {"step": 3, "forward": 2.0}, "step": {"step": 3, "forward": 4.0}}
    assert dict(flat_scalars({"step": 1, "teacher_timers": timers})) == {
        "train/teacher_timers/small/forward": 2.0,
        "train/teacher_timers/step/forward": 4.0,
    }
    broken = to_json({"step": 1, "sources": {"wiki": {"ce_loss": float("nan")}}})
    assert json.loads(broken)["not_finite"] == {"sources.wiki.ce_loss": "NaN"}


class Recorder:
    def __init__(self, *, fails: bool = False) -> None:
        self.records: list[object] = []
        self.closed: list[bool] = []
        self.fails = fails

    def write(self, record: object) -> None:
        self.records.append(record)

    def close(self, *, failed: bool = False) -> None:
        self.closed.append(failed)
        if self.fails:
            raise OSError("gone")


def test_every_sink_gets_every_record_and_is_closed_once_even_if_one_fails() -> None:
    sinks = [Recorder(), Recorder(fails=True), Recorder()]
    log = MetricsLog(sinks)
    log.write(step_record(1))
    with pytest.raises(OSError, match="gone"):
        log.close()
    log.close()
    assert [sink.records for sink in sinks] == [[step_record(1)]] * 3
    assert [sink.closed for sink in sinks] == [[False]] * 3


def test_a_sink_learns_whether_the_run_failed() -> None:
    sinks = [Recorder(), Recorder()]
    with pytest.raises(CheckpointError), MetricsLog(sinks[:1]):
        raise CheckpointError("the last save failed")
    with MetricsLog(sinks[1:]):
        pass
    assert [sink.closed for sink in sinks] == [[True], [False]]


def test_a_log_without_sinks_takes_records_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricsLog() as log:
        log.write(step_record(1))
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_not_a_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match=r"output: cannot write .*run/metrics\.jsonl"):
        JsonLinesSink(tmp_path / "run" / "metrics.jsonl", resume_step=0)


def test_a_full_disk_is_a_config_error() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    sink = JsonLinesSink.__new__(JsonLinesSink)
    sink._path, sink._file = full, full.open("w")
    with pytest.raises(ConfigError, match="No space left on device; free space or set `output`"):
        sink.write(step_record(1))
