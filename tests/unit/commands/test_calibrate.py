"""The command `calibrate`: runs of another device, and a file that cannot be written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from megatron_distill.cli import main
from megatron_distill.commands import calibrate
from megatron_distill.planning.device import load_device
from tests.unit.commands.test_plan import RUN

ON_CPU = {"device": {"kind": "cpu", "name": "EPYC 9"}}
ON_GPU = {"device": {"kind": "gpu", "name": "NVIDIA A100-SXM4-80GB"}}


def run_of(folder: Path, *, runtime: str = "{}", seconds: float = 1.0, **more: object) -> Path:
    """A run of one device, each of whose phases takes so long."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"{RUN}runtime: {runtime}\n")
    phases = ("teacher", "forward", "loss", "backward", "optimizer")
    record = {
        "step_seconds": 5 * seconds,
        "timers": dict.fromkeys(phases, 1e3 * seconds),
        "tokens_per_second": 1.0,
        "tflops_per_device": 1e6,
    }
    device = {"device": more.pop("device")} if "device" in more else {}  # once in a start
    lines = [json.dumps({**record, **more, **one}) for one in (device, *[{}] * 4)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize(
    ("runtime", "more", "device", "reason"),
    [
        ("{device: cpu}", {}, "h100-80gb", "ran on a CPU (runtime.device = 'cpu')"),
        ("{device: cuda}", {}, "mine.yaml", "ran on a GPU (runtime.device = 'cuda')"),
        ("{backend: nccl}", {}, "mine.yaml", "ran on a GPU (runtime.backend = 'nccl')"),
        ("{}", {"mfu": 0.4}, "mine.yaml", "ran on a GPU (its log has `mfu`)"),
        ("{}", ON_CPU, "h100-80gb", "ran on a CPU (EPYC 9, as its log names it)"),
        (
            "{device: auto}",
            ON_GPU,
            "mine.yaml",
            "ran on a GPU (NVIDIA A100-SXM4-80GB, as its log names it)",
        ),
    ],
)
def test_a_run_of_another_kind_of_device_refines_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    runtime: str, more: dict[str, object], device: str, reason: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    fields = load_device("l40s").model_dump(mode="json") | {"kind": "cpu", "cores": 2}
    Path("mine.yaml").write_text(yaml.safe_dump(fields))
    run = run_of(tmp_path / "run", runtime=runtime, **more)
    assert main(["calibrate", "--run", str(run), "--device", device, "--output", "x.yaml"]) == 1
    text = capsys.readouterr().err
    assert f"error: --device {device}: " in text
    assert f"--run {run} {reason}; give the device of the run" in text
    assert not Path("x.yaml").exists()


def test_factors_far_from_one_are_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    far = str(run_of(tmp_path / "far"))
    assert main(["calibrate", "--run", far, "--device", "h100-80gb"]) == 0
    text = capsys.readouterr().err
    assert f"WARNING rank 0 megatron_distill.commands.calibrate: --run {far}: factors " in text
    assert "do not say on which device it ran" in text
    assert "(--device h100-80gb)" in text
    near = run_of(tmp_path / "near", runtime="{device: cuda}", seconds=0.1)
    assert main(["calibrate", "--run", str(near), "--device", "h100-80gb"]) == 0
    assert "factors beyond" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "other"),
    [
        ("a100-80gb", False),
        ("a100-40gb", True),  # of another memory
        ("h100-80gb", True),
        ("mine.yaml", False),  # calibrated there: the title is the name
    ],
)
def test_another_model_of_a_gpu_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    device: str, other: bool,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    title = {"title": "NVIDIA A100-SXM4-80GB"}
    Path("mine.yaml").write_text(
        yaml.safe_dump(load_device("l40s").model_dump(mode="json") | title)
    )
    run = str(run_of(tmp_path / "run", **ON_GPU))
    assert main(["calibrate", "--run", run, "--device", device]) == 0
    text = capsys.readouterr().err
    named = f"--run {run} ran on NVIDIA A100-SXM4-80GB, and --device {device} is "
    assert (named in text) == other
    assert "do not say on which device" not in text


def test_an_output_that_the_system_refuses_is_named_before_the_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "_measured", lambda output: pytest.fail("it measures"))
    with pytest.raises(SystemExit) as ended:
        main(["calibrate", "--output", "/proc/x.yaml"])
    assert ended.value.code == 2
    assert "--output /proc/x.yaml: cannot be written (" in capsys.readouterr().err


def test_a_measurement_that_cannot_be_written_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk may have become full meanwhile."""
    folder = tmp_path / "gone"
    folder.mkdir()

    def measured(_: Path) -> object:
        folder.rmdir()
        return load_device("l40s")

    monkeypatch.setattr(calibrate, "_measured", measured)
    assert main(["calibrate", "--output", str(folder / "x.yaml")]) == 1
    found = capsys.readouterr()
    assert "Standard output has its content instead" in found.err
    assert yaml.safe_load(found.out)["name"] == "l40s"


def test_the_usual_file_is_tried_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("this-cpu.yaml", "this-gpu.yaml"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate"]) == 1
    assert "is a folder; give --output, a file elsewhere" in capsys.readouterr().err
