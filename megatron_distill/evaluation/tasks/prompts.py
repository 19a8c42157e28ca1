"""Prompts of a task's items: Jinja templates over the columns of a row."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Final

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta

from megatron_distill.errors import ConfigError, DataError, counted
from megatron_distill.evaluation.tasks.environment import NullTextError, task_environment
from megatron_distill.evaluation.tasks.record import Task
from megatron_distill.evaluation.tasks.rows import (
    TaskRow,
    columns_of,
    in_its_layout,
    read_items,
    read_shots,
)
from megatron_distill.log import get_logger

__all__ = ["Item", "Prompt", "TaskTemplates", "read_task"]

_LOGGER = get_logger(__name__)

# Errors of operations and filters in a template.
_OF_TEMPLATES: Final = (
    TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error,
)  # fmt: skip


@dataclass(frozen=True)
class Prompt:
    """The parts of a prompt; the answer comes after it.

    Attributes:
        system: a system message, with a chat template only.
        description: before the examples.
        shots: question and answer of each example.
        question: of the item.
        delimiter: between a question and its answer.
        shot_separator: after each example.
    """

    system: str
    description: str
    shots: tuple[tuple[str, str], ...]
    question: str
    delimiter: str
    shot_separator: str

    @property
    def text(self) -> str:
        """The whole prompt as plain text, up to the delimiter of the answer."""
        examples = (
            f"{question}{self.delimiter}{answer}{self.shot_separator}"
            for question, answer in self.shots
        )
        return f"{self.description}{''.join(examples)}{self.question}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages: a system message, one turn per example, the question."""
        found = [{"role": "system", "content": self._instruction}] if self._instruction else []
        for question, answer in self.shots:
            found.append({"role": "user", "content": question})
            found.append({"role": "assistant", "content": answer})
        return [*found, {"role": "user", "content": self.question}]

    @property
    def _instruction(self) -> str:
        """The content of the system message: `shot_separator` between two parts without a blank."""
        if not self.system or not self.description:
            return f"{self.system}{self.description}"
        is_blank = self.system[-1].isspace() or self.description[0].isspace()
        return f"{self.system}{'' if is_blank else self.shot_separator}{self.description}"

    def without_last_shot(self) -> Prompt:
        """The same prompt with one example less."""
        return replace(self, shots=self.shots[:-1])


@dataclass(frozen=True)
class Item:
    """An item of a task, ready to be encoded.

    Attributes:
        prompt: before the answer; of a perplexity without texts.
        choices: texts of the choices, of multiple choice.
        right: index of the right choice; 0 elsewhere.
        target: the right answer, of generation; the text, of a perplexity.
        counted: the text whose bytes and words are counted, of a perplexity.
        group: value of the task's group column, empty without one.
        place: file and row.
        of_rows: rows of the task's files, of which `limit` leaves some; 0: unknown.
    """

    prompt: Prompt
    choices: tuple[str, ...] = ()
    right: int = 0
    target: str = ""
    counted: str = ""
    group: str = ""
    place: str = ""
    of_rows: int = 0


