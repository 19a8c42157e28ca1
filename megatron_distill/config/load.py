"""Read a run's YAML, apply dotted overrides, and report every problem at once."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from megatron_distill.config.messages import (
    Problem,
    WithoutEffect,
    innermost,
    key_at,
    raise_problems,
    schema_problems,
)
from megatron_distill.config.rules.run import rule_problems
from megatron_distill.config.schema import CaptureConfig, JobConfig, RunConfig
from megatron_distill.errors import ConfigError, counted

__all__ = ["config_of", "load_capture_config", "load_config", "load_warnings", "to_yaml"]


J = TypeVar("J", bound=JobConfig)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), *, own: Sequence[str] = ()
) -> RunConfig:
    """Read `path`, apply overrides such as `parallel.tensor=2` in order, and check the result.

    A value is YAML. `data.sources.0.weight=2` sets a key in a list entry. A mapping is merged into
    the file's mapping, any other value replaces the file's. Of `train.steps` and `train.epochs` the
    later override replaces the other key. Settings without effect become their defaults;
    `load_warnings` lists them. `check_layout` checks the rules on the number of processes. `own`:
    overrides of the program, before those of the user, which alone are in a message.

    Raises ConfigError: the file is missing or not a YAML mapping, an override is malformed, or
    keys or values are wrong. One message lists every problem of the file.
    """
    return _checked(_read_mapping(Path(path), RunConfig), path, overrides, RunConfig, own)[0]


def config_of(
    content: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    named: str,
    own: Sequence[str] = (),
) -> RunConfig:
    """Return the configuration of a mapping instead of a file; `named` stands for its path.

    Raises ConfigError as `load_config`.
    """
    return _checked(OmegaConf.create(dict(content)), named, overrides, RunConfig, own)[0]


def load_capture_config(path: str | Path, overrides: Sequence[str] = ()) -> CaptureConfig:
    """Read the file of a capture; otherwise as `load_config`."""
    return _loaded(path, overrides, CaptureConfig)[0]


def load_warnings(path: str | Path, overrides: Sequence[str], kind: type[JobConfig]) -> list[str]:
    """List the settings of a file and its overrides that have no effect, one sentence each.

    Raises ConfigError as `load_config`.
    """
    return _loaded(path, overrides, kind)[1]


def _loaded(path: str | Path, overrides: Sequence[str], kind: type[J]) -> tuple[J, list[str]]:
    return _checked(_read_mapping(Path(path), kind), path, overrides, kind)


def _checked(
    tree: DictConfig,
    path: str | Path,
    overrides: Sequence[str],
    kind: type[J],
    own: Sequence[str] = (),
) -> tuple[J, list[str]]:
    warnings = []
    for override in (*own, *overrides):
        _apply(tree, override, Path(path))
        warnings += _drop_older_length(tree, override)
    try:
        resolved = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        named = [override for override in overrides if "${" in override]
        raise ConfigError(f"{_with(path, named)}: {_first_line(error)}") from error
    config, problems, without_effect = _validate(resolved, kind)
    named = [
        override
        for override in overrides
        if any(problem.concerns(override.partition("=")[0]) for problem in problems)
    ]
    raise_problems(f"{_with(path, named)}{_of_another_job(resolved, kind)}", problems)
    assert config is not None, "no problems means a valid configuration"
    return config, warnings + without_effect


def _with(path: str | Path, overrides: Sequence[str]) -> str:
    """Name a file, and the overrides that have to do with an error."""
    return f"{path} with {' '.join(overrides)}" if overrides else str(path)


def _of_another_job(tree: Any, kind: type[JobConfig]) -> str:
    """Say where a run's file stands for a capture's, or the other way round; else nothing."""
    sections = ("train" in tree, "store" in tree)
    if kind is CaptureConfig and sections == (True, False):
        return ", the file of a run and of no capture (configs/cache.yaml is one)"
    if kind is RunConfig and sections == (False, True):
        return ", the file of a capture and of no run (configs/offline.yaml is one)"
    return ""


def to_yaml(config: JobConfig) -> str:
    """Write the resolved configuration as YAML that `load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _read_mapping(path: Path, kind: type[JobConfig]) -> DictConfig:
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); name a configuration file (YAML)"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if not isinstance(root, yaml.MappingNode):
        other = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        found = "nothing" if root is None else other
        needed = [name for name, field in kind.model_fields.items() if field.is_required()]
        sections = f"{', '.join(needed[:-1])} and {needed[-1]}"
        raise ConfigError(f"{path}: contains {found}; write a mapping with the sections {sections}")
    try:
        tree = OmegaConf.create(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from error
    assert isinstance(tree, DictConfig), "the root node is a mapping"
    return tree


def _apply(tree: DictConfig, override: str, path: Path) -> None:
    """Set one dotted key of the tree, in place."""
    name, equals, text = override.partition("=")
    parts = name.split(".")
    if not equals or not all(part and part == part.strip() for part in parts):
        raise ConfigError(
            f"override {override!r}: write key=value without spaces, such as parallel.tensor=2"
        )
    try:
        value = OmegaConf.from_dotlist([f"value={text}"])["value"]
    except yaml.YAMLError as error:
        raise ConfigError(
            f"override {override!r}: the value is not valid YAML: {_one_line(error)}; quote it for "
            f"the shell, with a space after each colon, as in 'train={{steps: 9}}'"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from error
    _check_list_steps(tree, parts, override, path)
    try:
        OmegaConf.update(tree, name, value)
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from error


def _check_list_steps(tree: DictConfig, parts: list[str], override: str, path: Path) -> None:
    """Refuse an index outside a list, and an index into a value that is not a list."""
    for depth, part in enumerate(parts):
        name = ".".join(parts[:depth])
        holder = OmegaConf.select(tree, name) if depth else tree
        if isinstance(holder, ListConfig):
            if not (part.isdecimal() and int(part) < len(holder)):
                own = f", 0 to {len(holder) - 1}" if len(holder) > 1 else ""
                entries = counted(len(holder), "entry", "entries")
                raise ConfigError(
                    f"override {override!r}: {name} is a list of {entries}{own}, counted from 0; "
                    f"to add one write the whole list, {name}=[...]"
                )
        elif part.isdecimal():
            raise ConfigError(
                f"override {override!r}: {name or path} is not a list in {path}; "
                f"write the whole list, {name}=[...]"
            )


_LENGTHS = {"steps": 0, "epochs": None}


def _drop_older_length(tree: DictConfig, override: str) -> list[str]:
    """Drop `train.steps` where the override gives `train.epochs`, and the other way round."""
    name, _, text = override.partition("=")
    section = OmegaConf.from_dotlist([f"value={text}"])["value"] if name == "train" else None
    given = set(section) if isinstance(section, DictConfig) else {name.removeprefix("train.")}
    found = {key: OmegaConf.select(tree, f"train.{key}") for key in _LENGTHS}
    newer = [key for key in _LENGTHS if key in given and found[key]]
    if len(newer) != 1 or not all(found.values()):
        return []
    (older,) = set(_LENGTHS) - set(newer)
    OmegaConf.update(tree, f"train.{older}", _LENGTHS[older])
    return [
        f"train.{older} = {found[older]} has no effect: train.{newer[0]} = {found[newer[0]]} was "
        "given later"
    ]


def _validate(tree: Any, kind: type[J]) -> tuple[J | None, list[Problem], list[str]]:
    """Check keys and values, then the rules over several keys, as far as possible.

    Wrong single keys are replaced by their defaults (or examples), so that the rules can still be
    checked. Problems that the rules find on such a key are left out.

    Returns the configuration, errors, and settings without effect.
    """
    try:
        return _settled(tree, kind)
    except ValidationError as error:
        details = innermost(error)
        problems = schema_problems(details, kind)
        wrong = [key for problem in problems for key in problem.keys]
        stand_in = copy.deepcopy(tree)
        for detail in details:
            _repair(stand_in, detail["loc"], kind)
        try:
            found = _settled(stand_in, kind)[1]
        except ValidationError:
            found = []
        return None, problems + [p for p in found if not any(map(p.concerns, wrong))], []


def _settled(tree: Any, kind: type[J]) -> tuple[J, list[Problem], list[str]]:
    """Replace settings without effect, in place, until the rules find none."""
    warnings: dict[str, None] = {}
    while True:
        config = kind.model_validate(tree)
        found = rule_problems(config)
        idle = [problem for problem in found if isinstance(problem, WithoutEffect)]
        warnings.update((problem.text, None) for problem in idle)
        changed = [_replaced(tree, problem) for problem in idle]
        if not any(changed):
            errors = [problem for problem in found if not isinstance(problem, WithoutEffect)]
            return config, errors, list(warnings)


def _replaced(tree: Any, problem: WithoutEffect) -> bool:
    """Set the key of a setting without effect to its replacement; return whether it changed."""
    *place, last = problem.keys[0].split(".")
    for part in place:
        tree = tree[int(part)] if isinstance(tree, list) else tree.get(part, {})
    changed: bool = tree.get(last) != problem.instead
    tree[last] = problem.instead
    return changed


def _repair(tree: Any, place: Sequence[int | str], kind: type[JobConfig]) -> None:
    """Replace a wrong value of the tree by a default or an example, in place."""
    while isinstance(place[-1], int) and len(place) > 1:
        place = place[:-1]
    holder = tree
    for part in place[:-1]:
        try:
            holder = holder[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(holder, dict):
        holder.pop(place[-1], None)
        key = key_at(kind, place)
        if key is not None and key.required:
            holder[place[-1]] = copy.deepcopy(key.example)


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def _first_line(error: OmegaConfBaseException) -> str:
    return str(error).splitlines()[0]
