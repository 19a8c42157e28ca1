"""Hugging Face folders to checkpoints of this library and back, in a world of any size."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_distill.data.tokenizers.open import (
    OTHER_KINDS_FOLDER,
    holds_tokenizer,
    is_hugging_face,
    load_tokenizer,
)
from megatron_distill.errors import CheckpointError
from megatron_distill.log import get_logger
from megatron_distill.models.architecture import Architecture
from megatron_distill.models.hugging_face.assets import (
    ASSETS_FOLDER,
    carried_entries,
    choose_family,
    copy_assets,
    write_config,
)
from megatron_distill.models.hugging_face.description import describe
from megatron_distill.models.hugging_face.export import plan_files, write_files
from megatron_distill.models.hugging_face.model import HuggingFaceWeights
from megatron_distill.models.weights import converted_dtype
from megatron_distill.runtime.atomic_files import new_folder, write_errors
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.progress import ProgressFigure, ProgressReporter, size
from megatron_distill.train.checkpoint.description import (
    Description,
    assets_of,
    resolve_checkpoint,
    saved_architecture,
)
from megatron_distill.train.checkpoint.reader import CheckpointWeights
from megatron_distill.train.checkpoint.writer import write_common
from megatron_distill.train.convert.stream import blocks_of, write_blocks
from megatron_distill.train.run_folder import copy_model_tokenizer, tokenizer_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOGGER = get_logger(__name__)
_SPELLED = {dtype: name for name, dtype in DTYPES.items()}
_SMALL_FILES_BYTES = 2**20  # configuration, index, description; the tokenizer is counted
_HEADER_BYTES = 2048  # upper bound on the overhead of one stored tensor


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion, for its user."""

    folder: Path
    family: str
    dtypes: tuple[str, ...]
    parameters: int
    nbytes: int
    files: int | None  # of weights; None where the number is not shown to the user

    @property
    def line(self) -> str:
        """The summary in one sentence."""
        where = f" in {self.files} files" if self.files and self.files > 1 else ""
        return (
            f"wrote {self.folder}: {self.family}, {' and '.join(self.dtypes)}, "
            f"{self.parameters:,} parameters, {size(self.nbytes)}{where}"
        )


def import_checkpoint(
    source: Path, output: Path, *, dtype: str | None, overwrite: bool
) -> ConversionResult:
    """Write a checkpoint with the weights of a Hugging Face folder, bit for bit.

    `dtype` converts them; None preserves each tensor's own. Raises CheckpointError on all ranks.

    Collective: world, torch's checkpoint planning and short objects.
    """
    wanted = _dtype(dtype)
    _check_apart(source, output)
    with together():
        described = describe(source)
        weights = HuggingFaceWeights(source, described)
        weights.check()
        identity = load_tokenizer(source).identity if holds_tokenizer(source) else ""
    blocks = blocks_of(described.architecture, weights, dtype=wanted)
    total = sum(block.nbytes for block in blocks)
    needed = total + len(blocks) * _HEADER_BYTES + _assets_bytes(source)
    with new_folder(output, bytes_needed=needed, overwrite=overwrite) as folder:
        with _progress(f"import {source}", total) as done:
            failure = write_blocks(blocks, described.architecture, weights, folder, done=done)
        with together():
            if failure is not None:
                raise CheckpointError(
                    f"writing {output} failed: {failure}; free disk space or name another folder"
                )
            if dist.get_rank() == 0:
                with write_errors(output, CheckpointError):
                    _describe_import(folder, source, described.architecture, identity)
    return ConversionResult(
        folder=output,
        family=described.family.model_type,
        dtypes=_names(block.dtype for block in blocks),
        parameters=sum(torch.Size(block.shape).numel() for block in blocks),
        nbytes=total,
        files=None,
    )


def _describe_import(folder: Path, source: Path, architecture: Architecture, identity: str) -> None:
    write_common(folder)
    copy_assets(source, folder / ASSETS_FOLDER)
    copy_model_tokenizer(source, folder / ASSETS_FOLDER)
    Description(
        step=0,
        tokens=0,
        bad_steps=0,
        architecture=architecture.as_dict(),
        tokenizer=identity,
        layout="none",
        data={},
    ).write(folder)


