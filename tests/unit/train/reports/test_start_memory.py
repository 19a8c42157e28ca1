"""The question before a run starts: does its fullest rank fit, and which layouts would."""

from __future__ import annotations

import os
import re
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
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.reports import start_memory
from megatron_distill.train.reports.memory_check import (
    RankMemory,
    capture_memory_warning,
    memory_warning,
    refuse_beyond_device,
)
from megatron_distill.train.reports.planned_run import open_shapes
from megatron_distill.train.reports.start_memory import refuse_beyond_memory
from tests.guards.source_tree import ROOT
from tests.unit.commands.test_plan import RUN, SEVERAL
from tests.unit.train.reports.test_planned_run import UNREAD, run_config

TINY = (
    "{num_layers: 1, hidden_size: 16, ffn_hidden_size: 32, num_attention_heads: 2, "
    "num_kv_heads: 1, vocab_size: 20480, max_position_embeddings: 4096}"
)


def machine(gib: float, kind: str = "gpu", *, is_limit: bool | None = None) -> RankMemory:
    update = {"memory_gib": gib, "kind": kind, "reserved_gib": 0.0, "title": "a small machine"}
    found = load_device("h100-80gb").model_copy(update=update)
    return RankMemory(found, kind == "gpu" if is_limit is None else is_limit)


def test_a_vocabulary_of_unknown_size_is_that_of_the_tokenizer_to_be_trained(
    tmp_path: Path,
) -> None:
    shapes = open_shapes(run_config(tmp_path, text=RUN.replace(", vocab_size: 32768", "")))
    assert [shape.vocab_size for shape in shapes.values()] == [300, 300]


def test_a_run_that_fits_this_machine_starts_without_a_word(tmp_path: Path) -> None:
    small = run_config(tmp_path, ["train.micro_batch_size=1"])
    own = start_memory._own_memory(torch.device("cpu"))
    assert memory_warning(small, own, ranks=1) is None


def test_a_run_that_does_not_fit_gets_the_three_nearest_layouts(
    tmp_path: Path,
) -> None:
    wide = run_config(tmp_path, ["train.micro_batch_size=8"])
    text = memory_warning(wide, machine(4.0), ranks=8)
    first, *ways = text.splitlines()
    assert "the fullest rank of this run needs" in first
    assert "a small machine has 4.0 GiB" in first
    assert len(ways) == 3
    assert all("; set " in way and "GiB" in way for way in ways)


def test_a_run_of_which_no_layout_fits_is_told_how_many_devices_would_do(tmp_path: Path) -> None:
    small = machine(1.0)
    with pytest.raises(ConfigError) as refused:
        memory_warning(run_config(tmp_path), small, ranks=1)
    text = str(refused.value)
    assert "no layout of 1 device fits: use more devices, or give each more memory. " in text
    (found,) = re.findall(r"memory\. (\d+) devices are the first power of two on which", text)
    with pytest.raises(ConfigError, match="; set "):
        memory_warning(run_config(tmp_path), small, ranks=int(found))
    assert "The least need of a layout here, 1.7 GiB, is with full recomputation" in text
    # Of a teacher on ranks of its own only the given number is tried.
    with pytest.raises(ConfigError, match="or give each more memory$"):
        memory_warning(run_config(tmp_path, ["teacher.ranks=1"]), machine(0.2), ranks=1)


def test_states_above_the_memory_of_a_gpu_or_a_limit_are_an_error_and_on_a_cpu_a_warning(
    tmp_path: Path,
) -> None:
    large = run_config(tmp_path)
    for limited in (machine(0.2), machine(0.2, "cpu", is_limit=True)):
        with pytest.raises(ConfigError, match="use more devices"):
            memory_warning(large, limited, ranks=1)
    assert memory_warning(large, machine(0.2, "cpu"), ranks=1) is not None


def test_a_need_and_a_memory_below_a_gib_are_in_a_smaller_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = run_config(tmp_path, [f"{role}.architecture={TINY}" for role in ("student", "teacher")])
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1")
    with pytest.raises(ConfigError) as refused:
        refuse_beyond_memory(tiny, nodes=1, local=1)
    text = str(refused.value)
    need = r"needs \d+\.\d MiB \((\w+ )+\d+\.\d(, (\w+ )+\d+\.\d)+\), and this job"
    assert re.search(need, text), text
    assert "(SLURM_MEM_PER_NODE=1) has 1.0 MiB, of which" in text
    assert "no layout of 1 device fits: use more devices, or give each more memory" in text
    with pytest.raises(ConfigError, match=r"each of 4 ranks .* has 256\.0 KiB, of which"):
        refuse_beyond_memory(tiny, nodes=1, local=4)


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_is_refused_on_its_first_node_by_what_its_ranks_would_write(
    nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = run_config(tmp_path)
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "300")
    with pytest.raises(ConfigError) as refused:
        refuse_beyond_memory(large, nodes=nodes, local=2)
    text = str(refused.value)
    assert "each of 2 ranks of this job (SLURM_MEM_PER_NODE=300) has 150.0 MiB, of which" in text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError) as in_ranks:
        memory_warning(large, start_memory._own_memory(torch.device("cpu")), ranks=2 * nodes)
    assert text == str(in_ranks.value)
    # Within ten per cent of the memory ranks log a warning.
    monkeypatch.setenv("SLURM_MEM_PER_NODE", "1900")
    refuse_beyond_memory(large, nodes=nodes, local=1)
    assert memory_warning(large, start_memory._node_memory("cpu", 1), ranks=nodes) is not None


