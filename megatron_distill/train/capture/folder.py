"""The folder of a store during capture: begun, locked by one start of each job, finished."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch.distributed as dist

from megatron_distill.data.tokenizers.open import Tokenizer, holds_tokenizer
from megatron_distill.errors import StoreError, counted
from megatron_distill.runtime.atomic_files import whole_folder, write_errors
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.folder_lock import FolderLock, take_lock
from megatron_distill.store import Manifest, Plan, StoreWriter, tokenizer_folder
from megatron_distill.store.plan import MANIFEST, PLAN
from megatron_distill.train.capture.order import lock_of_job, working_folder
from megatron_distill.train.run_folder import write_tokenizer

# Files of other nodes may take a while to appear on a network file system.
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 1.0

# Configuration keys by field of the plan; the remaining fields have no key.
KEYS: Final = {
    "samples": "store.samples",
    "samples_per_shard": "store.samples_per_shard",
    "capture.codec": "store.codec",
    "capture.k": "store.k",
    "capture.mode": "store.mode",
    "capture.sampling_seed": "seed",
    "capture.student_length": "data.sequence_length",
    "capture.temperatures": "store.temperatures",
    "capture.top_p": "store.top_p",
    "identity.settings.precision": "capture.precision",
}
# Exceptions among the dataset's settings: the remaining ones are keys of `data`.
_DATASET: Final = "identity.settings.dataset."
_DATASET_KEYS: Final = {"seed": "seed"}
_SOURCE_KEYS: Final = {
    "share": "weight",
    "files": "paths",
    "conversation.prompt_keys": "conversation.prompt_key",
}
# Descriptions of digests and names that no single key decides.
WORDS: Final = {
    "capture.sequence_length": "the teacher's sequence length",
    "capture.vocab_size": "the number of the tokenizer's tokens",
    "identity.teacher": "the digest of the teacher's weights",
    "identity.tokenizer": "the digest of the tokenizer",
    "identity.student_tokenizer": "the digest of the student's tokenizer",
    "identity.dataset": "the digest of data and tokenizer",
    "identity.settings.teacher": "the name of the teacher's folder",
    "identity.settings.version": "the release of megatron-distill",
}


def open_store(folder: Path, plan: Plan) -> StoreWriter:
    """Begin a store, or continue one with the same plan. Raises StoreError."""
    return StoreWriter(
        folder,
        settings=plan.settings,
        identity=plan.identity,
        samples=plan.samples,
        samples_per_shard=plan.samples_per_shard,
        named=configured,
    )


def open_begun_store(folder: Path, plan: Plan) -> StoreWriter:
    """Open a store that rank 0 has begun. Raises StoreError: this rank does not see it."""
    if not (folder / PLAN).is_file():
        raise StoreError(
            f"rank {dist.get_rank()} on {socket.gethostname()} does not see {folder / PLAN}, which "
            "rank 0 wrote; set store.path to a folder that all nodes share"
        )
    return open_store(folder, plan)


def is_complete(store: StoreWriter) -> bool:
    """Return whether the manifest and every shard exist. Raises StoreError."""
    return (store.folder / MANIFEST).is_file() and not store.holes()


@contextmanager
def held_for_job(folder: Path, job: int) -> Iterator[None]:
    """Lock a job's part of a store against a second start of the job, on rank 0.

    Raises ConfigError or StoreError on all ranks: another start holds it, or the folder cannot be
    written.

    Collective: world, one all-gather of a short object per rank.
    """
    lock: FolderLock | None = None
    try:
        with together():
            if dist.get_rank() == 0:
                working = working_folder(folder)
                with write_errors(working):
                    working.mkdir(exist_ok=True)
                    path, named = lock_of_job(folder, job)
                    lock = take_lock(path, named=named)
        yield
    finally:
        if lock is not None:
            lock.close()


def keep_tokenizer(store: Path, tokenizer: Tokenizer) -> None:
    """Copy the tokenizer into a store if it is missing; on one rank.

    Raises StoreError.
    """
    folder = tokenizer_folder(store)
    if holds_tokenizer(folder):
        return
    with (
        write_errors(folder),
        whole_folder(folder, beside=working_folder(store), is_whole=holds_tokenizer) as partial,
    ):
        write_tokenizer(tokenizer, partial)


def finish_store(store: StoreWriter, *, job: int, jobs: int) -> Manifest | None:
    """Write the manifest if no shard is missing; return None while other jobs have shards to write.

    Raises StoreError: this job's shards, all committed by their ranks, are not visible.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    holes = store.holes()
    while any(shard % jobs == job for shard in holes):
        if time.monotonic() > deadline:
            raise StoreError(
                f"{store.folder}: rank 0 does not see {counted(len(holes), 'shard')} that other "
                "ranks wrote; set store.path to a folder that all nodes share, and start again"
            )
        time.sleep(_POLL_SECONDS)
        holes = store.holes()
    if holes:
        return None
    manifest = store.finish()
    remove_working_folder(store.folder)
    return manifest


def remove_working_folder(store: Path) -> None:
    """Remove the working files of a finished store, as far as they exist."""
    shutil.rmtree(working_folder(store), ignore_errors=True)


def configured(name: str) -> str:
    """Return the configuration key of a field of a store's plan, or a description of it."""
    if name.startswith(_DATASET):
        setting = name.removeprefix(_DATASET)
        source = re.fullmatch(r"sources\.(\d+)\.(.+)", setting)
        if source is None:
            return _DATASET_KEYS.get(setting, f"data.{setting}")
        number, part = source.groups()
        return f"data.sources.{number}.{_SOURCE_KEYS.get(part, part)}"
    return KEYS.get(name) or WORDS.get(name, name)
