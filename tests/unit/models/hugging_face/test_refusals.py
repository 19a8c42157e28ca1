"""Folders that are no supported model, each refused by file and value."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_distill.errors import CheckpointError
from megatron_distill.models.hugging_face.description import describe
from tests.distributed.hugging_face_models import save_model

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
Folders = Callable[[str], Path]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some models as `transformers` writes them, made once."""
    root = tmp_path_factory.mktemp("models")
    written = "llama2 llama3.2 gemma2 gpt2 qwen3 qwen3_moe glm4_moe"
    for name in written.split():
        save_model(root / name, name)
    save_model(root / "mixtral", "mixtral")
    return root


@pytest.fixture
def folder_of(saved: Path, tmp_path: Path) -> Folders:
    """Give a copy of a model's folder, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved / name, tmp_path / name))

    return copy


def change_config(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def read(folder: Path) -> dict[str, Tensor]:
    """Account for a folder as import and training do; return a few tensors of ours."""
    from megatron_distill.models.hugging_face.model import HuggingFaceWeights

    description = describe(folder)
    weights = HuggingFaceWeights(folder, description)
    weights.check()
    found = {}
    for key, place in (
        ("embedding.word_embeddings.weight", ()),
        ("decoder.layers.self_attention.linear_proj.weight", (1,)),
    ):
        shape = (203 if not place else 32, 32)
        found[key] = torch.empty(shape, dtype=weights.dtype(key))
        weights.read_into(found[key], key, place, (0, 0))
    return found


def refusal(folder: Path, *parts: str) -> str:
    """The error of a folder, which has these parts."""
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    text = str(caught.value)
    assert "\n" not in text
    for part in (str(folder), *parts):
        assert part in text
    return text


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 2.0,
    "original_max_position_embeddings": 9,
}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# model, entries of config.json -> what the message must hold
ENTRIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unknown family": ("llama2", {"model_type": "bloom"}, ("model_type 'bloom'", "gpt2, llama, ")),
    "latent attention": (
        "llama2", {"model_type": "deepseek_v3", "kv_lora_rank": 512}, ("kv_lora_rank is 512", "MLA")
    ),
    "activation": ("llama2", {"hidden_act": "relu"}, ("hidden_act is 'relu'", "'silu'")),
    "rotary kind": ("llama2", {"rope_parameters": YARN}, ("rope_type is 'yarn'", "'llama3'")),
    "part of a head": ("llama2", {"rope_parameters": PARTIAL}, ("partial_rotary_factor is 0.5",)),
    "attention bias": ("llama2", {"attention_bias": True}, ("attention_bias is True",)),
    "feed-forward bias": ("llama2", {"mlp_bias": True}, ("mlp_bias is True",)),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": [1]}, ("lacks model.layers.1.mlp.down",)),
    "no experts": ("qwen3_moe", {"decoder_sparse_step": 9}, ("all 3 layers are dense",)),
    "raw scores": ("glm4_moe", {"norm_topk_prob": False}, ("norm_topk_prob is False", "True")),
    "best of groups": (
        "glm4_moe", {"n_group": 2, "num_experts_per_tok": 1}, ("topk_group is 1 of 2 groups",)
    ),
    "a layer too many": ("glm4_moe", {"num_hidden_layers": 1}, ("all 1 layers are dense",)),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, ("router_jitter_noise is 0.1",)),
    "bidirectional": (
        "gemma2", {"use_bidirectional_attention": True}, ("use_bidirectional_attention is True",)
    ),
    "layer scale": (
        "gpt2", {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)
    ),
    "layer kinds": (
        "qwen3", {"layer_types": ["chunked_attention"] * 3}, ("layer_types", "chunked_attention")
    ),
    "quantised": (
        "llama2", {"quantization_config": {"quant_method": "gptq"}}, ("quantization_config",)
    ),
    "not a number": ("llama2", {"hidden_size": "wide"}, ("hidden_size", "'wide'")),
    "no layer": ("llama2", {"num_hidden_layers": 0}, ("num_layers is 0",)),
    "no head": ("gpt2", {"n_head": 0}, ("config.json", "ZeroDivisionError")),
    "groups": ("llama2", {"num_key_value_heads": 3}, ("4", "num_kv_heads = 3")),
    "chosen experts": ("mixtral", {"num_experts_per_tok": 5}, ("5 experts per token, but",)),
    "another width": (
        "llama2", {"intermediate_size": 47}, ("mlp.gate_proj.weight has shape [48, 32]", "[47, 32]")
    ),
    "fewer layers": ("llama2", {"num_hidden_layers": 2}, ("has model.layers.2.", "and 4 more")),
    "more layers": ("llama2", {"num_hidden_layers": 4}, ("lacks model.layers.3.", "and 4 more")),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_an_entry_that_is_not_computed_is_named(folder_of: Folders, case: str) -> None:
    name, entries, parts = ENTRIES[case]
    folder = folder_of(name)
    change_config(folder, **entries)
    refusal(folder, "config.json", *parts)


@pytest.mark.parametrize("content", [None, "{", "[1]", b"\xff\xfe{"])
def test_a_configuration_that_is_none(folder_of: Folders, content: str | bytes | None) -> None:
    folder = folder_of("llama2")
    path = folder / "config.json"
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert str(path) in refusal(folder)


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    found = refusal(tmp_path / "nowhere")
    assert "config.json: no such file" in found
    assert "`hf download OWNER/NAME --local-dir DIR`" in found, "the name of a model on the Hub"
    (tmp_path / "file").write_text("")
    assert "name a folder with a Hugging Face model" in refusal(tmp_path / "file")


def add(**tensors: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: found.update(tensors)


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: [found.pop(name) for name in names] and None


def as_type(name: str, dtype: torch.dtype) -> Callable[[dict[str, Tensor]], None]:
    return lambda found: found.update({name: found[name].to(dtype)})


ATTENTION = "model.layers.1.self_attn"
O_PROJ = f"{ATTENTION}.o_proj.weight"
# model, what happens to its tensors -> what the message must hold
TENSORS: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], tuple[str, ...]]] = {
    "missing": ("llama2", without(O_PROJ), (f"lacks {O_PROJ}, which",)),
    "surplus": ("llama2", add(more=torch.zeros(1)), ("has more, which", "remove the surplus")),
    "seven surplus": (
        "llama2", add(**{f"a{i}": torch.zeros(1) for i in range(7)}), ("a3, a4 and 2 more, which",)
    ),
    "shape": (
        "llama2", add(**{O_PROJ: torch.zeros(32, 31)}), (f"{O_PROJ} has shape [32, 31]", "[32, 32]")
    ),
    "int8": ("llama2", as_type(O_PROJ, torch.int8), (f"{O_PROJ} is I8", "F32, BF16, F16")),
    "float8": ("llama2", as_type(O_PROJ, torch.float8_e4m3fn), (f"{O_PROJ} is F8_E4M3",)),
    "another head of a tied model": (
        "llama3.2", add(**{HEAD: torch.zeros(203, 32)}), (f"{HEAD} differs", "tie_word_embeddings")
    ),
    "a head of another type": (
        "llama3.2",
        lambda found: found.update({HEAD: found[EMBEDDING].half()}), (f"{HEAD} differs",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_every_tensor_is_accounted_for(folder_of: Folders, case: str) -> None:
    name, change, parts = TENSORS[case]
    folder = folder_of(name)
    change_tensors(folder, change)
    refusal(folder, *parts)


def strip(prefix: str) -> Callable[[dict[str, Tensor]], None]:
    def change(found: dict[str, Tensor]) -> None:
        for name in list(found):
            found[name.removeprefix(prefix)] = found.pop(name)

    return change


def with_masks(found: dict[str, Tensor]) -> None:
    for layer in range(3):
        mask = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        found[f"transformer.h.{layer}.attn.bias"] = mask
        found[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


ACCEPTED: dict[str, tuple[str, list[Callable[[dict[str, Tensor]], None]]]] = {
    "a tied head again": (
        "llama3.2", [lambda found: found.update({HEAD: found[EMBEDDING].clone()})]
    ),
    "old rotary buffers": (
        "llama2",
        [add(**{f"{ATTENTION}.rotary_emb.inv_freq": torch.ones(4)})],
    ),
    "old masks": ("gpt2", [with_masks]),
    "GPT-2 as on the hub": ("gpt2", [with_masks, strip("transformer.")]),
    "the bare model": ("llama3.2", [strip("model.")]),
    "the bare model with a head": ("llama2", [strip("model.")]),
}  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED)
def test_equivalent_settings_are_accepted(folder_of: Folders, saved: Path, case: str) -> None:
    name, changes = ACCEPTED[case]
    folder = folder_of(name)
    for change in changes:
        change_tensors(folder, change)
    expected, found = read(saved / name), read(folder)
    assert all(found[key].equal(value) for key, value in expected.items())


def test_layers_of_several_types_are_read_in_the_widest(folder_of: Folders) -> None:
    folder = folder_of("llama2")
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 2)]
    for name in names:
        change_tensors(folder, as_type(name, torch.bfloat16))
    stored = load_file(folder / WEIGHTS)
    found = read(folder)["decoder.layers.self_attention.linear_proj.weight"]
    assert found.dtype is torch.float32
    assert found.equal(stored[O_PROJ])


def header(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def split(folder: Path) -> Path:
    """Put a model into two files and an index, as large ones are."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    place: dict[str, str] = {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        place |= dict.fromkeys(names, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder


