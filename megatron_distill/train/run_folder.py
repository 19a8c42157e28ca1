"""The folder of a run or a store: locked by one run at a time, restored after a failed start.

It also has the files of the tokenizer and of a later export, and the settings of the starts:

<output>/config.yaml                of the newest start
<output>/config.step_0000020.yaml   of the start before, if a start resumed at step 20 with changes
<output>/config.step_0000020.2.yaml of the start before, if a second one did so at that step
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch.distributed as dist

from megatron_distill.data.tokenizers.open import (
    GENERATION_FILE,
    OTHER_KINDS_FOLDER,
    HuggingFaceTokenizer,
    Tokenizer,
    end_ids,
    holds_tokenizer,
    is_hugging_face,
    load_tokenizer,
)
from megatron_distill.errors import ConfigError
from megatron_distill.log import get_logger
from megatron_distill.models.hugging_face.assets import (
    ASSETS_FOLDER,
    CONFIG_FILE,
    TOKENIZER_FILES,
    copy_assets,
    copy_tokenizer,
)
from megatron_distill.runtime.atomic_files import replace_file, whole_folder
from megatron_distill.runtime.collectives import together
from megatron_distill.runtime.folder_lock import LOCK_FILE, FolderLock, take_lock
from megatron_distill.train.checkpoint.description import assets_of, resolve_checkpoint
from megatron_distill.train.reports.log_file import name_of_earlier

_LOGGER = get_logger(__name__)
SETTINGS_FILE: Final = "config.yaml"  # of the newest start of a run


@contextmanager
def run_folder(output: str) -> Iterator[Path]:
    """Create the folder, and lock it against other runs.

    The lock belongs to the operating system and ends with the process, however that ends.
    Raises ConfigError on all ranks: the folder cannot be written, or another run holds it.

    Collective: world, one all-gather of a short object per rank.
    """
    folder = Path(output)
    lock: FolderLock | None = None
    try:
        with together():
            if dist.get_rank() == 0:
                try:
                    folder.mkdir(parents=True, exist_ok=True)
                    lock = take_lock(folder / LOCK_FILE, named=f"output={output}")
                except OSError as error:
                    raise ConfigError(
                        f"output={output}: cannot write there ({error.strerror}); name a folder "
                        "that can be written, on a disk with space left"
                    ) from error
        yield folder
    finally:
        if lock is not None:
            lock.close()


class FolderAsFound:
    """The content of a folder before a start, restored unless the start succeeds.

    Every rank creates it before the folder exists; only the first rank reads and removes files.

    Args:
        folder: of a run or a store.
        rewritten_file: name of a file in it that a start rewrites.
        prepared: path within it of prepared data; costly to make, so complete data stays.
        work: paths within it of results; if results of another start exist, nothing is removed.
    """

    def __init__(
        self, folder: Path, *, rewritten_file: str | None, prepared: str, work: Sequence[str]
    ) -> None:
        self._folder = folder
        self._prepared = folder / prepared
        self._work = [folder / path for path in work]
        self._file = None if rewritten_file is None else folder / rewritten_file
        self._is_left_alone = True
        if dist.get_rank() == 0:
            with suppress(OSError):  # the later write to this folder reports the error
                self._look()

    @classmethod
    def of_run(cls, output: str) -> FolderAsFound:
        """The folder of a run."""
        work = ("checkpoints", "metrics.jsonl")
        return cls(Path(output), rewritten_file=SETTINGS_FILE, prepared="cache", work=work)

    def _look(self) -> None:
        folder = self._folder
        self._missing = _missing(folder)
        self._names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        self._held = {path for path in self._work if _has_content(path)}
        self._content = _content(self._file)
        self._is_left_alone = False

    def has_started(self) -> None:
        """Mark the start as succeeded: the folder's content stays."""
        self._is_left_alone = True

    @contextmanager
    def put_back_on_failure(self) -> Iterator[None]:
        """Restore the folder when the block exits before `has_started`.

        Enter it only once this start holds the folder.
        """
        try:
            yield
        finally:
            if not self._is_left_alone:
                with suppress(OSError):  # the start's own error is the one to report
                    self._put_back()

    def _put_back(self) -> None:
        if any(_has_content(path) for path in self._work if path not in self._held):
            return  # of another start, which held the folder while this one waited
        if self._file is not None and self._content is not None:
            self._file.write_bytes(self._content)
        is_prepared = _has_content(self._prepared)
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name in self._names:
                continue
            if not (is_prepared and self._prepared.is_relative_to(path)):
                _remove(path)
            elif path != self._prepared:
                for inner in path.iterdir():
                    if inner != self._prepared:
                        _remove(inner)
        if is_prepared:
            _LOGGER.info("%s remains: prepared data, which the next start uses",
                         self._prepared)  # fmt: skip
        for path in self._missing:
            path.rmdir()  # fails, and ends the loop, if the folder is not empty


