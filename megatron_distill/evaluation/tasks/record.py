"""The record of a task, read from one YAML file: its files, its prompt, and its measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from megatron_distill.errors import ConfigError
from megatron_distill.evaluation.tasks.graders import GRADERS, RegexGrader

__all__ = ["MEASURES", "OF_LETTERS", "Task", "load_task", "shipped_tasks"]

TaskKind = Literal["multiple_choice", "generation", "perplexity"]

_SHIPPED: Final = Path(__file__).with_name("shipped")

# The names under which a kind's results are reported, the first one is the usual one to compare.
MEASURES: Final[Mapping[str, tuple[str, ...]]] = {
    "multiple_choice": ("acc", "acc_norm", "calibration_error", "letter_mass", "acc_where_mass"),
    "generation": ("exact_match",),
    "perplexity": ("bits_per_byte", "byte_perplexity", "word_perplexity", "token_perplexity"),
}
_OF_PERPLEXITY: Final = ("text", "counted_text")
_OF_GENERATION: Final = ("stops", "max_new_tokens", "graders")
# Keys that a kind does not read.
_OF_OTHER_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "multiple_choice": (*_OF_PERPLEXITY, *_OF_GENERATION),
    "generation": (*_OF_PERPLEXITY, "choices"),
    "perplexity": (
        "description", "question", "choices", "answer", "shots", "shot_files", "shot_rows",
        "shot_answer", "chat", "system", *_OF_GENERATION,
    ),
}  # fmt: skip
# Those of a multiple choice whose choices are one token each.
OF_LETTERS: Final = frozenset({"letter_mass", "acc_where_mass"})


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task; its texts are Jinja templates over the columns of a row.

    Attributes:
        name: in results.
        kind: how its items are measured.
        files: paths or globs of the items, relative to `folder`.
        shot_files: of the examples in front of an item; empty: the items' files.
        folder: of the files; None: that of the process.
        format: `jsonl`, `parquet`, `arrow` or `csv`; None: by the files' names.
        column_names: of CSV files without a header line.
        columns: names used in the templates, and the columns that hold them.
        group: column or expression; each group has a result of its own, and shots of its own. In
            templates and here `file` is the file's name without its endings.
        shots: number of examples in front of an item.
        shots_of_group: whether an item's examples are of its group; otherwise of all rows.
        shot_rows: the examples themselves, instead of files.
        limit: items that are used, spread evenly over the files; None: all.
        description: template of the text before the shots.
        question: template of an item without its answer.
        choices: expression of the choices, or their templates; of multiple choice.
        answer: expression of the index of the right choice, or of the right answer's text.
        shot_answer: template of an example's answer; None: the right choice.
        delimiter: between question and answer.
        shot_separator: after each example.
        text: template of the text of a perplexity.
        counted_text: template of the text whose bytes and words are counted; None: `text`.
        stops: strings that end a generated text.
        max_new_tokens: of a generated text.
        graders: of a generated text, by name or as a regular expression; the first one is the usual
            one.
        chat: whether prompts are rendered by the tokenizer's chat template.
        system: template of a system message before the description, with `chat`.
        truncation: what a prompt that is too long loses: `shots`, whole ones from the last on, then
            tokens on the left; or `tokens` alone.
        layouts: of further copies of the data set, each some keys of a task that differ. The first
            one whose `files` are there is read where the task's own are not.
        place: file of the record, for messages.
    """

    name: str
    kind: TaskKind
    files: tuple[str, ...] = ()
    shot_files: tuple[str, ...] = ()
    folder: str | None = None
    format: str | None = None
    column_names: tuple[str, ...] = ()
    columns: Mapping[str, str] = field(default_factory=dict)
    group: str | None = None
    shots: int = 0
    shots_of_group: bool = True
    shot_rows: tuple[Mapping[str, Any], ...] = ()
    limit: int | None = None
    description: str = ""
    question: str = ""
    choices: str | tuple[str, ...] = ()
    answer: str = ""
    shot_answer: str | None = None
    delimiter: str = " "
    shot_separator: str = "\n\n"
    text: str = ""
    counted_text: str | None = None
    stops: tuple[str, ...] = ()
    max_new_tokens: int = 256
    graders: tuple[str | RegexGrader, ...] = ()
    chat: bool = False
    system: str = ""
    truncation: str = "shots"
    layouts: tuple[Mapping[str, Any], ...] = ()
    place: str = ""

    def __post_init__(self) -> None:
        if self.kind not in MEASURES:
            raise self.problem("kind", self.kind, f"one of {', '.join(MEASURES)}")
        wanted = {
            "multiple_choice": ("question", "choices", "answer"),
            "generation": ("question", "answer", "graders"),
            "perplexity": ("text",),
        }[self.kind]
        for name in wanted:
            if not getattr(self, name):
                wanted_of = {
                    "answer": "the right answer of a row: without it nothing can be scored",
                    "graders": f"one or more of {', '.join(GRADERS)}, or a mapping with `regex`",
                }
                raise self.problem(name, None, wanted_of.get(name, "its text"))
        if self.truncation not in ("shots", "tokens"):
            raise self.problem("truncation", self.truncation, "shots or tokens")
        if self.shots < 0:
            raise self.problem("shots", self.shots, "0 or more")
        if self.limit is not None and self.limit < 1:
            raise self.problem("limit", self.limit, "1 or more, or null for all items")
        if self.max_new_tokens < 1:
            raise self.problem("max_new_tokens", self.max_new_tokens, "1 or more")
        if "" in self.stops:
            raise self.problem(
                "stops", list(self.stops), "texts that are not empty, or [] for none"
            )
        names = [_name_of(one) for one in self.graders]
        for grader in self.graders:
            if isinstance(grader, str) and grader not in GRADERS:
                raise self.problem("graders", grader, f"one of {', '.join(GRADERS)}")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise self.problem("graders", twice, "each grader a `name` of its own")

    def problem(self, key: str, value: object, wanted: str) -> ConfigError:
        """Return the error of a key."""
        return ConfigError(f"task {self.name} ({self.place}): {key} = {value!r}; give {wanted}")

    @property
    def without_effect(self) -> list[str]:
        """The keys of other kinds that differ from their defaults."""
        defaults = {one.name: one.default for one in fields(self)}
        return [
            name for name in _OF_OTHER_KINDS[self.kind] if getattr(self, name) != defaults[name]
        ]

    @property
    def is_shipped(self) -> bool:
        """Whether its record comes with the package, where a user changes nothing."""
        return Path(self.place).parent == _SHIPPED

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of its results, the usual one first."""
        if self.kind == "generation":
            return tuple(_name_of(one) for one in self.graders)
        return MEASURES[self.kind]


def _name_of(grader: str | RegexGrader) -> str:
    return grader if isinstance(grader, str) else grader.name


def shipped_tasks() -> dict[str, Path]:
    """Return the files of the tasks that come with the package, by name."""
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.yaml"))}


def load_task(named: str, changes: Mapping[str, Any] | None = None) -> Task:
    """Return the task of a YAML file or of a shipped name, with some keys changed.

    A file may name another task under `base`, whose keys it changes. Relative paths under `folder`
    are relative to the process, as on a command line; without one, `files` are relative to it.

    Raises ConfigError: no such task, not YAML, an unknown key, or a value of the wrong type.
    """
    content, place = _with_base(named, ())
    content = _merged(content, dict(changes or {}))
    name = content.pop("name", None) or Path(named).stem
    values = _values(content, place)
    if "kind" not in values:
        raise ConfigError(f"{place}: kind is missing; give one of {', '.join(MEASURES)}")
    return Task(name=str(name), place=place, **values)


def _values(content: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the keys of a task, or of one of its layouts, with their types."""
    known = [one.name for one in fields(Task) if one.name not in ("name", "place")]
    unknown = sorted(str(key) for key in set(content) - set(known))
    if unknown:
        raise ConfigError(
            f"{place}: {unknown[0]!r} is not a key of a task; the keys are base, name, "
            f"{', '.join(known)}"
        )
    return {key: _value(key, value, place) for key, value in content.items()}