def reindex(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content["weight_map"])
    (folder / INDEX).write_text(json.dumps(content))


FIRST, SECOND = (f"model-{number:05}-of-00002.safetensors" for number in (1, 2))
# what happens to a folder of one file -> what the message must hold
ONE_FILE: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "cut off": (
        lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]),
        (WEIGHTS, "truncated or damaged"),
    ),
    "garbage header": (lambda f: (f / WEIGHTS).write_bytes(header(b"{nope")), (WEIGHTS, "damaged")),
    "a folder": (
        lambda f: ((f / WEIGHTS).unlink(), (f / WEIGHTS).mkdir()), (WEIGHTS, "damaged")
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), ("contains no safetensors file",)),
    "a pickle": (
        lambda f: ((f / WEIGHTS).unlink(), (f / "pytorch_model.bin").write_bytes(b"")),
        ("pytorch_model.bin is a pickle", "refused", "safetensors"),
    ),
}  # fmt: skip
MANY_FILES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no index": (lambda f: (f / INDEX).unlink(), ("2 safetensors files and no", INDEX)),
    "a file gone": (lambda f: (f / SECOND).unlink(), (SECOND, "is missing", INDEX)),
    "another place": (
        lambda f: reindex(f, lambda m: m.update({EMBEDDING: FIRST})),
        (INDEX, "disagree", f"the file lacks {EMBEDDING}"),
    ),
    "not in the index": (
        lambda f: reindex(f, lambda m: m.pop(EMBEDDING)), ("does not name", EMBEDDING)
    ),
    "not in the file": (
        lambda f: reindex(f, lambda m: m.update(ghost=FIRST)), ("the file lacks ghost",)
    ),
    "no JSON": (lambda f: (f / INDEX).write_text("{"), (INDEX, "damaged")),
    "not a map": (lambda f: (f / INDEX).write_text('{"weight_map": 3}'), (INDEX, "weight_map")),
    "no object": (lambda f: (f / INDEX).write_text("[]"), (INDEX, "damaged")),
    "another folder": (
        lambda f: reindex(f, lambda m: m.update({EMBEDDING: f"../{FIRST}"})), (INDEX, "not a map")
    ),
    "the root": (
        lambda f: reindex(f, lambda m: m.update({EMBEDDING: str(f / FIRST)})), (INDEX, "not a map")
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("files", "case"), [(1, case) for case in ONE_FILE] + [(2, case) for case in MANY_FILES]
)
def test_a_damaged_folder_is_named(folder_of: Folders, files: int, case: str) -> None:
    folder = folder_of("llama2") if files == 1 else split(folder_of("llama2"))
    damage, parts = (ONE_FILE if files == 1 else MANY_FILES)[case]
    damage(folder)
    refusal(folder, *parts)


def test_a_folder_of_several_files_is_read(folder_of: Folders, saved: Path) -> None:
    expected = read(saved / "llama2")
    found = read(split(folder_of("llama2")))
    assert all(found[key].equal(value) for key, value in expected.items())
