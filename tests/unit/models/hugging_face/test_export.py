"""Safetensors files that we write, and how tensors are put into files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from megatron_distill.models.hugging_face.family import families
from megatron_distill.models.hugging_face.safetensors_files import SafetensorsWriter, TensorEntry
from tests.distributed.hugging_face_models import MODELS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=9),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=5,
    )
)
@settings(max_examples=12, deadline=None)
def test_written_files_are_read_back_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any]
) -> None:
    tensors.pop("__metadata__", None)
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    values = {name: torch.randn(shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    entries = {name: TensorEntry(value.dtype, tuple(value.shape)) for name, value in values.items()}
    with SafetensorsWriter(path, entries) as writer:
        for name, value in values.items():
            writer.write(name, [value])
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert header % 8 == 0
    assert path.stat().st_size == 8 + header + sum(entry.nbytes for entry in entries.values())
    with safe_open(path, framework="pt") as found:
        assert set(found.keys()) == set(values)
        assert found.metadata() == {"format": "pt"}
        for name, value in values.items():
            assert found.get_tensor(name).dtype == value.dtype
            assert found.get_tensor(name).equal(value)


def test_a_transposed_view_is_written_as_it_reads(tmp_path: Path) -> None:
    value = torch.arange(6.0).view(2, 3).t()
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, {"a": TensorEntry(value.dtype, (3, 2))}) as writer:
        writer.write("a", [value])
    with safe_open(path, framework="pt") as found:
        assert found.get_tensor("a").equal(value)


@pytest.mark.parametrize("wrong", ["order", "dtype", "shape", "missing"])
def test_a_writer_that_is_used_wrongly_raises(tmp_path: Path, wrong: str) -> None:
    entries = {name: TensorEntry(torch.float32, (2,)) for name in "ab"}
    tensor = torch.zeros(3 if wrong == "shape" else 2)
    with (
        pytest.raises(AssertionError),
        SafetensorsWriter(tmp_path / "model.safetensors", entries) as writer,
    ):
        writer.write(
            "b" if wrong == "order" else "a", tensor.half() if wrong == "dtype" else tensor
        )


@cache
def parameters_of(name: str) -> tuple[Any, Any, int]:
    """The family of a model, its architecture, and its parameters in `transformers`."""
    import transformers

    model_type, entries = MODELS[name]
    family = families()[model_type]
    config = transformers.AutoConfig.for_model(model_type, **entries)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return family, family.architecture(config), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ["llama3.1", "gpt2", "mixtral"])
@given(cap=st.integers(1, 200_000), dtype=st.sampled_from(DTYPES))
@settings(max_examples=8, deadline=None)
def test_no_file_exceeds_the_cap_unless_one_tensor_does(
    name: str, cap: int, dtype: torch.dtype
) -> None:
    from megatron_distill.models.hugging_face.export import _index, plan_files

    family, architecture, parameters = parameters_of(name)
    files = plan_files(family, architecture, dtype_of=lambda key: dtype, max_shard_bytes=cap)
    total = 0
    for file in files:
        size = sum(entry.nbytes for entry in file.entries.values())
        assert file.nbytes == size
        assert size <= cap or len(file.units) == 1
        total += size
    for first, second in zip(files, files[1:], strict=False):
        assert first.nbytes + second.units[0].nbytes > cap, "a file ended too early"
    assert total == parameters * dtype.itemsize
    names = [name for file in files for name in file.entries]
    assert len(names) == len(set(names))
    index = json.loads(_index(files))
    assert index["metadata"] == {"total_size": total}
    assert index["weight_map"] == {name: file.name for file in files for name in file.entries}
    if len(files) > 1:
        last = f"model-{len(files):05}-of-{len(files):05}.safetensors"
        assert files[-1].name == last
    else:
        assert files[0].name == "model.safetensors"
