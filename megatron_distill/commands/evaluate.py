"""Evaluate a model on tasks, or a trained student and its teacher on held-out data."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_distill.commands.command import (
    Command,
    is_stream,
    keep_result,
    model_world,
    no_file,
    note,
    spelled,
    with_launch,
    write_result,
)
from megatron_distill.errors import ConfigError, counted
from megatron_distill.evaluation.lm_eval_offline import forbid_downloads
from megatron_distill.launching.option_numbers import whole_number
from megatron_distill.train.assemble.trained_config import (
    NO_RUN,
    STUDENT_ALONE,
    add_run_arguments,
    load_trained_run,
    load_weights,
    run_and_overrides,
    weights_on,
)

if TYPE_CHECKING:
    from megatron_distill.config import RunConfig
    from megatron_distill.evaluation.tasks.paired import TaskItems
    from megatron_distill.evaluation.tasks.record import Task
    from megatron_distill.runtime.launch import Launch


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser, example="e.g. teacher.checkpoint=runs/teacher")
    parser.add_argument("--json", type=Path, help="write the figures to this file, not out")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=[],
        metavar="TASK",
        help="tasks instead of held-out losses: a YAML file, a name such as mmlu, or NAME=FOLDER",
    )
    _add_harness_arguments(parser)
    parser.add_argument(
        "--limit",
        type=whole_number("500"),
        metavar="ITEMS",
        help="items of each task: with --tasks at even distances, with --lm-eval the first ones",
    )
    parser.add_argument("--hf", metavar="DIR", help="with --tasks: Hugging Face folder, not a run")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="with --tasks: checkpoint of this library, not a run"
    )
    parser.add_argument(
        "--teacher", action="store_true", help="with --tasks: evaluate the run's teachers too"
    )
    parser.add_argument(
        "--items",
        type=Path,
        help="with --tasks: write the measures of each item to this file; with --lm-eval: each "
        "item with the model's answers, as the harness logs them",
    )
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        default=[],
        metavar="ITEMS",
        help="with --tasks: a file of --items of another model; adds the differences to it, with "
        "intervals of a paired bootstrap; may be repeated",
    )
    parser.add_argument(
        "--teacher-text",
        action="store_true",
        help="compare student and teacher also on held-out prompts that the teacher continues",
    )
    parser.add_argument(
        "--speculative",
        nargs="+",
        type=whole_number("4"),
        default=[],
        metavar="TOKENS",
        help="measure the tokens per verification of drafts of that many tokens, e.g. 2 4 8",
    )


def _add_harness_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lm-eval",
        nargs="+",
        default=[],
        metavar="TASK",
        help="tasks of lm-evaluation-harness instead (extra: lm-eval), in its form of results",
    )
    parser.add_argument("--include", metavar="DIR", help="with --lm-eval: folder of more tasks")
    parser.add_argument(
        "--num-fewshot",
        type=whole_number("5"),
        metavar="SHOTS",
        help="with --lm-eval: examples in front of each item, where a task does not forbid them",
    )
    parser.add_argument(
        "--apply-chat-template",
        action="store_true",
        help="with --lm-eval: prompts in the tokenizer's chat template, one turn per example",
    )


def _objection(arguments: argparse.Namespace) -> str | None:
    weights = [one for one in (arguments.hf, arguments.checkpoint) if one is not None]
    on_tasks = arguments.tasks or arguments.lm_eval
    words = [*([arguments.run] if arguments.run else []), *arguments.words]
    if weights and not on_tasks:
        return "--hf and --checkpoint are evaluated on tasks; add --tasks"
    if arguments.tasks and arguments.lm_eval:
        return "give either --tasks or --lm-eval"
    if len(weights) > 1 or (weights and any("=" not in word for word in words)):
        return "give one of a run, --hf and --checkpoint"
    if arguments.teacher and (weights or not arguments.tasks):
        return "--teacher is the teacher of a run, on tasks; give the run and --tasks"
    if arguments.items is not None and not on_tasks:
        return "--items writes the items of tasks; add --tasks or --lm-eval"
    if arguments.against and not arguments.tasks:
        return "--against compares on tasks; add --tasks"
    if arguments.include is not None and not arguments.lm_eval:
        return "--include has tasks of lm-evaluation-harness; add --lm-eval"
    if arguments.include is not None and not Path(arguments.include).is_dir():
        return f"--include {arguments.include}: there is no such folder; correct the path"
    if not arguments.lm_eval and (
        arguments.num_fewshot is not None or arguments.apply_chat_template
    ):
        return (
            "--num-fewshot and --apply-chat-template are of --lm-eval; a task of --tasks has "
            "`shots` and `chat`"
        )
    if arguments.num_fewshot is not None and arguments.num_fewshot < 0:
        return f"--num-fewshot {arguments.num_fewshot}: give 0 examples or more"
    if arguments.limit is not None and arguments.limit < 1:
        return f"--limit {arguments.limit}: give 1 item or more, or leave it out for all"
    if arguments.limit is not None and not on_tasks:
        return (
            "--limit is the number of items of tasks; add --tasks or --lm-eval (held-out "
            "sequences: validation.samples=N)"
        )
    if (wrong := _wrong_file(arguments)) is not None:
        return wrong
    if (arguments.teacher_text or arguments.speculative) and (weights or on_tasks):
        return "--teacher-text and --speculative compare a run's models; give the run alone"
    if any(length < 1 for length in arguments.speculative):
        return "--speculative takes lengths of drafts, 1 or more tokens"
    return NO_RUN if not weights and run_and_overrides(arguments)[0] is None else None


def _wrong_file(arguments: argparse.Namespace) -> str | None:
    """Return the error of the files to write; None: none."""
    results, items = arguments.json, arguments.items
    if (wrong := no_file(results) or no_file(items)) is not None:
        return wrong
    if results is not None and items is not None and _is_same_file(results, items):
        return f"--json and --items are both {items}: one would replace the other; name two files"
    for option, written in (("--json", results), ("--items", items)):
        for read in arguments.against:
            if written is not None and _is_same_file(written, read):
                return f"{option} {written}: would replace the file of --against; name another"
    return None


def _is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths are one file; a stream takes one text after the other."""
    if is_stream(one) or is_stream(other):
        return False
    return one.resolve() == other.resolve() or (
        one.exists() and other.exists() and one.samefile(other)
    )