def test_the_first_node_compares_a_gpu_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    large = run_config(tmp_path)
    give_gpus(tmp_path, monkeypatch, "200, Small One", "300, Large One", "[N/A], Shared")
    with pytest.raises(ConfigError, match=r"and Large One has 300\.0 MiB"):
        refuse_beyond_memory(large, nodes=1, local=1)
    give_gpus(tmp_path, monkeypatch, "81559, Large One")
    refuse_beyond_memory(large, nodes=1, local=1)
    give_gpus(tmp_path, monkeypatch, "[N/A], Shared")
    refuse_beyond_memory(large, nodes=1, local=1)


def give_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """Let `nvidia-smi` list GPUs of these sizes in MiB and names."""
    program = folder / "nvidia-smi"
    listed = "\n".join(f"GPU {place}: {line}" for place, line in enumerate(lines))
    table = "\n".join(lines)
    program.write_text(
        f"#!/bin/sh\ncase $1 in\n--list-gpus) printf '{listed}\\n' ;;\n"
        f"*) printf '{table}\\n' ;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def several(tmp_path: Path, *changes: str) -> RunConfig:
    return run_config(tmp_path, changes, text=SEVERAL)


def size_of(shapes: dict[str, Architecture], *roles: str) -> int:
    """The number of parameters of models."""
    return sum(
        prod(one.shape) * len(list(places(one, shapes[role])))
        for role in roles
        for one in parameters(shapes[role])
    )


STATES = 2 + 4 + 12  # bytes of a student's parameter in bf16: weight, gradient, fp32 state


def least_bytes(shapes: dict[str, Architecture]) -> int:
    """What lives from step to step on one rank, without gaps between tensors."""
    return STATES * size_of(shapes, "student") + 2 * size_of(shapes, "teacher")


def test_weights_of_a_teacher_beside_the_states_count_as_well(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    least = least_bytes(open_shapes(run)) / 2**30
    with pytest.raises(ConfigError, match="memory: the fullest rank of this run needs"):
        memory_warning(run, machine(0.98 * least), ranks=1)
    # Above the states a GPU is refused for the whole need, and a CPU without a limit is not.
    assert memory_warning(run, machine(1.02 * least, "cpu"), ranks=1) is not None


def test_a_need_of_ten_per_cent_above_a_gpu_or_a_limit_is_an_error_with_the_nearest_layouts(
    tmp_path: Path,
) -> None:
    wide = run_config(tmp_path, ["train.micro_batch_size=8"])
    for kind in ("gpu", "cpu"):
        need = gib_of(memory_warning(wide, machine(3.0, kind, is_limit=False), ranks=8))
        assert need > 2 * least_bytes(open_shapes(wide)) / 2**30
        with pytest.raises(ConfigError) as refused:
            memory_warning(wide, machine(need / 1.12, kind, is_limit=True), ranks=8)
        text = memory_warning(wide, machine(need / 1.12, kind, is_limit=False), ranks=8)
        assert str(refused.value) == text
        first, *ways = text.splitlines()
        assert first.endswith("are usable. The nearest layouts that fit:")
        assert ["; set " in way for way in ways] == [True] * 3
        assert memory_warning(wide, machine(need / 1.08, kind, is_limit=True), ranks=8) is not None


def gib_of(text: str | None) -> float:
    """The whole need that a warning names."""
    found = re.search(r"needs ([\d.]+) GiB", text or "")
    assert found, text
    return float(found[1])


def test_a_vocabulary_of_assumed_size_refuses_no_run(tmp_path: Path) -> None:
    none = [f"{role}.architecture.vocab_size=null" for role in ("student", "teacher")]
    assumed = run_config(tmp_path, [*none, *UNREAD])
    least = least_bytes(open_shapes(assumed, rows={"student": 1, "teacher": 1})) / 2**30
    assert least_bytes(open_shapes(assumed)) / 2**30 > 1.1 * least
    # Of the whole need, too, the assumed rows refuse nothing: two rows are the fewest of a file.
    rows = [f"{role}.architecture.vocab_size=2" for role in ("student", "teacher")]
    small = run_config(tmp_path, [*rows, *UNREAD])
    few, many = (
        gib_of(memory_warning(one, machine(least, is_limit=False), ranks=1))
        for one in (small, assumed)
    )
    assert many > 1.2 * few
    assert memory_warning(assumed, machine(few / 1.08), ranks=1) is not None
    with pytest.raises(ConfigError, match="memory: the fullest rank of this run needs"):
        memory_warning(assumed, machine(few / 1.12), ranks=1)
    with pytest.raises(ConfigError, match="memory: the fullest rank of this run needs"):
        memory_warning(assumed, machine(0.98 * least), ranks=1)


def test_several_teachers_need_the_memory_of_all_of_their_weights(tmp_path: Path) -> None:
    small = machine(0.8)
    routed = several(tmp_path)
    text = memory_warning(routed, small, ranks=4)
    numbers = size_of(open_shapes(routed), "teachers.math", "teachers.code")
    assert f", teacher {numbers * 2 / 2**20:.1f}, " in text.splitlines()[0]
    assert "teacher." not in text
    # Rows that name their teachers need the same: either may come. Their stages may divide the
    # layers otherwise, by other shares of the teachers.
    rows = several(
        tmp_path,
        "data.sources=[{format: jsonl, paths: a.jsonl, teacher_field: domain}]",
    )
    of_rows = memory_warning(rows, small, ranks=4)
    assert of_rows.splitlines()[0] == text.splitlines()[0]
    without_sizes = [re.sub(r"[\d.]+ MiB; set", "set", one) for one in (of_rows, text)]
    assert without_sizes[0] == without_sizes[1]


def test_a_teacher_in_a_store_needs_none_and_one_with_a_layout_of_its_own_is_not_predicted(
    tmp_path: Path,
) -> None:
    small = machine(0.7)
    stored = several(
        tmp_path, "teachers.math={store: [{path: stores/math}]}", "objective.terms.0.top_k=8"
    )
    text = memory_warning(stored, small, ranks=4)
    numbers = size_of(open_shapes(stored), "teachers.code")
    assert f", teacher {numbers * 2 / 2**20:.1f}, " in text
    apart = several(tmp_path, "teachers.math.parallel={tensor: 2}", "teachers.code.ranks=2")
    assert memory_warning(apart, small, ranks=4) == (
        "memory: not predicted for several teachers in places of their own, "
        "teachers.math.parallel, teachers.code.ranks; watch the memory of the first steps"
    )


def test_a_teacher_that_rests_in_host_memory_is_not_counted_beside_the_student(
    tmp_path: Path,
) -> None:
    small = machine(0.8)
    changes = "teachers.math.offload=true", "teachers.code.offload=true"
    assert memory_warning(several(tmp_path), small, ranks=4) is not None
    assert memory_warning(several(tmp_path, *changes), small, ranks=4) is None


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

    layout = Layout(1, 1, None, 1, 1, False)

    def warning(gib: float, kind: str = "gpu") -> str | None:
        small = machine(gib, kind)
        return capture_memory_warning(capture, shape, small, layout=layout, ranks=4)

    assert warning(20 * weights) is None
    text = warning(1.2 * weights)
    first, *ways = text.splitlines()
    assert "the fullest rank of this capture needs" in first
    assert f"teacher {weights:.2f}" in first
    assert first.endswith("Layouts that fit:")
    assert 0 < len(ways) <= 3
    assert all("; set parallel.tensor=" in way for way in ways)
    with pytest.raises(ConfigError, match="of this capture needs"):
        warning(0.5 * weights)
    assert warning(0.5 * weights, "cpu") is not None
    monkeypatch.setenv("SLURM_MEM_PER_NODE", str(int(512 * weights)))
    with pytest.raises(ConfigError, match=r"of this capture needs .* \(SLURM_MEM_PER_NODE="):
        refuse_beyond_memory(capture, nodes=4, local=1)


def test_a_submission_for_a_device_is_refused_before_it_is_made(tmp_path: Path) -> None:
    wide = run_config(tmp_path, ["train.micro_batch_size=8"])
    refuse_beyond_device(wide, "h100-80gb", nodes=4, local=2)
    device = yaml.safe_load((ROOT / "megatron_distill/planning/devices/l40s.yaml").read_text())
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(device | {"memory_gib": 3.0, "reserved_gib": 0.5}))
    with pytest.raises(ConfigError, match=r"(?s)needs .* has 3.0 GiB.* nearest layouts .*; set "):
        refuse_beyond_device(wide, str(small), nodes=4, local=2)
    with pytest.raises(ConfigError, match="there is no device h9"):
        refuse_beyond_device(wide, "h9", nodes=4, local=2)
