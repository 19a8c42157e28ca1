"""Verification that two models are equal: by tensors, by logits, and by chosen tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_distill.errors import CheckpointError, ConfigError
from megatron_distill.models.architecture import Architecture, architecture_differences
from megatron_distill.models.execution import Execution
from megatron_distill.models.gpt import build_gpt
from megatron_distill.models.hugging_face.description import describe
from megatron_distill.models.hugging_face.model import HuggingFaceWeights
from megatron_distill.models.hugging_face.safetensors_files import SafetensorsFolder
from megatron_distill.models.parameters import LayerIndex, placed
from megatron_distill.models.weights import WeightSource, fill
from megatron_distill.runtime.groups import create_groups, destroy_groups, seed_everything
from megatron_distill.runtime.layout import Layout
from megatron_distill.train.checkpoint.description import (
    Description,
    resolve_checkpoint,
    saved_architecture,
)
from megatron_distill.train.checkpoint.reader import CheckpointWeights
from megatron_distill.train.next_token import logits_after

LOGIT_TOLERANCE = 1e-4  # of the largest logit
_SEED = 0
_GROUP_TIMEOUT_MINUTES = 10


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison: the compared parts and their differences."""

    tensors: int
    different: dict[str, float]  # name, and the largest difference in it; nan: another shape
    max_difference: float
    mean_difference: float
    scale: float  # the largest logit
    positions: int
    agreeing: int  # positions where both choose the same next token
    dtypes: str  # dtypes of both models, and of the comparison

    @property
    def is_same(self) -> bool:
        """Whether the models are equal: same bits, logits within tolerance, the same tokens."""
        return (
            not self.different
            and self.max_difference <= LOGIT_TOLERANCE * self.scale
            and self.agreeing == self.positions
        )


@dataclass(frozen=True)
class Probe:
    """Random probe tokens for two models; the same sizes give the same tokens."""

    sequences: int
    length: int

    def check(self, architecture: Architecture) -> None:
        """Raise ConfigError for a probe that this process or the model cannot compute."""
        if dist.get_world_size() > 1:
            raise ConfigError(
                "verify compares whole models and runs in one process; leave torchrun out"
            )
        for option, value in (("--sequences", self.sequences), ("--tokens", self.length)):
            if value < 1:
                raise ConfigError(f"{option} {value}: compare at least 1")
        if self.length > architecture.max_position_embeddings:
            raise ConfigError(
                f"--tokens {self.length}: the model has {architecture.max_position_embeddings} "
                "positions; compare at most these"
            )

    def tokens(self, vocab_size: int) -> Tensor:
        """Return int64 [sequences, length]."""
        generator = torch.Generator().manual_seed(_SEED)
        return torch.randint(0, vocab_size, (self.sequences, self.length), generator=generator)


def compare_with_checkpoint(folder: Path, checkpoint: str, probe: Probe) -> Comparison:
    """Compare a Hugging Face folder, run by `transformers`, with a checkpoint of this library.

    The checkpoint's tensors are rounded to the dtypes of the files, as in an export. Then bits are
    compared, and logits computed from them in fp32.

    Raises ConfigError in a world of more than one rank or for a probe that the model cannot
    compute. Raises CheckpointError where a side cannot be read or the architectures differ.
    """
    described = describe(folder)
    probe.check(described.architecture)
    folder_weights = HuggingFaceWeights(folder, described)
    folder_weights.check()
    path = resolve_checkpoint(checkpoint)
    architecture = saved_architecture(Description.read(path), path)
    differences = architecture_differences(described.architecture, architecture)
    if differences:
        raise CheckpointError(f"{path} and {folder} are different models: {'; '.join(differences)}")
    checkpoint_weights = _Rounded(CheckpointWeights(path, architecture), folder_weights)
    tensors, different = 0, {}
    for parameter, place in placed(architecture):
        start = (0,) * len(parameter.shape)
        pair = []
        for source in (folder_weights, checkpoint_weights):
            pair.append(
                torch.empty(parameter.shape, dtype=folder_weights.dtype_at(parameter.key, place))
            )
            source.read_into(pair[-1], parameter.key, place, start)
        tensors += 1
        if not _same_bits(*pair):
            names = ", ".join(named.name for named in folder_weights.pieces(parameter.key, place))
            different[names] = _distance(*pair)
    tokens_bs = probe.tokens(architecture.vocab_size)
    logits_bsG = _our_logits(checkpoint_weights, architecture, tokens_bs)
    files, saved = _spelled(checkpoint_weights.of_files), _spelled(checkpoint_weights.of_checkpoint)
    dtypes = f"{files} on both sides"
    if files != saved:
        dtypes = f"files {files}, checkpoint {saved}; compared in the files' dtype"
    return _compared(tensors, different, _reference_logits(folder, tokens_bs), logits_bsG, dtypes)


