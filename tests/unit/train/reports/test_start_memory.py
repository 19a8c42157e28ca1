"""The question before a run starts: does its fullest rank fit, and which layouts would."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
import yaml

from megatron_distill.config import RunConfig, load_capture_config
from megatron_distill.errors import ConfigError
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.parameters import parameters, places
from megatron_distill.planning.device import load_device
from megatron_distill.runtime.launch import Device
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.reports import start_memory
from megatron_distill.train.reports.planned_run import open_shapes
from tests.unit.commands.test_plan import RUN, SEVERAL
from tests.unit.train.reports.test_planned_run import run_config

CPU = Device("cpu", "gloo", torch.device("cpu"))


def use_machine(monkeypatch: pytest.MonkeyPatch, gib: float, kind: str = "gpu") -> None:
    update = {"memory_gib": gib, "kind": kind, "reserved_gib": 0.0, "title": "a small machine"}
    found = load_device("h100-80gb").model_copy(update=update)
    monkeypatch.setattr(start_memory, "_machine", lambda *_: found)


def test_a_vocabulary_of_unknown_size_is_that_of_the_tokenizer_to_be_trained(
    tmp_path: Path,
) -> None:
    shapes = open_shapes(run_config(tmp_path, text=RUN.replace(", vocab_size: 32768", "")))
    assert [shape.vocab_size for shape in shapes.values()] == [300, 300]


def test_a_run_that_fits_this_machine_starts_without_a_word(tmp_path: Path) -> None:
    small = run_config(tmp_path, ["train.micro_batch_size=1"])
    assert start_memory.memory_warning(small, CPU, ranks=1) is None


def test_a_run_that_does_not_fit_gets_the_three_nearest_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(monkeypatch, 3.0)
    wide = run_config(tmp_path, ["train.micro_batch_size=8"])
    text = start_memory.memory_warning(wide, CPU, ranks=8)
    first, *ways = text.splitlines()
    assert "the fullest rank of this run needs" in first
    assert "a small machine has 3.0 GiB" in first
    assert len(ways) == 3
    assert all("; set " in way and "GiB" in way for way in ways)


def test_states_above_the_memory_of_a_gpu_are_an_error_and_on_a_cpu_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = run_config(tmp_path)
    use_machine(monkeypatch, 0.2)
    with pytest.raises(ConfigError, match="use more devices"):
        start_memory.memory_warning(large, CPU, ranks=1)
    use_machine(monkeypatch, 0.2, "cpu")
    assert start_memory.memory_warning(large, CPU, ranks=1) is not None


def several(tmp_path: Path, *changes: str) -> RunConfig:
    return run_config(tmp_path, changes, text=SEVERAL)


def size_of(shapes: dict[str, Architecture], *roles: str) -> int:
    """The number of parameters of models."""
    return sum(
        prod(one.shape) * len(list(places(one, shapes[role])))
        for role in roles
        for one in parameters(shapes[role])
    )


def test_several_teachers_need_the_memory_of_all_of_their_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(monkeypatch, 0.8)
    routed = several(tmp_path)
    text = start_memory.memory_warning(routed, CPU, ranks=4)
    numbers = size_of(open_shapes(routed), "teachers.math", "teachers.code")
    assert f", teacher {numbers * 2 / 2**30:.2f}, " in text.splitlines()[0]
    assert "teacher." not in text
    # Rows that name their teachers need the same: either may come.
    rows = several(
        tmp_path,
        "data.sources=[{format: jsonl, paths: a.jsonl, teacher_field: domain}]",
    )
    assert start_memory.memory_warning(rows, CPU, ranks=4) == text


def test_a_teacher_in_a_store_needs_none_and_one_with_a_layout_of_its_own_is_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(monkeypatch, 1.0)
    stored = several(
        tmp_path, "teachers.math={store: [{path: stores/math}]}", "objective.terms.0.top_k=8"
    )
    text = start_memory.memory_warning(stored, CPU, ranks=4)
    numbers = size_of(open_shapes(stored), "teachers.code")
    assert f", teacher {numbers * 2 / 2**30:.2f}, " in text
    apart = several(tmp_path, "teachers.math.parallel={tensor: 2}", "teachers.code.ranks=2")
    assert start_memory.memory_warning(apart, CPU, ranks=4) == (
        "memory: not predicted for several teachers in places of their own, "
        "teachers.math.parallel, teachers.code.ranks; watch the memory of the first steps"
    )


def test_a_teacher_that_rests_in_host_memory_is_not_counted_beside_the_student(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_machine(monkeypatch, 0.8)
    changes = "teachers.math.offload=true", "teachers.code.offload=true"
    assert start_memory.memory_warning(several(tmp_path), CPU, ranks=4) is not None
    assert start_memory.memory_warning(several(tmp_path, *changes), CPU, ranks=4) is None


def test_a_capture_that_does_not_fit_gets_layouts_that_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(tmp_path)
    shape = open_shapes(run)["teacher"]
    weights = 4 * size_of({"teacher": shape}, "teacher") / 2**30
    tree = {"teacher": run.teacher.model_dump(), "data": run.data.model_dump(mode="json")}
    (tmp_path / "capture.yaml").write_text(yaml.safe_dump(tree))
    store = f"store={{path: {tmp_path / 'store'}, samples: 4}}"
    capture = load_capture_config(tmp_path / "capture.yaml", [store])

    def warning(gib: float, kind: str = "gpu") -> str | None:
        use_machine(monkeypatch, gib, kind)
        layout = Layout(1, 1, None, 1, 1, False)
        return start_memory.capture_memory_warning(capture, shape, CPU, layout=layout, ranks=4)

    assert warning(20 * weights) is None
    text = warning(1.5 * weights)
    first, *ways = text.splitlines()
    assert "the fullest rank of this capture needs" in first
    assert f"teacher {weights:.2f}" in first
    assert first.endswith("Layouts that fit:")
    assert 0 < len(ways) <= 3
    assert all("; set parallel.tensor=" in way for way in ways)
    with pytest.raises(ConfigError, match="of this capture needs"):
        warning(0.5 * weights)
    assert warning(0.5 * weights, "cpu") is not None