@contextmanager
def without_empty_folders(folder: Path) -> Iterator[None]:
    """On exit remove a folder and its parents, if the block made them and they are empty.

    Harmless beside a job that works in the same folder; needs no world.
    """
    missing = _missing(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            for path in missing:
                path.rmdir()  # fails, and ends the loop, if the folder is not empty


def _missing(folder: Path) -> list[Path]:
    """Return the folder and its parents that do not exist, the innermost first."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


def _content(path: Path | None) -> bytes | None:
    return path.read_bytes() if path is not None and path.is_file() else None


def _has_content(path: Path) -> bool:
    """Return whether a file is not empty, or a folder contains such a file at any depth."""
    if path.is_dir():
        return any(_has_content(inner) for inner in path.iterdir())
    return path.is_file() and path.stat().st_size > 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer, byte for byte where its files are known; raises OSError."""
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.folder is not None:
        copy_tokenizer(tokenizer.folder, folder)
    else:
        tokenizer.save(folder)


def keep_with_model(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer into a model's folder under construction; raises OSError.

    A tokenizer without files for `transformers` gets a subfolder, beside a tokenizer of the same
    ids that the model may have brought.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        if tokenizer.folder is None:
            tokenizer.hugging_face.save_pretrained(folder)
        else:
            copy_tokenizer(tokenizer.folder, folder)
    else:
        tokenizer.save(folder / OTHER_KINDS_FOLDER)


def copy_model_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer of a model's folder, if it has one, into another model's folder.

    Raises OSError, and DataError for a damaged one without files for `transformers`.
    """
    if is_hugging_face(source):
        copy_tokenizer(source, destination)
    elif holds_tokenizer(source):
        keep_with_model(load_tokenizer(source), destination)


def tokenizer_bytes(folder: Path) -> int:
    """Upper bound on the bytes of the tokenizer of a model's folder."""
    own = {folder / name for name in TOKENIZER_FILES}
    for place in (folder, folder / OTHER_KINDS_FOLDER):
        own |= {*place.glob("*.model"), *place.glob("*.tiktoken*")}
    return sum(path.stat().st_size for path in own if path.is_file())


class _Weights(Protocol):
    """Where a model's weights are: a Hugging Face folder, or a checkpoint or run."""

    @property
    def hf(self) -> str | None: ...
    @property
    def checkpoint(self) -> str | None: ...


def ends_of_model(model: _Weights | None) -> tuple[int, ...]:
    """Return the tokens that end a text by the settings of a model's Hugging Face folder."""
    if model is None:
        return ()
    if model.hf is not None:
        return end_ids(Path(model.hf).expanduser())
    if model.checkpoint is not None:
        return end_ids(assets_of(resolve_checkpoint(model.checkpoint)))
    return ()


def keep_assets(output: str, source: Path | None, tokenizer: Tokenizer) -> None:
    """Write what an export of a run's student needs into the run's folder `output`; on one rank.

    These are the tokenizer, and configuration and generation settings from `source`, the Hugging
    Face folder of the student's initial weights. An earlier start's copy is not replaced. Raises
    ConfigError where they cannot be written.
    """
    folder = Path(output) / ASSETS_FOLDER
    if folder.is_dir():
        return
    try:
        with whole_folder(folder) as partial:
            if source is not None and source.is_dir():
                copy_assets(source, partial)
            keep_with_model(tokenizer, partial)
            if not (partial / CONFIG_FILE).is_file():
                (partial / CONFIG_FILE).write_text(json.dumps(_special_tokens(tokenizer)) + "\n")
            if {tokenizer.eos_id, *end_ids(partial)} != set(tokenizer.end_ids):
                _keep_ends(partial / GENERATION_FILE, tokenizer)
    except OSError as error:
        raise ConfigError(
            f"output={output}: cannot keep the tokenizer there ({error.strerror}); free "
            "disk space or change `output`"
        ) from error


def _keep_ends(file: Path, tokenizer: Tokenizer) -> None:
    """Write the tokens that end a text into generation settings; other settings stay."""
    plain = _special_tokens(tokenizer)  # `transformers` takes none from config.json beside the file
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else plain
    file.write_text(json.dumps({**known, "eos_token_id": list(tokenizer.end_ids)}) + "\n")


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int | None]:
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": tokenizer.pad_id,
    }


