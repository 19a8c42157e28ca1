"""The view of a node: paths of the settings, what is there, and nodes that differ."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

import pytest

import megatron_distill
from megatron_distill.launching.node_view import named_paths, node_differences, seen_files, versions


def test_paths_are_found_in_settings_and_caches_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    settings = {
        "output": "runs/a",
        "precision": "bf16",
        "data": {"sources": [{"paths": ["corpus", "/data/*.jsonl"]}], "cache": "/scratch/cache"},
        "template": "a/b\nc",
        "long": "x" * 300,
        "steps": 3,
    }
    assert list(named_paths(settings)) == ["runs/a", "corpus", "/data/*.jsonl"]


def test_a_node_sees_folders_files_patterns_and_prefixes(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl", "tokens.bin", "tokens.idx"):
        (tmp_path / name).write_text(name)
    names = [".", "one.jsonl", "*.jsonl", "tokens", "none", "none*"]
    found = seen_files([str(tmp_path / name) for name in names])
    assert list(found.values()) == [
        "a folder", "1 file of 9 bytes", "2 files of 18 bytes", "2 files of 20 bytes",
        "nothing", "nothing",
    ]  # fmt: skip


def test_the_versions_are_those_of_this_process() -> None:
    found = versions()
    assert found["Python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["megatron-distill"].startswith(megatron_distill.__version__)


def view(version: str, **files: str) -> dict[str, dict[str, str]]:
    return {"versions": {"torch": version}, "files": files}


def test_a_node_is_compared_with_most_nodes_and_of_two_with_the_first() -> None:
    views = {"n1": view("2.12", a="a folder"), "n2": view("2.13", a="a folder"), "n3": view("2.13")}
    assert node_differences(views) == {"n1": ["has torch: 2.12, but n2: 2.13"]}
    two = {"n1": view("2.13", a="nothing"), "n2": view("2.13", a="a folder")}
    assert node_differences(two) == {"n2": ["sees under a: a folder, but n1: nothing"]}
    assert node_differences({"n1": view("2.13")}) == node_differences({}) == {}
