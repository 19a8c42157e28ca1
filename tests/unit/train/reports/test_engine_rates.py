"""FP8 on devices without its rate, and plans without Transformer Engine by rates that have it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_distill.cli import main
from megatron_distill.config import load_capture_config
from megatron_distill.errors import ConfigError
from megatron_distill.planning.device import DeviceProfile, load_device, write_device
from megatron_distill.train.reports.engine_rates import check_fp8_rate, engine_note
from megatron_distill.train.reports.memory_check import refuse_beyond_device
from tests.guards.source_tree import ROOT
from tests.unit.commands.test_plan import RUN, SEVERAL
from tests.unit.train.reports.test_planned_run import run_config

WITH_FP8 = "b200, h100-80gb, h200, l40s"


def cpu(**changes: Any) -> DeviceProfile:
    fields = load_device("h200").model_dump() | {"kind": "cpu", "cores": 2, "name": "this-cpu"}
    return DeviceProfile.model_validate(fields | changes)


@pytest.mark.parametrize("name", ["a100-40gb", "a100-80gb", "h100-80gb-torch"])
@pytest.mark.parametrize("key", ["train.fp8", "teacher.fp8"])
def test_a_plan_in_fp8_names_the_key_and_the_devices_that_have_it(
    name: str, key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["plan", str(tmp_path / "run.yaml"), f"{key}=hybrid", "--devices", "8", "--device"]
    assert main([*words, name]) == 1
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err == (
        f"error: {key} = 'hybrid': device {name} has no rate `fp8` in `peak_tflops`; FP8 needs "
        "Transformer Engine and a GPU of compute capability 8.9 or higher; set "
        f"{key}=null, or give a device that has it: {WITH_FP8}\n"
    )
    assert main([*words, "h100-80gb"]) == 0
    assert main(["train", *words[1:3], "--plan", f"8x{name}"]) == 1
    assert f"error: {key} = 'hybrid': device {name}" in capsys.readouterr().err


def test_a_file_of_ones_own_may_get_the_rate_and_a_cpu_computes_no_fp8(tmp_path: Path) -> None:
    run = run_config(tmp_path, ["train.fp8=e4m3"])
    update = {"name": "this-gpu", "peak_tflops": {"bf16": 900.0, "fp32": 60.0}}
    with pytest.raises(ConfigError, match="or add the TFLOP/s of this GPU to its file$"):
        check_fp8_rate(run, load_device("h200").model_copy(update=update))
    for device in (cpu(), cpu(peak_tflops={"bf16": 0.1, "fp32": 0.1})):
        with pytest.raises(ConfigError) as error:
            check_fp8_rate(run, device)
        assert str(error.value) == (
            "train.fp8 = 'e4m3': FP8 needs a GPU, and device this-cpu is a CPU; set "
            f"train.fp8=null, or give a device that has it: {WITH_FP8}"
        )
    check_fp8_rate(run_config(tmp_path), cpu())


def test_one_of_several_teachers_is_named_and_one_in_a_store_computes_nothing(
    tmp_path: Path,
) -> None:
    routed = run_config(tmp_path, ["teachers.code.fp8=hybrid"], text=SEVERAL)
    with pytest.raises(ConfigError, match=r"^teachers\.code\.fp8 = 'hybrid': .*code\.fp8=null"):
        check_fp8_rate(routed, load_device("a100-80gb"))
    stored = ["teacher={store: [{path: stores/a}]}", "objective.terms=[{top_k: 8}]"]
    check_fp8_rate(run_config(tmp_path, stored), load_device("a100-80gb"))


def test_a_job_is_not_submitted_to_a_device_without_fp8(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train\.fp8 = 'hybrid': device a100-80gb"):
        refuse_beyond_device(
            run_config(tmp_path, ["train.fp8=hybrid"]), "a100-80gb", nodes=1, local=8
        )
    file = ROOT / "configs" / "llama31_8b_pruned_topk_store_capture.yaml"
    capture = load_capture_config(file, ["teacher.fp8=hybrid"])
    with pytest.raises(ConfigError, match=r"^teacher\.fp8 = 'hybrid': device a100-80gb"):
        refuse_beyond_device(capture, "a100-80gb", nodes=1, local=8)


def test_a_plan_without_transformer_engine_says_that_rates_are_meant_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["plan", str(tmp_path / "run.yaml"), "--devices", "1", "--device"]

    def said(device: str, *overrides: str) -> list[str]:
        assert main([*words, device, *overrides]) == 0
        text = " ".join(capsys.readouterr().out.split())
        return re.findall(r"runtime\.transformer_engine = .*?(?= layout )", text)

    off = "runtime.transformer_engine=off"
    (line,) = said("h100-80gb", off)
    assert line == (
        "runtime.transformer_engine = 'off': the rates of h100-80gb are meant for Transformer "
        "Engine, and times come out too short (13% on an H100); plan with --device h100-80gb-torch"
    )
    (line,) = said("h200", off)
    assert line.endswith("; measure the machine with `megatron-distill calibrate`")
    assert not said("h100-80gb")
    assert not said("h100-80gb-torch", off)
    assert not said("a100-80gb", off)
    # Measured steps have the difference in their factors.
    refined = load_device("h100-80gb").model_copy(update={"factors": {"forward": 1.1}})
    write_device(refined, tmp_path / "mine.yaml")
    assert not said(str(tmp_path / "mine.yaml"), off)
    assert main(["train", words[1], "--plan", "8xh100-80gb", off]) == 0
    assert "plan with --plan 8xh100-80gb-torch" in " ".join(capsys.readouterr().out.split())


def test_a_note_is_beside_that_on_a_vocabulary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_config(tmp_path, ["runtime.transformer_engine=off"])
    assert engine_note(run.runtime, load_device("b200"), option="--device ") is not None
    (tmp_path / "run.yaml").write_text(RUN)
    words = ["plan", str(tmp_path / "run.yaml"), "--devices", "1", "--device", "h100-80gb"]
    words += ["data.tokenizer.path=unread", "data.tokenizer.train_vocab_size=null"]
    words += ["student.architecture.vocab_size=null", "runtime.transformer_engine=off"]
    assert main([*words, "teacher=null"]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split(":")[0] for line in lines]
    assert starts.index("Assumed") < starts.index("runtime.transformer_engine = 'off'")
