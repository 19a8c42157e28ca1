"""Devices and ranks of a launch: queues, worlds, and the roles of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_distill
from megatron_distill import log
from megatron_distill.commands.job import require_same_start
from megatron_distill.config.schema import RuntimeConfig
from megatron_distill.errors import ConfigError
from megatron_distill.runtime import launch
from megatron_distill.runtime.launch import (
    Launch,
    claim_device,
    joined_world,
    limit_queues,
    select_device,
    spread_queues,
)
from megatron_distill.runtime.roles import Roles
from tests.support.sample_configs import TAUGHT, load_tree

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
COPY_QUEUES = "CUDA_DEVICE_MAX_COPY_CONNECTIONS"
# A world on GPUs with the settings of each test.
on_gpus = partial(joined_world, device="cuda", threads=None, timeout_seconds=30)


def two_ranks() -> tuple[Launch, Launch]:
    """A student and its teacher, of one store."""
    first = Launch(0, 2, dist.HashStore(), (("teacher", 1),))
    return first, replace(first, rank=1)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Let torch see eight GPUs; what touches them, in order."""
    done: list[Any] = []
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name in (QUEUES, COPY_QUEUES, *launch._COLLECTIVES):
        monkeypatch.setenv(name, "to be removed at the end")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(done.append("torch")) or True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(device))
    monkeypatch.setattr(
        launch, "prepare_megatron_core", lambda **_: done.append("import of Megatron-Core")
    )
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **named: done.append(named))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return done


def test_the_device_is_set_before_anything_that_starts_cuda(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "5")
    monkeypatch.setattr(launch, "_compute_capability", lambda: 9)
    with on_gpus(backend="auto", splits_layers=True) as device:
        assert os.environ[QUEUES] == "1"
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        assert os.environ["TORCH_GLOO_LAZY_INIT"] == "1"
        own = torch.device("cuda", 5)
        assert device.torch_device == own
    assert gpus[:3] == ["torch", own, "import of Megatron-Core"]
    assert gpus[3]["device_id"] == own


def test_gloo_on_gpus_is_not_bound_to_one(gpus: list[Any]) -> None:
    with on_gpus(backend="gloo"):
        pass
    assert gpus[-1]["device_id"] is None


@pytest.mark.parametrize(("capability", "queues"), [(8, "1"), (9, "1"), (10, None), (None, None)])
def test_kernels_share_a_queue_before_blackwell(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, capability: int | None, queues: str | None
) -> None:
    monkeypatch.setattr(launch, "_compute_capability", lambda: capability)
    limit_queues()
    assert os.environ.get(QUEUES) == queues
    assert os.environ.get(COPY_QUEUES) == (None if queues is None else "8")
    monkeypatch.setenv(QUEUES, "32")
    monkeypatch.delenv(COPY_QUEUES, raising=False)
    limit_queues()
    assert os.environ[QUEUES] == "32"
    assert COPY_QUEUES not in os.environ


def test_copies_have_queues_of_their_own_beside_one_of_the_environment(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUES, "1")
    limit_queues()
    assert os.environ[COPY_QUEUES] == "8"
    monkeypatch.setenv(COPY_QUEUES, "2")
    limit_queues()
    assert os.environ[COPY_QUEUES] == "2"


@pytest.mark.parametrize("splits_layers", [False, True])
def test_messages_beside_collectives_have_queues_of_their_own(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, splits_layers: bool
) -> None:
    monkeypatch.setattr(launch, "_compute_capability", lambda: 9)
    monkeypatch.setattr(launch, "_bridge", lambda *_: None)
    store = dist.HashStore()
    store.set("device/all", "here")  # the other two ranks
    launched = Launch(0, 3, store, (("teacher", 1),))
    with on_gpus(backend="auto", splits_layers=splits_layers, launch=launched):
        assert os.environ[QUEUES] == "32"