class _Nothing:
    """Placeholder for a key that only one of two trees has."""


_NOTHING: Final = _Nothing()


@dataclass(frozen=True)
class SettingChange:
    """A key with a different value; one side may lack a whole section or entry."""

    key: str
    before: str  # JSON, or "nothing"
    now: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[SettingChange, ...]:
    """Return the differences between two plain configurations, in the order of the second.

    Entries of a list of sections are compared by their places (`data.sources.0.weight`).
    """
    return tuple(_changes("", before, now))


def _changes(key: str, before: Any, now: Any) -> Iterator[SettingChange]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys((*now, *before)):
            yield from _changes(
                f"{key}.{name}" if key else name,
                before.get(name, _NOTHING),
                now.get(name, _NOTHING),
            )
    elif _has_sections(before) and _has_sections(now):
        pairs = itertools.zip_longest(before, now, fillvalue=_NOTHING)
        for index, (old, new) in enumerate(pairs):
            yield from _changes(f"{key}.{index}", old, new)
    elif before != now:
        yield SettingChange(key, _shown(before), _shown(now))


def _has_sections(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(entry, Mapping) for entry in value)


def _shown(value: Any) -> str:
    return "nothing" if isinstance(value, _Nothing) else json.dumps(_given(value))


def _given(value: Any) -> Any:
    """Return a value without the keys that are null, of which a whole section has some twenty."""
    if isinstance(value, Mapping):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


@contextmanager
def writing_settings(output: str) -> Iterator[None]:
    """Raise ConfigError, which names the key, where the settings of a start cannot be written."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"output={output}: cannot keep {SETTINGS_FILE} there ({error.strerror}); name a folder "
            "that can be written, on a disk with space left"
        ) from error


def keep_settings(folder: Path, text: str, *, resumed_step: int | None) -> Path | None:
    """Write this start's `config.yaml`; return the path of the one before, if it was saved.

    It is saved if this start resumes with a different configuration. A start from the beginning
    replaces it, and an equal one writes nothing. Each file appears whole. If a start is killed
    between the two writes, the next one finds the first file. Raises OSError.
    """
    current, new = folder / SETTINGS_FILE, text.encode()
    old = current.read_bytes() if current.exists() else None
    if old == new:
        return None
    previous = None
    if old is not None and resumed_step is not None:
        previous = name_of_earlier(current, resumed_step, old)
        if not previous.exists():
            replace_file(previous, old)
    replace_file(current, new)
    return previous
