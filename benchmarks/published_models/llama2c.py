"""A model of llama2.c: its published page, its weights and its pieces as a Hugging Face folder."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness.environment import installed

__all__ = ["BOS", "Page", "Run", "read_page", "read_weights", "write_folder"]

BOS: Final = 1
_STEPS: Final = 256  # tokens of a text: the default of llama2.c's `run`
_EPSILON: Final = 1e-5
# Names in the header of a file of weights, and of the training command's options on the page.
_HEADER: Final = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size")
_POSITIONS: Final = "max_seq_len"
_UNKNOWN, _CONTROL, _BYTE, _NORMAL = 2, 3, 6, 1  # kinds of pieces of SentencePiece
_FIRST_BYTE, _FIRST_PIECE = 3, 259
_BPE: Final = 2
_RUN: Final = re.compile(
    r"```\n\$ \./run [^\n]*-t (?P<temperature>[\d.]+)(?: -p (?P<top_p>[\d.]+) -s (?P<seed>\d+))?\n"
    r"(?P<text>.*?)\n```",
    re.DOTALL,
)


@dataclass(frozen=True)
class Run:
    """A published text with the options of the command that wrote it; `temperature` 0: greedy."""

    temperature: float
    top_p: float
    seed: int
    text: str
    steps: int = _STEPS


@dataclass(frozen=True)
class Page:
    """The figures on a model's page.

    Attributes:
        greedy: text without sampling.
        sampled: text of a seed.
        loss: of validation, in nats per token.
        shape: options of the training command that are whole numbers.
    """

    greedy: Run
    sampled: Run
    loss: float
    shape: Mapping[str, int]


def read_page(path: Path) -> Page:
    """Return the figures of a page such as llama2.c's doc/stories260K.md.

    Raises SystemExit naming what is not on the page.
    """
    page = path.read_text(encoding="utf-8")
    runs = [
        Run(
            float(one["temperature"]),
            float(one["top_p"] or 1),
            int(one["seed"] or 0),
            one["text"].strip(),
        )
        for one in _RUN.finditer(page)
    ]
    greedy = [one for one in runs if not one.temperature]
    sampled = [one for one in runs if one.temperature and one.seed]
    loss = re.search(r"validation loss of (\d+\.\d+)", page)
    options = dict(re.findall(r"--(\w+)=(\d+)\s", page))
    shape = {name: int(options[name]) for name in (*_HEADER, _POSITIONS) if name in options}
    for found, named in (
        (greedy, "a text of `./run ... -t 0.0`"),
        (sampled, "a text of `./run ... -t T -p P -s SEED`"),
        (loss, "a validation loss"),
        (shape, "the training command"),
    ):
        if not found:
            raise SystemExit(f"{path}: {named} is missing; give llama2.c's doc/stories260K.md")
    assert loss is not None
    return Page(greedy[0], sampled[0], float(loss[1]), shape)


def read_weights(path: Path, page: Page) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return the shape and the parameters, by their names in `LlamaForCausalLM`, of a `.bin` file.

    Queries and keys have the two numbers of a rotation side by side there, half a head apart in
    `transformers`. Raises SystemExit where the file is not of the page's model.
    """
    content = path.read_bytes()
    size = 4 * (len(_HEADER) + 1)
    if len(content) < size:
        raise SystemExit(f"{path}: {len(content)} bytes are no weights of llama2.c")
    shape = dict(zip((*_HEADER, _POSITIONS), struct.unpack("<7i", content[:size]), strict=True))
    for name, wanted in page.shape.items():
        if shape[name] != wanted:
            raise SystemExit(
                f"{path}: {name} is {shape[name]}, on the page {wanted}; give the weights that the "
                "page describes"
            )
    numbers = np.frombuffer(content, "<f4", offset=size)
    found = dict(_parameters(shape, _Reader(torch.from_numpy(numbers.copy()), path)))
    return shape, found


class _Reader:
    """Takes one tensor after another from a file's numbers."""

    def __init__(self, numbers: Tensor, path: Path) -> None:
        self._numbers, self._path = numbers, path

    def take(self, *sizes: int) -> Tensor:
        count = int(np.prod(sizes))
        if count > len(self._numbers):
            raise SystemExit(f"{self._path}: ends too early for its header; copy it again")
        found, self._numbers = self._numbers[:count], self._numbers[count:]
        return found.view(*sizes)

    def require_end(self) -> None:
        if len(self._numbers):
            raise SystemExit(
                f"{self._path}: {len(self._numbers):,} numbers more than its header tells: not the "
                "first format of llama2.c, or an output head of its own"
            )


