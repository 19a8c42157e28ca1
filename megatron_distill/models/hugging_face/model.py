"""A Hugging Face model on disk: its description, and its tensors under our names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from megatron_distill.errors import CheckpointError
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.description import ModelDescription, describe
from megatron_distill.models.hugging_face.family import Family
from megatron_distill.models.hugging_face.rules import Run, TensorPiece
from megatron_distill.models.hugging_face.safetensors_files import SafetensorsFolder
from megatron_distill.models.parameters import LayerIndex, Parameter, parameters, placed, places

_LOGGER = get_logger(__name__)
_NAMED_AT_MOST = 5
_FEW_RUNS = 3  # more are heads of queries and keys, too small for separate reads
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_HEAD, _EMBEDDING = "output_layer.weight", "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class NamedPiece:
    """A piece with its layer and expert filled in: one Hugging Face tensor."""

    name: str
    piece: TensorPiece


def tensor_pieces(
    family: Family, architecture: Architecture, parameter: Parameter, place: LayerIndex
) -> list[NamedPiece]:
    """Return the Hugging Face tensors of one of ours, at a layer and expert.

    Raises CheckpointError where the family has no such tensor.
    """
    rule = family.tensors.get(parameter.key)
    if rule is None:
        raise CheckpointError(f"{family.model_type} has no tensor for {parameter.key}")
    names = dict(zip(("layer", "expert"), place, strict=False))
    return [
        NamedPiece(piece.name.format(**names), piece)
        for piece in rule.pieces(parameter.shape, architecture)
    ]


class HuggingFaceWeights:
    """The weights of a Hugging Face folder under our names; a `WeightSource`.

    Raises CheckpointError for a missing or damaged file.
    """

    def __init__(self, folder: Path, description: ModelDescription) -> None:
        self.family, self.architecture = description.family, description.architecture
        self._files = SafetensorsFolder(folder)
        self._bare = self._is_bare()
        self._parameters = {parameter.key: parameter for parameter in parameters(self.architecture)}
        self._dtypes: dict[str, torch.dtype] = {}

    def pieces(self, key: str, place: LayerIndex) -> list[NamedPiece]:
        """Return the Hugging Face tensors of one of ours."""
        return tensor_pieces(self.family, self.architecture, self._parameters[key], place)

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of one of our tensors: the widest of its parts, over all layers."""
        if key not in self._dtypes:
            every = places(self._parameters[key], self.architecture)
            spelled = {self.dtype_at(key, place) for place in every}
            self._dtypes[key] = reduce(torch.promote_types, spelled)
        return self._dtypes[key]

    def dtype_at(self, key: str, place: LayerIndex) -> torch.dtype:
        """Return the dtype of one of our tensors at one place: the widest of its parts there."""
        spelled = {self._files.dtype(self._stored(named.name)) for named in self.pieces(key, place)}
        return reduce(torch.promote_types, (_DTYPES[name] for name in spelled))

    def read_into(
        self, destination: Tensor, key: str, place: LayerIndex, start: Sequence[int]
    ) -> None:
        """Copy a window of one of our tensors into `destination`, whose shape is the window's.

        `place` is (), (layer,) or (layer, expert), `start` the window's first row and column. Rows
        past the real vocabulary become zero. Only the window is read.
        """
        rows = destination.shape[0]
        stored = self._parameters[key].shape[0]
        if start[0] + rows > stored:
            destination[max(0, stored - start[0]) :].zero_()
        for named in self.pieces(key, place):
            name, piece = self._stored(named.name), named.piece
            columns = _columns(start, destination.shape)
            for block in _blocks(piece.runs, start[0], start[0] + rows):
                span = slice(block[0].theirs, block[-1].theirs + block[-1].rows)
                window = (*columns, span) if piece.transposed else (span, *columns)
                part = self._files.read(name, *window)
                part = part.t() if piece.transposed else part
                for run in block:
                    ours, theirs = run.ours - start[0], run.theirs - span.start
                    destination[ours : ours + run.rows].copy_(part[theirs : theirs + run.rows])

    def read(
        self, key: str, place: LayerIndex, start: Sequence[int], shape: tuple[int, ...]
    ) -> Tensor | None:
        """Return a window as a view of its file, or None if it must be assembled."""
        blocks = [
            (named, block)
            for named in self.pieces(key, place)
            for block in _blocks(named.piece.runs, start[0], start[0] + shape[0])
        ]
        ((named, block), *others) = blocks
        if others or len(block) > 1 or named.piece.transposed:
            return None
        span = slice(block[0].theirs, block[0].theirs + shape[0])
        return self._files.read(self._stored(named.name), span, *_columns(start, shape))

    def cuts(self, key: str, place: LayerIndex) -> list[int]:
        """Return our rows at which the next Hugging Face tensor begins, if these are few."""
        starts = [run.ours for named in self.pieces(key, place) for run in named.piece.runs]
        return sorted(starts) if len(starts) <= _FEW_RUNS else [0]

    def _stored(self, name: str) -> str:
        return name.removeprefix(self.family.prefix) if self._bare else name

    def _is_bare(self) -> bool:
        return not any(name.startswith(self.family.prefix) for name in self._files.names)

    def _expected(self) -> dict[str, tuple[int, ...]]:
        return {
            self._stored(named.name): named.piece.shape
            for parameter, place in placed(self.architecture)
            for named in self.pieces(parameter.key, place)
        }

    def check(self) -> None:
        """Check every tensor of the folder, from the headers of its files.

        Raises CheckpointError: a missing or surplus tensor, a shape that differs from the
        configuration, an unsupported dtype, a file that differs from its index.
        """
        self._files.check_index()
        expected, found = self._expected(), self._files.names
        folder = self._files.folder
        missing = sorted(expected.keys() - found)
        if missing:
            raise CheckpointError(
                f"{folder} lacks {_list(missing)}, which a {self.family.model_type} model of its "
                "config.json has; copy the folder again or correct config.json"
            )
        surplus = sorted(self._surplus(found - expected.keys()))
        if surplus:
            raise CheckpointError(
                f"{folder} has {_list(surplus)}, which a {self.family.model_type} model of its "
                "config.json does not have; correct config.json or remove the surplus"
            )
        for name, shape in expected.items():
            if self._files.shape(name) != shape:
                raise CheckpointError(
                    f"{folder}: {name} has shape {list(self._files.shape(name))}, by config.json "
                    f"it is {list(shape)}; correct config.json or copy the folder again"
                )
            if self._files.dtype(name) not in _DTYPES:
                raise CheckpointError(
                    f"{folder}: {name} is {self._files.dtype(name)}; this library reads "
                    f"{', '.join(_DTYPES)}: use the model's unquantised weights"
                )

    def _surplus(self, names: frozenset[str]) -> Iterator[str]:
        prefix = self.family.prefix if self._bare else ""
        further = f"{self.family.prefix}layers.{self.architecture.num_layers}."
        buffers = predictions = 0
        for name in names:
            if any(re.fullmatch(pattern, prefix + name) for pattern in self.family.buffers):
                buffers += 1
            elif self.family.has_prediction_layer and (prefix + name).startswith(further):
                predictions += 1
            elif not self._is_copy_of_embedding(name):
                yield name
        if buffers:
            _LOGGER.info(
                "%s: %d buffers are computed from config.json", self._files.folder, buffers
            )

        if predictions:
            _LOGGER.warning(
                "%s: the layer that predicts a further token is left out (%d tensors)",
                self._files.folder,
                predictions,
            )

    def _is_copy_of_embedding(self, name: str) -> bool:
        """Return whether this tensor is the head of a tied model, a copy of the embedding."""
        rules = self.family.tensors
        (head,) = rules[_HEAD].pieces((1, 1), self.architecture)
        (embedding,) = rules[_EMBEDDING].pieces((1, 1), self.architecture)
        if not self.architecture.tied_embeddings or name != self._stored(head.name):
            return False
        first, second = (
            self._files.read(self._stored(stored), slice(None))
            for stored in (embedding.name, head.name)
        )
        if (first.dtype, first.shape) != (second.dtype, second.shape) or not first.equal(second):
            raise CheckpointError(
                f"{self._files.folder}: {name} differs from {embedding.name}; by config.json "
                "they are one (tie_word_embeddings = true); set it to false or remove the head"
            )
        _LOGGER.info("%s: %s is a copy of the embedding", self._files.folder, name)
        return True


def describe_checked(folder: Path) -> ModelDescription:
    """Read a Hugging Face folder's config.json and every file's header.

    Raises ConfigError or CheckpointError.
    """
    described = describe(folder)
    HuggingFaceWeights(folder, described).check()
    return described


def _columns(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(first, first + size) for first, size in zip(start[1:], shape[1:], strict=True)
    )


def _blocks(runs: Sequence[Run], first: int, last: int) -> Iterator[list[Run]]:
    """Cut runs to our rows [first, last) and group runs that are contiguous on the other side."""
    block: list[Run] = []
    for run in runs:
        start, end = max(run.ours, first), min(run.ours + run.rows, last)
        if start >= end:
            continue
        cut = Run(start, run.theirs + start - run.ours, end - start)
        if block and block[-1].theirs + block[-1].rows != cut.theirs:
            yield block
            block = []
        block.append(cut)
    if block:
        yield block


def _list(names: Sequence[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")