def _merged(below: Mapping[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return a task with some keys changed; other files leave the layouts of the first ones."""
    if "files" in above:
        above = {"layouts": [], **above}
    columns = [one["columns"] for one in (below, above) if "columns" in one]
    if len(columns) == 2 and all(isinstance(one, Mapping) for one in columns):
        above["columns"] = {**columns[0], **columns[1]}
    return {**below, **above}


def _with_base(
    named: str, inside: tuple[str, ...], asked_by: str = ""
) -> tuple[dict[str, Any], str]:
    content, place = _read(named, asked_by)
    base = content.pop("base", None)
    if base is None:
        return content, place
    if not isinstance(base, str):
        raise ConfigError(
            f"{place}: base = {base!r} has the wrong type; give the name or the path of one task"
        )
    if base in inside:
        raise ConfigError(f"{place}: base = {base!r} leads back to itself; remove one of them")
    beside = Path(place).parent / base
    below, _ = _with_base(str(beside) if beside.is_file() else base, (*inside, base), place)
    return _merged(below, content), place


def _read(named: str, asked_by: str) -> tuple[dict[str, Any], str]:
    """Return the keys of a task's file; `asked_by`: the file with this `base`, or empty."""
    shipped = shipped_tasks()
    path = shipped.get(named, Path(named).expanduser())
    if not path.is_file():
        key = f"{asked_by}: base = " if asked_by else ""
        raise ConfigError(
            f"{key}{named}: there is no such task; give the path of a YAML file, or one of "
            f"{', '.join(shipped)}"
        )
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 (byte {error.start}: {error.reason}); convert the file to UTF-8"
        ) from error
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{path}: not a YAML file ({reason}); correct it. A text with {{{{ }}}} is in quotes, "
            'such as question: "{{ question }}"'
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a mapping of keys; see docs/evaluation.md")
    return {"name": path.stem, **content}, str(path)


_TEXTS: Final = frozenset(
    {"kind", "folder", "format", "group", "description", "question", "answer", "shot_answer"}
    | {"delimiter", "shot_separator", "text", "counted_text", "system", "truncation"}
)
_LISTS: Final = frozenset({"files", "shot_files", "column_names", "stops"})
_NUMBERS: Final = frozenset({"shots", "limit", "max_new_tokens"})
_FLAGS: Final = frozenset({"chat", "shots_of_group"})
_ROWS: Final = frozenset({"shot_rows", "layouts"})
_MAY_BE_NULL: Final = frozenset(
    {"folder", "format", "group", "limit", "shot_answer", "counted_text"}
)


def _value(key: str, value: Any, place: str) -> Any:
    """Return a key's value with its type; raises ConfigError."""
    if value is None and key in _MAY_BE_NULL:
        return None
    if key == "graders":
        return tuple(_grader(one, value, place) for one in (value if _is_list(value) else (value,)))
    if key in _LISTS or (key == "choices" and not isinstance(value, str)):
        if isinstance(value, str):
            return (value,)
        if _is_list(value) and all(isinstance(one, str) for one in value):
            return tuple(value)
    elif key in _ROWS:
        if _is_list(value) and all(isinstance(one, Mapping) for one in value):
            is_layout = key == "layouts"
            return tuple(_values(one, f"{place}: layouts") if is_layout else one for one in value)
    elif key == "columns":
        if isinstance(value, Mapping) and None not in (*value, *value.values()):
            return {str(name): str(column) for name, column in value.items()}
    elif (
        (isinstance(value, str) and (key in _TEXTS or key == "choices"))
        or (isinstance(value, bool) and key in _FLAGS)
        or (isinstance(value, int) and not isinstance(value, bool) and key in _NUMBERS)
    ):
        return value
    if value is None:
        raise ConfigError(
            f"{place}: {key} = null, which YAML reads for ~ and for nothing; give {_wanted(key)}"
        )
    raise ConfigError(f"{place}: {key} = {value!r} has the wrong type; give {_wanted(key)}")


def _grader(one: Any, value: Any, place: str) -> str | RegexGrader:
    """Return a grader of the list `value`; raises ConfigError."""
    if isinstance(one, str):
        return one
    known = [field.name for field in fields(RegexGrader)]
    if (
        not isinstance(one, Mapping)
        or "regex" not in one
        or not set(one) <= set(known)
        or not all(isinstance(text, str) for text in one.values())
    ):
        raise ConfigError(
            f"{place}: graders = {value!r} has the wrong type; give names of graders, or mappings "
            f"of {', '.join(known)} to texts, such as {{regex: 'is (\\d+)', name: number}}"
        )
    try:
        return RegexGrader(**one)
    except ConfigError as error:
        raise ConfigError(f"{place}: graders: {error}") from error


def _wanted(key: str) -> str:
    """Return what a key takes; without quotes YAML reads `no` and `1` as other types than texts."""
    if key in _NUMBERS:
        return "a whole number"
    if key in _FLAGS:
        return "true or false"
    if key in _ROWS or key == "columns":
        return "a mapping of names to columns" if key == "columns" else "a list of mappings"
    quoted = ', in quotes: "no", "1"'
    texts = "a list of texts" if key in _LISTS else "a text"
    return f"{'an expression or a list of texts' if key == 'choices' else texts}{quoted}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
