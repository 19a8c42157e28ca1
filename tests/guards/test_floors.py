"""Floors, fences, cycles: on the tree, and on small sources that break each rule."""

from pathlib import Path

import pytest

from tests.guards.floors import FENCES, cycles, fence_violations, floor_violations
from tests.guards.source_tree import PACKAGE, ROOT, Source, read_sources

PROJECT = read_sources(ROOT, (PACKAGE, "launch", "tools"))


def sources_of(root: Path, texts: dict[str, str]) -> list[Source]:
    """Write the modules of a synthetic package, such as 'config/load', and read them."""
    for name, text in texts.items():
        path = root / PACKAGE / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return read_sources(root, (PACKAGE,))


def test_there_is_a_project_to_guard():
    assert {"config", "errors", "log"} <= {source.room for source in PROJECT}


def test_imports_run_downwards_only():
    found = list(floor_violations(PROJECT))
    assert not found, "\n".join(found)


def test_fenced_packages_stay_in_their_places():
    found = list(fence_violations(PROJECT))
    assert not found, "\n".join(found)


def test_no_import_cycle():
    found = list(cycles(PROJECT))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "from megatron_distill.losses import Term\n",
            "ops imports losses from a floor above",
        ),
        ("from megatron_distill import losses\n", "ops imports losses from a floor above"),
        ("import megatron_distill.losses.terms\n", "ops imports losses from a floor above"),
        ("from ..losses import objective\n", "ops imports losses from a floor above"),
        ("def late():\n    from megatron_distill.train import loop\n", "a floor above"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from megatron_distill.models import gpt\n",
            "a floor above",
        ),
        ("import megatron_distill.attic\n", "stands on no floor"),
    ],
)
def test_an_import_off_the_stairs_is_found(tmp_path, text, words):
    found = list(floor_violations(sources_of(tmp_path, {"ops/vocab": text})))
    assert len(found) == 1
    assert found[0].startswith("megatron_distill/ops/vocab.py:")
    assert words in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "from megatron_distill.runtime import collectives\n",
        "from megatron_distill.ops.vocab import VocabShard\n",
        "from .vocab import VocabShard\n",
        "from megatron_distill.errors import DataError\n",
        "import torch, numpy\n",
    ],
)
def test_an_import_down_the_stairs_is_none_of_the_guards_business(tmp_path, text):
    assert list(floor_violations(sources_of(tmp_path, {"ops/statistics": text}))) == []


def test_config_may_stand_on_errors_but_errors_on_nothing(tmp_path):
    sources = sources_of(
        tmp_path,
        {
            "config/load": "from megatron_distill.errors import ConfigError\n",
            "errors": "from megatron_distill.log import get_logger\n",
            "log": "from megatron_distill.config import load\n",
        },
    )
    assert [text.split(":")[0] for text in floor_violations(sources)] == [
        "megatron_distill/errors.py",
        "megatron_distill/log.py",
    ]


def test_an_unplaced_package_and_a_busy_init_are_found(tmp_path):
    sources = sources_of(
        tmp_path,
        {"__init__": "from megatron_distill.log import configure\n", "attic/box": "x = 1\n"},
    )
    found = sorted(floor_violations(sources))
    assert "own __init__ imports" in found[0]
    assert "attic stands on no floor" in found[1]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("data/sources", "import megatron.core.datasets\n"),
        ("ops/vocab", "from megatron import core\n"),
        ("evaluation/runs", "def f():\n    from megatron.core import parallel_state\n"),
        ("ops/fused_linear", "import triton.language as tl\n"),
        ("losses/terms", "from megatron_distill.config import TermConfig\n"),
        ("train/loop", "from megatron_distill import config\n"),
        ("train/step", "from launch import pretrain_distill\n"),
        ("runtime/device", "import tests.reference.divergence\n"),
    ],
)
def test_a_name_outside_its_fence_is_found(tmp_path, place, text):
    found = list(fence_violations(sources_of(tmp_path, {place: text})))
    assert len(found) == 1
    assert "is allowed only in" in found[0]


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("runtime/mcore_patches", "import megatron.core\n"),
        ("models/gpt", "from megatron.core.models.gpt import GPTModel\n"),
        ("ops/kernels/row_stats", "import triton\n"),
        ("train/assemble/run", "from megatron_distill.config import RunConfig\n"),
        ("data/sources", "import megatron_distill.data.text.files\n"),
    ],
)
def test_a_name_inside_its_fence_is_allowed(tmp_path, place, text):
    assert list(fence_violations(sources_of(tmp_path, {place: text}))) == []


def test_every_fenced_place_with_a_name_of_its_own_is_there():
    named = [place for places in FENCES.values() for place in places if "*" not in place]
    assert [place for place in named if not (ROOT / place).is_file()] == []


def test_circles_are_found(tmp_path):
    two = sources_of(
        tmp_path / "two",
        {
            "ops/a": "from megatron_distill.ops import b\n",
            "ops/b": "def late():\n    from megatron_distill.ops.a import f\n",
        },
    )
    three = sources_of(
        tmp_path / "three",
        {
            "ops/__init__": "from megatron_distill.ops.a import f\n",
            "ops/a": "from megatron_distill.ops.b import g\n",
            "ops/b": "from megatron_distill.ops import f\n",
        },
    )
    assert "megatron_distill.ops.a" in next(cycles(two))
    assert "megatron_distill.ops.b" in next(cycles(three))


def test_a_package_that_reexports_its_modules_is_no_circle(tmp_path):
    sources = sources_of(
        tmp_path,
        {
            "ops/__init__": "from megatron_distill.ops.a import f\n",
            "ops/a": "from megatron_distill.ops.b import g\n",
            "ops/b": "import torch\n",
        },
    )
    assert {source.module for source in sources} >= {"megatron_distill.ops"}
    assert list(cycles(sources)) == []
