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


OFF_THE_STAIRS = {
    "from megatron_distill.losses import Term\n": "ops imports losses from a floor above",
    "from ..losses import objective\n": "ops imports losses from a floor above",
    "def late():\n    from megatron_distill.train import loop\n": "a floor above",
    "import megatron_distill.attic\n": "stands on no floor",
}


@pytest.mark.parametrize("text", OFF_THE_STAIRS)
def test_an_import_off_the_stairs_is_found(tmp_path, text):
    (found,) = floor_violations(sources_of(tmp_path, {"ops/vocab": text}))
    assert found.startswith("megatron_distill/ops/vocab.py:")
    assert OFF_THE_STAIRS[text] in found


def test_an_import_down_the_stairs_is_allowed(tmp_path):
    text = (
        "import torch\nfrom megatron_distill.runtime import collectives\n"
        "from .vocab import VocabShard\nfrom megatron_distill.errors import DataError\n"
    )
    assert list(floor_violations(sources_of(tmp_path, {"ops/statistics": text}))) == []


def test_a_name_outside_its_fence_is_found(tmp_path):
    outside = {
        "data/sources": "import megatron.core.datasets\n",
        "evaluation/runs": "def f():\n    from megatron.core import parallel_state\n",
        "losses/terms": "from megatron_distill.config import TermConfig\n",
        "runtime/device": "import tests.reference.divergence\n",
    }
    found = list(fence_violations(sources_of(tmp_path, outside)))
    assert len(found) == len(outside)
    inside = {
        "runtime/mcore_patches": "import megatron.core\n",
        "train/assemble/run": "from megatron_distill.config import RunConfig\n",
    }
    assert list(fence_violations(sources_of(tmp_path / "inside", inside))) == []


def test_every_fenced_place_with_a_name_of_its_own_is_there():
    named = [place for places in FENCES.values() for place in places if "*" not in place]
    assert [place for place in named if not (ROOT / place).is_file()] == []


def test_circles_are_found_and_a_package_that_reexports_is_none(tmp_path):
    three = {
        "ops/__init__": "from megatron_distill.ops.a import f\n",
        "ops/a": "from megatron_distill.ops.b import g\n",
        "ops/b": "def late():\n    from megatron_distill.ops import f\n",
    }
    assert "megatron_distill.ops.b" in next(cycles(sources_of(tmp_path / "three", three)))
    none = three | {"ops/b": "import torch\n"}
    assert list(cycles(sources_of(tmp_path / "none", none))) == []