class _Rounded:
    """A checkpoint's weights in the dtypes of a folder's; a `WeightSource`.

    Attributes:
        of_files, of_checkpoint: the dtypes found on either side.
    """

    def __init__(self, weights: CheckpointWeights, files: HuggingFaceWeights) -> None:
        self._weights, self._files = weights, files
        self.of_files: set[torch.dtype] = set()
        self.of_checkpoint: set[torch.dtype] = set()

    def read_into(
        self, destination: Tensor, key: str, place: LayerIndex, start: Sequence[int]
    ) -> None:
        """Copy a window into `destination`, rounded to the files' dtype."""
        window = torch.empty(destination.shape, dtype=self._weights.dtype(key))
        self._weights.read_into(window, key, place, start)
        wanted = self._files.dtype_at(key, place)
        self.of_files.add(wanted)
        self.of_checkpoint.add(window.dtype)
        destination.copy_(window.to(wanted))

    def read(self, *_: object) -> Tensor | None:
        """Return None: rounded values are in no file."""
        return None


def _spelled(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _our_logits(source: WeightSource, architecture: Architecture, tokens_bs: Tensor) -> Tensor:
    """Return our model's logits, fp32 [b, s, vocabulary]."""
    groups = create_groups(Layout(), timeout_minutes=_GROUP_TIMEOUT_MINUTES)
    try:
        seed_everything(_SEED, groups)
        execution = Execution(torch.float32, torch.device("cpu"))
        (model,) = build_gpt(architecture, groups=groups, execution=execution, seed=None)
        fill([model], source, groups=groups)
        model.eval()
        return logits_after(
            model,
            tokens_bs,
            positions=slice(None),
            architecture=architecture,
            groups=groups,
            device=execution.device,
        )
    finally:
        destroy_groups()


def compare_folders(first: Path, second: Path, probe: Probe) -> Comparison:
    """Compare two Hugging Face folders, run by `transformers` in fp32; raises as above."""
    described = [describe(path) for path in (first, second)]
    for description in described:
        probe.check(description.architecture)
    sides = [SafetensorsFolder(path) for path in (first, second)]
    for side in sides:
        side.check_index()
    names = sides[0].names | sides[1].names
    different, found = {}, (set[torch.dtype](), set[torch.dtype]())
    for name in sorted(names):
        if not all(name in side.names for side in sides):
            different[name] = math.nan
            continue
        pair = [side.read(name, slice(None)) for side in sides]
        for kinds, tensor in zip(found, pair, strict=True):
            kinds.add(tensor.dtype)
        if not _same_bits(*pair):
            different[name] = _distance(*pair)
    vocabularies = [description.architecture.vocab_size for description in described]
    if len(set(vocabularies)) > 1:
        raise CheckpointError(
            f"{first} has a vocabulary of {vocabularies[0]} tokens, {second} of {vocabularies[1]}"
        )
    tokens_bs = probe.tokens(vocabularies[0])
    logits = (_reference_logits(first, tokens_bs), _reference_logits(second, tokens_bs))
    one, other = map(_spelled, found)
    dtypes = f"{one} on both sides"
    if one != other:
        dtypes = f"{first} {one}, {second} {other}: not rounded; compare with a checkpoint instead"
    return _compared(len(names), different, *logits, dtypes=dtypes)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the report's lines."""
    equal = comparison.tensors - len(comparison.different)
    yield f"dtypes    {comparison.dtypes}"
    yield f"tensors   {equal} of {comparison.tensors} are equal bit for bit"
    for name, distance in list(comparison.different.items())[:10]:
        far = (
            "in one model only, or of another shape" if math.isnan(distance) else f"{distance:.2e}"
        )
        yield f"          {name}: {far}"
    if len(comparison.different) > 10:
        yield f"          and {len(comparison.different) - 10} more"
    yield (
        f"logits    max |difference| {comparison.max_difference:.2e}, mean "
        f"{comparison.mean_difference:.2e}; the largest logit is {comparison.scale:.3g}"
    )
    yield (
        f"greedy    {comparison.agreeing} of {comparison.positions} next tokens agree "
        f"({comparison.agreeing / comparison.positions:.1%})"
    )
    yield f"verdict   {'the same model' if comparison.is_same else 'NOT the same model'}"


def _compared(
    tensors: int,
    different: dict[str, float],
    first_bsG: Tensor,
    second_bsG: Tensor,
    dtypes: str,
) -> Comparison:
    distance = (first_bsG - second_bsG).abs()
    agreeing = first_bsG.argmax(-1) == second_bsG.argmax(-1)
    return Comparison(
        tensors=tensors,
        different=different,
        max_difference=float(distance.max()),
        mean_difference=float(distance.mean()),
        scale=float(first_bsG.abs().max()),
        positions=agreeing.numel(),
        agreeing=int(agreeing.sum()),
        dtypes=dtypes,
    )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and first.contiguous().view(torch.uint8).equal(second.contiguous().view(torch.uint8))
    )


def _distance(first: Tensor, second: Tensor) -> float:
    if first.shape != second.shape:
        return math.nan
    return float((first.float() - second.float()).abs().max())


@torch.no_grad()
def _reference_logits(folder: Path, tokens_bs: Tensor) -> Tensor:
    """Return the logits of `transformers`, fp32 [b, s, vocabulary]."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()(tokens_bs).logits.float()
