"""Roles of a launch, and its ranks' comparison before they start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import megatron_distill
from megatron_distill.commands.job import require_same_start
from megatron_distill.errors import ConfigError
from megatron_distill.runtime.launch import Launch
from megatron_distill.runtime.roles import Roles
from tests.support.sample_configs import TAUGHT, load_tree


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
    store = dist.HashStore()
    first, second = (Launch(rank, 2, store, (("teacher", 1),)) for rank in (0, 1))
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
    store, config = dist.HashStore(), load_tree(tmp_path, TAUGHT)
    first, second = (Launch(rank, 2, store, (("teacher", 1),)) for rank in (0, 1))
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