def _parameters(shape: Mapping[str, int], reader: _Reader) -> Iterator[tuple[str, Tensor]]:
    width, inner, layers = shape["dim"], shape["hidden_dim"], shape["n_layers"]
    heads, groups = shape["n_heads"], shape["n_kv_heads"]
    head = width // heads
    yield "model.embed_tokens.weight", reader.take(shape["vocab_size"], width)
    for name, sizes, rotated in (
        ("input_layernorm", (width,), 0),
        ("self_attn.q_proj", (width, width), heads),
        ("self_attn.k_proj", (groups * head, width), groups),
        ("self_attn.v_proj", (groups * head, width), 0),
        ("self_attn.o_proj", (width, width), 0),
        ("post_attention_layernorm", (width,), 0),
        ("mlp.gate_proj", (inner, width), 0),
        ("mlp.down_proj", (width, inner), 0),
        ("mlp.up_proj", (inner, width), 0),
    ):
        for layer, weight in enumerate(reader.take(layers, *sizes)):
            if rotated:
                pairs = weight.view(rotated, head // 2, 2, width).transpose(1, 2)
                weight = pairs.reshape(sizes)
            yield f"model.layers.{layer}.{name}.weight", weight.contiguous()
    yield "model.norm.weight", reader.take(width)
    reader.take(2, shape[_POSITIONS], head // 2)  # cosines and sines
    reader.require_end()


def write_folder(folder: Path, weights: Path, pieces: Path, page: Page) -> None:
    """Write the Hugging Face folder of a model with its tokenizer.

    weights: as `stories260K.bin`. pieces: as `tok512.bin`. Raises SystemExit for files of another
    model.
    """
    import transformers

    shape, parameters = read_weights(weights, page)
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["dim"],
        intermediate_size=shape["hidden_dim"],
        num_hidden_layers=shape["n_layers"],
        num_attention_heads=shape["n_heads"],
        num_key_value_heads=shape["n_kv_heads"],
        max_position_embeddings=shape[_POSITIONS],
        rms_norm_eps=_EPSILON,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=BOS + 1,
    )
    model = transformers.LlamaForCausalLM(config)
    embedding = parameters["model.embed_tokens.weight"]
    model.load_state_dict({**parameters, "lm_head.weight": embedding}, strict=True)
    model.save_pretrained(folder)
    content = _sentencepiece(list(_read_pieces(pieces, shape["vocab_size"])))
    (folder / "tokenizer.model").write_bytes(content)


def _read_pieces(path: Path, count: int) -> Iterator[tuple[bytes, float]]:
    """Yield the pieces of a vocabulary with their scores."""
    content = path.read_bytes()
    place = 4  # after the length of the longest piece
    for _ in range(count):
        if place + 8 > len(content):
            break
        score, size = struct.unpack_from("<fi", content, place)
        place += 8 + size
        yield content[place - size : place], score
    else:
        if place == len(content):
            return
    raise SystemExit(f"{path}: not a vocabulary of {count} pieces of llama2.c, as tok512.bin is")


def _sentencepiece(pieces: list[tuple[bytes, float]]) -> bytes:
    """Return the SentencePiece model that a vocabulary was exported from.

    Normalisation as in llama2.c's `train_vocab`: a space first, several spaces as one.
    """
    if installed("protobuf") is None:
        raise SystemExit("a SentencePiece model is written by protobuf: pip install protobuf")
    model: Any = import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    for number, (spelling, score) in enumerate(pieces):
        piece = model.pieces.add()
        piece.score = score
        if number < _FIRST_BYTE:
            piece.piece = ("<unk>", "<s>", "</s>")[number]
            piece.type = _CONTROL if number else _UNKNOWN
        elif number < _FIRST_PIECE:
            piece.piece, piece.type = f"<0x{number - _FIRST_BYTE:02X}>", _BYTE
        else:
            piece.piece = spelling.decode().replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")
            piece.type = _NORMAL
    model.trainer_spec.model_type = _BPE
    model.trainer_spec.vocab_size = len(pieces)
    model.trainer_spec.byte_fallback = True
    rules = model.normalizer_spec
    rules.name = "identity"
    rules.add_dummy_prefix = rules.remove_extra_whitespaces = rules.escape_whitespaces = True
    return bytes(model.SerializeToString())