class TaskTemplates:
    """The compiled templates of a task; raises ConfigError for one that is no template."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._environment = task_environment()
        # Compiled once: a task renders them for each item and each of its examples.
        self._template = cache(self._environment.from_string)
        self._compiled = cache(
            partial(self._environment.compile_expression, undefined_to_none=False)
        )

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns of a row that the templates read."""
        task, names = self._task, set()
        texts = [task.description, task.question, task.shot_answer or "", task.text, task.system]
        texts += [task.counted_text or ""]
        expressions = [task.answer]
        if isinstance(task.choices, str):
            expressions.append(task.choices)
        else:
            texts += task.choices
        texts += [f"{{{{ {one} }}}}" for one in expressions if one]
        for text in texts:
            try:
                names |= meta.find_undeclared_variables(self._environment.parse(text))
            except TemplateSyntaxError as error:
                raise ConfigError(
                    f"task {task.name} ({task.place}): {text!r} is not a template: {error.message};"
                    " correct it"
                ) from error
        if task.kind == "perplexity":
            self._require_columns(task.text)
        if task.group:
            names |= self._names_of_group(task.group)
        return tuple(sorted(task.columns.get(name, name) for name in names))

    def _require_columns(self, text: str) -> None:
        """Raise ConfigError for a text that would be the same in every row."""
        if not meta.find_undeclared_variables(self._environment.parse(text)):
            task = self._task
            raise ConfigError(
                f"task {task.name} ({task.place}): text = {text!r} names no column; write it as a "
                f"template, as {{{{ {text if text.isidentifier() else 'text'} }}}}"
            )

    def _names_of_group(self, group: str) -> set[str]:
        """Return the columns of a group: its own name, or those of an expression."""
        try:
            found = meta.find_undeclared_variables(self._environment.parse(f"{{{{ {group} }}}}"))
        except TemplateSyntaxError:
            found = set()  # a column whose name is no expression
        return {group, *found}

    def item(self, row: TaskRow, shots: Sequence[TaskRow]) -> Item:
        """Return the item of a row with these examples. Raises DataError: a column is missing."""
        task = self._task
        group = self.group_of(row)
        if task.kind == "perplexity":
            text = self._text(task.text, row)
            counted = text if task.counted_text is None else self._text(task.counted_text, row)
            nothing = Prompt("", "", (), "", "", "")
            return Item(nothing, target=text, counted=counted, group=group, place=row.place)
        prompt = Prompt(
            system=self._text(task.system, row),
            description=self._text(task.description, row),
            shots=tuple((self._text(task.question, one), self._shot_answer(one)) for one in shots),
            question=self._text(task.question, row),
            delimiter=task.delimiter,
            shot_separator=task.shot_separator,
        )
        if task.kind == "generation":
            target = str(self._answer(row))
            return Item(prompt, target=target, group=group, place=row.place)
        choices, right = self._choices(row)
        return Item(prompt, choices, right, group=group, place=row.place)

    def group_of(self, row: TaskRow) -> str:
        """Return the group of a row as text, empty without one."""
        group = self._task.group
        if not group:
            return ""
        values = self._values(row)
        if values.get(group) is not None:
            return str(values[group])
        if group in values:
            raise self._null(group, row)
        return str(self._expression("group", group, row))

    def pool_of(self, row: TaskRow) -> str:
        """Return the group whose rows are the row's examples; empty where it is all rows."""
        return self.group_of(row) if self._task.shots_of_group else ""

    def _shot_answer(self, row: TaskRow) -> str:
        task = self._task
        if task.shot_answer is not None:
            return self._text(task.shot_answer, row)
        if task.kind == "generation":
            return str(self._answer(row))
        choices, right = self._choices(row)
        return choices[right]

    def _choices(self, row: TaskRow) -> tuple[tuple[str, ...], int]:
        task = self._task
        if isinstance(task.choices, str):
            found = self._expression("choices", task.choices, row)
            if isinstance(found, str) or not isinstance(found, Sequence) or len(found) < 2:
                raise DataError(
                    f"task {task.name}: {row.place}: choices = {task.choices!r} gives {found!r}; "
                    "it must be a list of two or more texts"
                )
            if any(one is None for one in found):
                raise DataError(
                    f"task {task.name}: {row.place}: choices = {task.choices!r} gives a null "
                    f"({found!r}); correct the row, or leave nulls out: "
                    f"choices: ({task.choices}) | reject('none') | list"
                )
            choices = tuple(str(one) for one in found)
        else:
            choices = tuple(self._text(one, row) for one in task.choices)
        right = self._answer(row, choices)
        if isinstance(right, str):
            right = self._index_of(right, choices, row)
        if not isinstance(right, int) or not 0 <= right < len(choices):
            raise DataError(
                f"task {task.name}: {row.place}: the answer is {right!r}, neither one of the "
                f"choices nor an index from 0 to {len(choices) - 1}; correct `answer` or the row"
            )
        return choices, right

    def _index_of(self, right: str, choices: Sequence[str], row: TaskRow) -> int | str:
        """Return the index of an answer as text: a choice, or an index as CSV files have it.

        Raises DataError where it is both, of different choices.
        """
        index = int(right) if right.strip().isdecimal() else None
        if right not in choices:
            return right if index is None else index
        found = choices.index(right)
        if index is not None and index < len(choices) and index != found:
            task = self._task
            listed = "[..., ...]" if not isinstance(task.choices, str) else f"({task.choices})"
            raise DataError(
                f"task {task.name}: {row.place}: answer = {task.answer!r} gives {right!r}: as an "
                f"index the choice {choices[index]!r}, as a text the choice {right!r}; write "
                f"`answer: ({task.answer}) | int` for the index, or "
                f"`answer: {listed}.index({task.answer})` with the list of choices for the text"
            )
        return found

    def _answer(self, row: TaskRow, choices: Sequence[str] = ()) -> Any:
        """Return the right answer of a row; raises DataError for blanks that are no choice."""
        task = self._task
        found = self._expression("answer", task.answer, row)
        is_blank = isinstance(found, str) and not found.strip() and found not in choices
        if is_blank or found != found:  # NaN stands for a missing value, too
            raise DataError(
                f"task {task.name}: {row.place}: answer = {task.answer!r} is empty: the row has no "
                "right answer; give files that have the answers, or remove the row"
            )
        return found

    def _values(self, row: TaskRow) -> Mapping[str, Any]:
        task = self._task
        values = {"file": row.file, **row.values}
        for name, column in task.columns.items():
            if column in row.values:
                values[name] = row.values[column]
        return values

    def _text(self, template: str, row: TaskRow) -> str:
        if "{" not in template:
            return template
        try:
            return self._template(template).render(self._values(row))
        except NullTextError as error:
            raise self._null(template, row) from error
        except _OF_TEMPLATES as error:
            raise self._wrong(self._key_of(template), template, error, row) from error

    def _key_of(self, template: str) -> str:
        """Return the key of the task that has this template."""
        texts = ("question", "description", "system", "shot_answer", "text", "counted_text")
        return next((key for key in texts if getattr(self._task, key) == template), "choices")

    def _expression(self, key: str, source: str, row: TaskRow) -> Any:
        """Return the value of an expression over the columns."""
        try:
            found = self._compiled(source)(**self._values(row))
        except NullTextError as error:
            raise self._null(source, row) from error
        except _OF_TEMPLATES as error:
            raise self._wrong(key, source, error, row) from error
        if isinstance(found, StrictUndefined) or found is None:
            raise self._missing(f"{key} = {source!r} has no value", row)
        return found

    def _null(self, template: str, row: TaskRow) -> DataError:
        names = ", ".join(name for name, value in row.values.items() if value is None)
        columns = f"null columns: {names}" if names else "inside of a column"
        return DataError(
            f"task {self._task.name}: {row.place}: {template!r} writes a null ({columns}); correct "
            "or remove the row, or give a text for a null: {{ x or '' }}, or {% if x %}"
        )

    def _wrong(self, key: str, template: str, error: Exception, row: TaskRow) -> DataError:
        """Return the error of a template that cannot be rendered."""
        if "NoneType" in str(error):  # `+` and comparisons, which Python refuses itself
            return self._null(template, row)
        return self._missing(f"{key}: {error}", row)

    def _missing(self, reason: str, row: TaskRow) -> DataError:
        names = ", ".join(columns_of(row)) or "none"
        for name, column in self._task.columns.items():
            if column not in row.values:
                reason += f"; columns.{name}: {column!r} is none of this row's columns"
        return DataError(
            f"task {self._task.name}: {row.place}: {reason} (its columns: {names}); name the "
            f"column under `columns`, or correct the template in {self._task.place}"
        )