def export_checkpoint(
    checkpoint: str,
    output: Path,
    *,
    dtype: str | None,
    max_shard_size: str,
    family: str | None,
    tokenizer: Path | None,
    overwrite: bool,
) -> ConversionResult:
    """Write a Hugging Face folder from a checkpoint of any layout, bit for bit.

    `dtype` converts; None preserves each tensor's own. A `family` of None is chosen by the
    architecture; `tokenizer` is the folder of the tokenizer. Raises CheckpointError on all ranks.

    Collective: world, short objects.
    """
    wanted, max_shard_bytes = _dtype(dtype), _bytes(max_shard_size)
    with together():
        folder = resolve_checkpoint(checkpoint)
        _check_apart(folder, output)
        architecture = saved_architecture(Description.read(folder), folder)
        weights = CheckpointWeights(folder, architecture)
        assets = assets_of(folder)
        chosen = choose_family(architecture, assets, wanted=family)
        files = plan_files(
            chosen,
            architecture,
            dtype_of=lambda key: converted_dtype(key, weights.dtype(key), wanted),
            max_shard_bytes=max_shard_bytes,
        )
        from_tokenizer = tokenizer or assets
        if tokenizer is not None and not holds_tokenizer(tokenizer):
            raise CheckpointError(f"--tokenizer {tokenizer}: contains no tokenizer files")
    total = sum(file.nbytes for file in files)
    needed = total + _assets_bytes(from_tokenizer)
    with new_folder(output, bytes_needed=needed, overwrite=overwrite) as partial:
        with _progress(f"export {chosen.model_type}", total) as done:
            write_files(files, weights, partial, done=done)
        with together():
            if dist.get_rank() == 0:
                with write_errors(output, CheckpointError):
                    copy_assets(assets, partial)
                    copy_model_tokenizer(from_tokenizer, partial)
                    write_config(
                        partial,
                        chosen,
                        architecture,
                        carried=carried_entries(assets, chosen),
                        dtype=_SPELLED[wanted or weights.dtype("embedding.word_embeddings.weight")],
                    )
                _say_where_it_lacks_a_tokenizer(partial, output)
    units = [unit for file in files for unit in file.units]
    return ConversionResult(
        folder=output,
        family=chosen.model_type,
        dtypes=_names(unit.dtype for unit in units),
        parameters=sum(torch.Size(unit.parameter.shape).numel() for unit in units),
        nbytes=total,
        files=len(files),
    )


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(sorted({_SPELLED[dtype] for dtype in dtypes}))


def _say_where_it_lacks_a_tokenizer(partial: Path, output: Path) -> None:
    if holds_tokenizer(partial) and not is_hugging_face(partial):
        _LOGGER.warning(
            "%s: the run's tokenizer is not a Hugging Face tokenizer, so transformers finds none "
            "in this folder. It is in %s, which `megatron-distill generate --hf` reads. "
            "--tokenizer DIR takes a Hugging Face tokenizer of the same ids instead",
            output,
            output / OTHER_KINDS_FOLDER,
        )


def _check_apart(source: Path, output: Path) -> None:
    """Raise CheckpointError where replacing the output would remove the input."""
    read, replaced = source.resolve(), output.resolve()
    if replaced == read or replaced in read.parents:
        raise CheckpointError(
            f"{output} is or contains the source {source}; name another output folder"
        )


def _assets_bytes(folder: Path) -> int:
    return _SMALL_FILES_BYTES + tokenizer_bytes(folder)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is not None and name not in DTYPES:
        raise CheckpointError(f"--dtype {name}: not supported; use {', '.join(DTYPES)}")
    return DTYPES[name] if name is not None else None


def _bytes(text: str) -> int:
    """Return the number of bytes in `5GB`, `500MB` or a number; raises CheckpointError."""
    units = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "": 1}
    unit = next(unit for unit in units if text.upper().endswith(unit))
    try:
        count = float(text[: len(text) - len(unit)]) * units[unit]
    except ValueError:
        count = 0
    if not 1 <= count < 2**63:
        raise CheckpointError(f"--max-shard-size {text}: not a size; write 5GB, 500MB or bytes")
    return int(count)


@contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the first rank's progress; all ranks have shares of the same size."""
    reporter = ProgressReporter(
        sys.stderr,
        label=name,
        total=max(1, total // dist.get_world_size()),
        as_percent=True,
        write_line=lambda line: _LOGGER.info("%s", line),
        shows_bar=dist.get_rank() == 0,
    )

    def advance(count: int) -> None:
        done = reporter.done + count
        if dist.get_rank() == 0:
            reporter.update(done, lambda: [ProgressFigure(size(done))])

    with closing(reporter):
        yield advance
