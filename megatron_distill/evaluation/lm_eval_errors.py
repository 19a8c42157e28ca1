"""Errors of lm-evaluation-harness's tasks in words that name the task and the cause."""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path
from types import FrameType
from typing import Any, Final

from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.task import Task

from megatron_distill.errors import ConfigError

__all__ = ["needing", "require_metrics", "task_error", "template_error", "unknown_task"]

_TEMPLATES: Final = ("doc_to_text", "doc_to_target", "doc_to_choice")
_DOWNLOAD: Final = "run once with a network and HF_HUB_OFFLINE=0, which downloads it"
_BLOCK: Final = 2**20


def unknown_task(name: str, known: Sequence[str]) -> ConfigError:
    """Return the error of a name that no task has."""
    near = difflib.get_close_matches(name, known, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    return ConfigError(
        f"--lm-eval {name}: neither the harness nor --include has a task of that name{meant}; "
        "correct the name, or name by --include the folder of the task's file"
    )


def require_metrics(name: str, task: Any) -> None:
    """Raise ConfigError for a metric without a function, which the harness did not find."""
    if task.config.process_results is not None:  # which computes all of them
        return
    for metric, function in getattr(task, "_metric_fn_list", {}).items():
        if function is None:
            raise ConfigError(
                f"--lm-eval {_named(name, task)}: the metric {metric} is not one of the harness, "
                f"and the package evaluate cannot load it on this machine; {_DOWNLOAD}, or give "
                "another under metric_list"
            )


def task_error(name: str, error: Exception) -> ConfigError:
    """Return the error of a task whose file or data cannot be read."""
    if isinstance(error, ConnectionError):
        return _not_here(name, error)
    for cause in (error, error.__cause__):
        if isinstance(cause, UnicodeDecodeError):
            return _not_utf8(name, cause, _frame_of_task(error))
    return ConfigError(
        f"--lm-eval {name}: {type(error).__name__}: {_line(error)}; give a name of the "
        "harness or of a task in --include, with its data on this machine"
    )


def _not_here(name: str, error: ConnectionError) -> ConfigError:
    frame = _frame_of_task(error)
    if frame is None or frame.f_code.co_name != "download":
        return ConfigError(
            f"--lm-eval {name}: the task needs a file that is not on this machine "
            f"({_line(error)}); {_DOWNLOAD}, or leave the task out"
        )
    task = frame.f_locals["self"]
    return ConfigError(
        f"--lm-eval {_named(name, task)}: the data set {task.DATASET_PATH} is not on this machine "
        f"({_line(error)}); {_DOWNLOAD}, or give local rows by `dataset_path` and `dataset_kwargs` "
        "of a task in --include"
    )


def _not_utf8(name: str, error: UnicodeDecodeError, frame: FrameType | None) -> ConfigError:
    if frame is None:
        return ConfigError(
            f"--lm-eval {name}: the task's file or a file of its data is not UTF-8 "
            f"({_line(error)}); convert it to UTF-8"
        )
    task = frame.f_locals["self"]
    files = list(_data_files((task.config.dataset_kwargs or {}).get("data_files")))
    wrong = [file for file in files if not _is_utf8(file)] or files
    where = ", ".join(wrong) or f"a file of the data set {task.DATASET_PATH}"
    return ConfigError(
        f"--lm-eval {_named(name, task)}: {where}: not UTF-8 ({_line(error)}); convert it to UTF-8"
    )


def _data_files(given: object) -> Iterator[str]:
    """Yield the local files of a task's `data_files`: a name, names, or those of each split."""
    if isinstance(given, str):
        named = Path(given)
        if named.is_file():
            yield given
        elif named.parent.is_dir():
            found = (one for one in named.parent.iterdir() if fnmatch(one.name, named.name))
            yield from sorted(str(one) for one in found if one.is_file())
    elif isinstance(given, Mapping):
        for one in given.values():
            yield from _data_files(one)
    elif isinstance(given, Sequence):
        for one in given:
            yield from _data_files(one)


def _is_utf8(file: str) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with Path(file).open("rb") as stream:
            while block := stream.read(_BLOCK):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError:  # a folder, or gone: another file is the wrong one
        return True
    return True


def template_error(name: str, error: TemplateError) -> ConfigError:
    """Return the error of a template of a task, with its name and the columns of the rows."""
    frame = _frame_of_task(error)
    which, columns = "a template of the task", ""
    if frame is not None:
        name = _named(name, frame.f_locals["self"])
        if frame.f_code.co_name in _TEMPLATES:
            which = frame.f_code.co_name
        row = frame.f_locals.get("doc")
        if isinstance(row, Mapping):
            columns = f" (the rows have {', '.join(map(str, row))})"
    return ConfigError(
        f"--lm-eval {name}: {which} does not fit the data: {_line(error)}{columns}; correct "
        "the template, or give data with the columns that it names"
    )


def _frame_of_task(error: BaseException) -> FrameType | None:
    """Return the last call of a task's own method in an error's traceback, or in its causes'."""
    cause: BaseException | None = error
    while cause is not None:
        found, step = None, cause.__traceback__
        while step is not None:
            if isinstance(step.tb_frame.f_locals.get("self"), Task):
                found = step.tb_frame
            step = step.tb_next
        if found is not None:
            return found
        cause = cause.__cause__
    return None


def _named(name: str, task: Any) -> str:
    """Return the words of --lm-eval, with the task where they are several or a group."""
    own = str(task.config.task)
    return name if name == own else f"{name}: task {own}"


def _line(error: BaseException) -> str:
    """Return an error's text in one line; of one that tells no reason, that of its cause."""
    if isinstance(error, DatasetsError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def needing(name: str, error: AssertionError | ImportError) -> ConfigError:
    """Return the error of a task whose code refuses the installed packages."""
    missing, own = _missing_module(error), _line(error)
    if missing is None:
        return ConfigError(
            f"--lm-eval {name}: the task's code cannot be imported: {own}; install what it needs, "
            "or leave the task out"
        )
    told = "" if own.startswith("No module named") else f" ({own})"
    return ConfigError(
        f"--lm-eval {name}: the task needs the package {missing}, which is not installed{told}; "
        f"run `pip install '{_requirement(missing)}'`, or leave the task out"
    )


def _missing_module(error: BaseException | None) -> str | None:
    """Return the module that was not found, at the root of an error that a task's code raised."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None


def _requirement(module: str) -> str:
    """Return the harness's requirement of that name, with its version; otherwise the name."""
    for line in requires("lm_eval") or ():
        requirement = line.partition(";")[0].strip()
        name = re.match(r"[\w.-]+", requirement)
        if name is not None and _plain(name[0]) == _plain(module):
            return requirement
    return module


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