def _warn_of_keys(task: Task) -> None:
    """Log the keys of a task that change nothing."""
    named = f"task {task.name} ({task.place})"
    if keys := task.without_effect:
        _LOGGER.warning("%s: %s: no effect with kind: %s", named, ", ".join(keys), task.kind)
    if task.system and not task.chat and "system" not in keys:
        _LOGGER.warning(
            "%s: system has no effect without chat: true; set it, or remove system", named
        )


def read_task(task: Task) -> list[Item]:
    """Read a task's files and build its items with their examples.

    The examples of an item are the first `shots` rows of its group, or of all, other than the item
    where both come from the same files. Raises ConfigError or DataError: a file or a column is
    missing, or there are too few examples.
    """
    task = in_its_layout(task)
    _warn_of_keys(task)
    if task.kind == "perplexity":
        task = replace(task, shots=0)
    templates = TaskTemplates(task)
    columns = templates.columns
    rows, of_rows = read_items(task, columns)
    shots = read_shots(task, columns)
    pools: dict[str, list[TaskRow]] = {}
    for shot in shots:
        pools.setdefault(templates.pool_of(shot), []).append(shot)
    has_own_files = bool(task.shot_files or task.shot_rows)
    found = []
    for row in rows:
        own = templates.pool_of(row)
        pool = pools.get(own, [])[: task.shots + 1]
        chosen = [one for one in pool if has_own_files or one.place != row.place][: task.shots]
        if len(chosen) < task.shots:
            group = f" of {task.group} {own}" if task.group and task.shots_of_group else ""
            raise DataError(
                f"task {task.name}: {counted(len(chosen), 'example')}{group}, and shots is "
                f"{task.shots}; "
                "lower shots, or add rows to shot_files"
            )
        found.append(replace(templates.item(row, chosen), of_rows=of_rows))
    return found