def test_one_queue_of_the_environment_is_refused_beside_teachers_on_ranks_of_their_own(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(QUEUES, "8")
    spread_queues()
    assert os.environ[QUEUES] == "8"
    monkeypatch.setenv(QUEUES, "1")
    monkeypatch.setattr(launch, "_compute_capability", lambda: None)
    spread_queues()  # on a machine without a GPU
    monkeypatch.setattr(launch, "_compute_capability", lambda: 9)
    with pytest.raises(ConfigError, match=f"{QUEUES}=1: .*. Unset it, or set {QUEUES}=32"):
        spread_queues()


ONE = f"{QUEUES}=1 (collectives start before the kernels that hide them)"
COPIES = f"{COPY_QUEUES}=8 (copies keep queues of their own)"
SPREAD = f"{QUEUES}=32 (no message of a teacher waits for a collective in the same queue)"


@pytest.mark.parametrize(
    ("given", "capability", "rank", "is_split", "shown"),
    [
        ({}, 9, 0, False, f"{ONE}, {COPIES}"),
        ({QUEUES: "1"}, 9, 0, False, COPIES),
        ({QUEUES: "32"}, 9, 0, False, None),
        ({}, 10, 0, False, None),
        ({}, 9, 1, False, None),
        ({}, 9, 0, True, SPREAD),
        ({QUEUES: "16"}, 9, 0, True, None),
        ({}, 9, 2, True, None),
        ({}, None, 0, True, None),  # without a GPU
    ],
)
def test_queues_that_the_program_sets_are_one_line_of_the_first_rank(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    given: dict[str, str], capability: int | None, rank: int, is_split: bool, shown: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(launch, "_compute_capability", lambda: capability)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    log.configure(0)  # as the first rank of a teacher has it too
    teachers = (("teacher", 1),) if is_split else ()
    launch._choose_queues(Launch(rank, 3, None, teachers), splits_layers=True)
    text = capsys.readouterr().err
    line = f" INFO    rank 0 {launch.__name__}: set, as the environment does not: {shown}\n"
    assert text.count("\n") == (0 if shown is None else 1)
    assert shown is None or text.endswith(line)


def test_without_the_drivers_library_no_capability_is_known() -> None:
    if torch.version.cuda is None:
        assert launch._compute_capability() is None


def test_a_rank_may_see_its_own_gpu_alone(gpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(ConfigError, match="local rank 3 has no GPU of its own: torch sees 1"):
        select_device(device="cuda", backend="auto")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert select_device(device="cuda", backend="auto").torch_device == torch.device("cuda", 0)


def test_two_ranks_of_a_machine_with_one_gpu_are_refused(
    gpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    store = dist.HashStore()
    first = Launch(0, 2, store)
    for rank, visible in enumerate(("0", "1")):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        claim_device(select_device(device="cuda", backend="auto"), replace(first, rank=rank))
    with pytest.raises(ConfigError, match="rank 1 has the same GPU.*CUDA_VISIBLE_DEVICES=1"):
        claim_device(select_device(device="cuda", backend="auto"), replace(first, rank=1))


def test_a_world_is_joined_with_the_settings_of_a_run() -> None:
    signature(joined_world).bind(**RuntimeConfig().of_world())


def test_the_last_ranks_are_the_teacher() -> None:
    roles = Roles(6, (("teacher", 2),))
    assert [roles.name(rank) for rank in (0, 3, 4, 5)] == [
        "student.0", "student.3", "teacher.0", "teacher.1",
    ]  # fmt: skip
    assert [*roles.student.ranks, *roles.teacher("teacher").ranks] == list(range(6))
    assert roles.names([1, 5]) == "student.1, teacher.1"


def test_each_of_several_teachers_has_ranks_of_its_own() -> None:
    roles = Roles(6, (("teachers.code", 1), ("teachers.math", 2)))
    assert (
        roles.names(range(2, 6)) == "student.2, teachers.code.0, teachers.math.0, teachers.math.1"
    )
    assert [role.ranks for role in roles.teachers] == [range(3, 4), range(4, 6)]
    assert roles.of(4) == roles.teacher("teachers.math")


def test_without_a_teacher_ranks_have_numbers() -> None:
    roles = Roles(20)
    assert roles.of(19) == roles.student
    assert roles.names([1]) == "rank 1"
    assert roles.names(range(10)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def test_a_rank_with_another_configuration_is_named(tmp_path) -> None:
    first, second = two_ranks()
    require_same_start(first, load_tree(tmp_path, TAUGHT))
    require_same_start(second, load_tree(tmp_path, TAUGHT))
    with pytest.raises(ConfigError, match=r"teacher\.0 on .* than student\.0: .*steps: 4"):
        require_same_start(second, load_tree(tmp_path, TAUGHT, "train.steps=4"))


def test_a_rank_with_another_version_of_the_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package"
    package.mkdir()
    module = package / "one.py"
    module.write_text("x = 1\n")
    config, (first, second) = load_tree(tmp_path, TAUGHT), two_ranks()
    monkeypatch.setattr(megatron_distill, "__file__", str(package / "__init__.py"))
    require_same_start(first, config)
    require_same_start(second, config)
    message = (
        r"^teacher\.0 on .* runs another version of megatron-distill than student\.0; install the "
        "same one on all machines$"
    )
    module.write_text("x = 2\n")
    with pytest.raises(ConfigError, match=message):
        require_same_start(second, config)
    module.write_text("x = 1\n")
    require_same_start(second, config)
    module.rename(package / "two.py")
    with pytest.raises(ConfigError, match=message):
        require_same_start(second, config)