def _run(arguments: argparse.Namespace) -> int:
    on_tasks = arguments.tasks or arguments.lm_eval
    work = _evaluate_tasks if on_tasks else _evaluate
    if arguments.lm_eval:
        forbid_downloads(os.environ)
    return with_launch(lambda launch: work(arguments, launch))


def configuration(arguments: argparse.Namespace, world_size: int) -> RunConfig:
    """Return the settings of the evaluation.

    Raises ConfigError: they are wrong, or the layout does not fit so many ranks.
    """
    for kind in ("hf", "checkpoint"):
        if (named := getattr(arguments, kind)) is not None:
            return load_weights({kind: named}, arguments.words, world_size=world_size)
    run, overrides = run_and_overrides(arguments)
    assert run is not None, "the check asks for one"
    is_student = (arguments.tasks or arguments.lm_eval) and not arguments.teacher
    own = STUDENT_ALONE if is_student else ()
    return load_trained_run(run, overrides, world_size=world_size, own=own)


def _evaluate_tasks(arguments: argparse.Namespace, launch: Launch) -> None:
    from megatron_distill.evaluation.tasks.record import load_task
    from megatron_distill.runtime.launch import joined_world
    from megatron_distill.runtime.termination import Interrupted, TerminationRequest

    began = time.perf_counter()
    named = arguments.hf or arguments.checkpoint or run_and_overrides(arguments)[0]
    with launch.together("configuration"):
        config = configuration(arguments, launch.size)
        tasks = [load_task(*_named_task(one, arguments.limit)) for one in arguments.tasks]
        _require_different(tasks)
        against = {str(path): _read_items(path) for path in arguments.against}
    with (
        joined_world(**config.runtime.of_world(), launch=launch) as device,
        TerminationRequest() as request,
    ):
        from megatron_distill.train.assemble.evaluation import evaluate_weights
        from megatron_distill.train.assemble.harness import evaluate_by_harness

        if arguments.hf or arguments.checkpoint:
            config, said = weights_on(config, device.kind)
            note(launch, *said)
        try:
            if arguments.lm_eval:
                found = evaluate_by_harness(
                    config,
                    device,
                    arguments.lm_eval,
                    include=arguments.include,
                    limit=arguments.limit,
                    num_fewshot=arguments.num_fewshot,
                    apply_chat_template=arguments.apply_chat_template,
                    samples=arguments.items is not None,
                )
            else:
                found = evaluate_weights(
                    config, device, tasks, teacher=arguments.teacher, against=against
                )
        except Interrupted:
            raise KeyboardInterrupt(request.signal_number or signal.SIGINT) from None
    if launch.rank == 0:
        _write_results({"model": str(named)}, dict(found or {}), arguments)
    place = _place("results", arguments.json)
    note(
        launch,
        f"{named}: {', '.join(arguments.lm_eval or [task.name for task in tasks])} in "
        f"{time.perf_counter() - began:.1f} s{place}",
    )


def _named_task(given: str, limit: int | None) -> tuple[str, dict[str, object]]:
    """Return the task of a word of --tasks and the changes to it."""
    named, equals, folder = given.partition("=")
    if equals and re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", named) and not Path(named).is_file():
        raise ConfigError(
            f"--tasks {given}: this is a setting; write settings (key=value) before --tasks"
        )
    changes: dict[str, object] = {"folder": folder} if equals else {}
    return named, {**changes, **({} if limit is None else {"limit": limit})}


