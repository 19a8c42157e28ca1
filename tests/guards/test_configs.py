"""Shipped configurations, their commands and the reference page agree with the schema."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from megatron_distill.config import (
    JobConfig,
    RunConfig,
    check_layout,
    load_capture_config,
    load_config,
    to_yaml,
)
from megatron_distill.config.messages import field_key
from megatron_distill.config.reference import reference_page
from megatron_distill.config.schema import Section
from megatron_distill.errors import ConfigError
from tests.guards.source_tree import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
COMMAND = re.compile(r"^#\s+(torchrun .*)$", re.MULTILINE)


def load(path: Path, overrides: Sequence[str] = ()) -> JobConfig:
    """Load the file of a run, or that of a capture, which alone has the folder of a store."""
    is_capture = "store" in yaml.safe_load(path.read_text(encoding="utf-8"))
    return (load_capture_config if is_capture else load_config)(path, overrides)


def documented_runs(root: Path, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of processes and the overrides of each command in the head comment."""
    for command in COMMAND.findall(path.read_text(encoding="utf-8")):
        words = shlex.split(command)
        nodes = int(words[words.index("--nnodes") + 1]) if "--nnodes" in words else 1
        each = int(words[words.index("--nproc-per-node") + 1])
        at = words.index("--config") + 1
        assert root / words[at] == path, f"{path.name} documents a run of {words[at]}"
        yield nodes * each, words[at + 1 :]


def sections() -> list[type[Section]]:
    found: list[type[Section]] = []

    def visit(section: type[Section]) -> None:
        found.append(section)
        for field in section.model_fields.values():
            key = field_key(field)
            below = key.section or (key.entry.section if key.entry else None)
            if below is not None and below not in found:
                visit(below)

    visit(RunConfig)
    return found


def test_the_smallest_run_is_shipped():
    assert {"tiny.yaml", "tiny_moe.yaml", "cache.yaml"} <= {path.name for path in CONFIGS}


def test_a_run_is_shipped_for_each_subject_that_people_look_for():
    runs = [config for config in map(load, CONFIGS) if isinstance(config, RunConfig)]
    assert any(source.conversation for run in runs for source in run.data.sources)
    assert any(run.student.keep_layers for run in runs)
    assert any(run.teacher is not None and run.teacher.store for run in runs)
    assert any(term.top_k for run in runs for term in run.objective.terms or ())
    assert any(run.objective.features for run in runs)
    assert any(
        term.alignment and run.student.hf and run.teacher is not None and run.teacher.hf
        for run in runs
        for term in run.objective.terms or ()
    )
    assert any(run.objective.balance.mode == "magnitude" for run in runs)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_loads_opens_with_a_comment_and_survives_printing(path, tmp_path):
    assert path.read_text(encoding="utf-8").startswith("# ")
    config = load(path)
    if isinstance(config, RunConfig):
        assert config.objective.chunk_tokens is None, "the default is that of the device"
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(config), encoding="utf-8")
    assert load(printed) == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_commands_in_a_configs_head_fit_their_layout(path):
    runs = list(documented_runs(ROOT, path))
    assert runs, "the head comment shows the command that runs it"
    for world_size, overrides in runs:
        check_layout(load(path, overrides), world_size)


def test_a_documented_command_with_a_wrong_layout_is_found(tmp_path):
    text = (ROOT / "configs" / "tiny.yaml").read_text(encoding="utf-8")
    path = tmp_path / "sample.yaml"
    path.write_text(
        "#  torchrun --nproc-per-node 3 launch/x.py --config sample.yaml parallel.tensor=2\n"
        + COMMAND.sub("", text),
        encoding="utf-8",
    )
    [(world_size, overrides)] = documented_runs(tmp_path, path)
    with pytest.raises(ConfigError, match="needs a multiple of 2 processes; there are 3"):
        check_layout(load_config(path, overrides), world_size)


def test_the_reference_page_matches_the_schema():
    page = ROOT / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == reference_page(), "run `make docs`"


def test_the_reference_page_has_every_key_with_its_range():
    page = reference_page()
    for section in sections():
        for name, field in section.model_fields.items():
            assert f"| `{name}` | {field_key(field).type_name} |" in page
    assert "| `beta1` | number | `0.9` | >= 0 and < 1 | Decay of the first moment. |" in page


def test_every_key_is_described_and_every_required_key_has_an_example():
    for section in sections():
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            if field.is_required():
                assert field_key(field).example is not None, f"{section.__name__}.{name}"


@pytest.mark.parametrize(
    ("capture", "run"),
    [
        ("cache.yaml", "quickstart_student.yaml"),
        ("llama31_8b_pruned_topk_store_capture.yaml", "llama31_8b_pruned_topk_store.yaml"),
    ],
)
def test_a_capture_and_its_students_run_read_the_same_samples(capture, run):
    capture, run = load(ROOT / "configs" / capture), load(ROOT / "configs" / run)
    assert (capture.seed, capture.data) == (run.seed, run.data)
    assert capture.store.samples == run.train.steps * run.train.global_batch_size
    if run.teacher.store is None:
        assert capture.teacher == run.teacher
        return
    (store,) = run.teacher.store
    assert store.path == capture.store.path
    assert all(term.top_k is None or term.top_k <= capture.store.k for term in run.objective.terms)