def _require_different(tasks: Sequence[Task]) -> None:
    """Raise ConfigError for two tasks of one name, whose results would be one."""
    names = [task.name for task in tasks]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"--tasks: two tasks have the name {twice!r}; give one of them another `name`"
        )


def _read_items(path: Path) -> dict[str, TaskItems]:
    """Return the items of a student by task, as `--items` wrote them; raises ConfigError."""
    from megatron_distill.evaluation.tasks.paired import TaskItems

    try:
        found = json.loads(path.read_text(encoding="utf-8"))["items"]["student"]
        return {task: TaskItems.from_dict(one) for task, one in found.items()}
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(
            f"--against {path}: cannot be read ({reason}); give a file of `evaluate --items`"
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"--against {path}: not a file of `evaluate --items` ({error}); write one with --items"
        ) from error


def _write_results(
    model: Mapping[str, str], found: dict[str, Any], arguments: argparse.Namespace
) -> None:
    """Write the results, then the items: measures by role and task, or answers by task.

    A file that cannot be written costs no other one. Raises ConfigError after both.
    """
    samples = found.pop("samples", {})
    items: Mapping[str, Mapping[str, TaskItems]] = found.pop("items", {})
    failure: ConfigError | None = None
    try:
        _write_out({**model, **found}, arguments.json)
    except ConfigError as error:
        failure = error
    try:
        if arguments.items is not None and arguments.lm_eval:
            write_result(arguments.items, _text_of({**model, "samples": samples}))
        elif arguments.items is not None:
            measures = {
                role: {task: one.as_dict() for task, one in own.items()}
                for role, own in items.items()
            }
            plain = _plain({**model, "items": measures})
            write_result(arguments.items, json.dumps(plain, allow_nan=False) + "\n")
    except ConfigError as error:
        failure = error if failure is None else ConfigError(f"{failure}\n{error}")
    if failure is not None:
        raise failure


def _write_out(figures: Mapping[str, Any], path: Path | None) -> None:
    """Write figures as JSON to a file, as tables to a terminal, else as JSON to standard output."""
    if path is not None:
        keep_result(path, _text_of(figures))
    elif sys.stdout.isatty():
        _show(figures)
    else:
        sys.stdout.write(_text_of(figures))


def _show(figures: Mapping[str, Any]) -> None:
    """Print the figures as tables."""
    from rich.console import Console

    from megatron_distill.evaluation.result_tables import result_tables

    console = Console()
    for table in result_tables(figures):
        console.print(table)


def _place(kind: str, path: Path | None) -> str:
    """Return where the figures are, or how to get all of them after the tables."""
    if path is not None:
        return f"; the {kind} are in {path}"
    return "; all of them as JSON: --json FILE" if sys.stdout.isatty() else ""


def _text_of(figures: Mapping[str, object]) -> str:
    return json.dumps(_plain(figures), indent=1, default=str, allow_nan=False) + "\n"


def _plain(value: object) -> object:
    """The value with null in place of the numbers that JSON does not have."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _evaluate(arguments: argparse.Namespace, launch: Launch) -> None:
    began = time.perf_counter()
    run = run_and_overrides(arguments)[0]
    read = partial(configuration, arguments, launch.size)
    with model_world(launch, read) as (config, device):
        from megatron_distill.train.assemble.trained_run import evaluate

        figures = evaluate(
            config,
            device,
            teacher_text=arguments.teacher_text,
            drafts=arguments.speculative,
        )
    if launch.rank == 0:
        _write_out(figures, arguments.json)
    place = _place("figures", arguments.json)
    note(
        launch,
        f"{run}: evaluated on {counted(config.validation.samples, 'held-out sequence')} of "
        f"{config.data.sequence_length:,} tokens in {time.perf_counter() - began:.1f} s{place}",
        f"text from it: {spelled(arguments, 'generate')} {run}",
        f"a Hugging Face folder of it: {spelled(arguments, 'convert')} export --checkpoint {run} "
        "--hf DIR",
    )


COMMAND = Command(
    description="""Held-out losses of a trained student and its teacher, or results of tasks.

    megatron-distill evaluate runs/first
    megatron-distill evaluate runs/first parallel.tensor=2 --processes 2
    megatron-distill evaluate runs/first --teacher-text --speculative 2 4 8
    megatron-distill evaluate runs/first --tasks mmlu=data/mmlu quiz.yaml --limit 500
    megatron-distill evaluate --hf models/llama --tasks mmlu=data/mmlu --json mmlu.json""",
    add_arguments=_add_arguments,
    run=_run,
    check=_objection,
    in_ranks=True,
)
