"""A model class of lm-evaluation-harness over the scorer; its import needs the extra `lm-eval`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import requires
from typing import Any

import lm_eval
import numpy as np
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from megatron_distill.errors import ConfigError, DataError
from megatron_distill.evaluation.requests import Request, Scorer, Writer
from megatron_distill.evaluation.tasks.encode import TextEncoder, rolling_requests

__all__ = ["ScorerLM", "harness_tasks", "run_harness"]


def harness_tasks(names: Sequence[str], *, include: str | None) -> list[Any]:
    """Load tasks and groups of the harness with their data; `include`: folder of more tasks.

    Raises ConfigError for one that does not exist, whose data cannot be read, or whose own code
    needs a package that is missing.
    """
    manager = TaskManager(include_path=include)
    found: list[Any] = []
    for name in names:
        try:
            loaded = manager.load([name])
        except (AssertionError, ImportError) as error:  # in the task's code, as it is imported
            raise _needing(name, error) from error
        except TemplateError as error:
            raise _template_error(name, error) from error
        except (AttributeError, DatasetsError, KeyError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"--lm-eval {name}: {type(error).__name__}: {_line(error)}; give a name of the "
                "harness or of a task in --include, with its data on this machine"
            ) from error
        groups = loaded.get("groups") or {}
        found += [groups[name]] if name in groups else loaded["tasks"].values()
    return found


def run_harness(
    model: ScorerLM, tasks: list[Any], *, limit: int | None, samples: bool = False
) -> dict[str, Any] | None:
    """Return the harness's results on its rank 0, None elsewhere.

    samples: with the items, requests and answers of each task under `samples`.

    Raises ConfigError where the code of a task needs a package that is missing, or a template names
    a column that is.

    Collective: those of the model's scorer and writer.
    """
    try:
        return lm_eval.simple_evaluate(
            model=model,
            tasks=tasks,
            limit=limit,
            bootstrap_iters=0,
            log_samples=samples,
            random_seed=None,
            numpy_random_seed=None,
            torch_random_seed=None,
        )
    except ImportError as error:  # that a task's code defers until it judges
        raise _needing(_names(tasks), error) from error
    except TemplateError as error:  # of a template that no example was rendered with before
        raise _template_error(_names(tasks), error) from error


def _names(tasks: Sequence[Any]) -> str:
    return " ".join(str(getattr(task, "task_name", None) or task.name) for task in tasks)


def _line(error: BaseException) -> str:
    """Return an error's text in one line; of one that tells no reason, that of its cause."""
    if isinstance(error, DatasetsError) and error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())


def _template_error(name: str, error: TemplateError) -> ConfigError:
    return ConfigError(
        f"--lm-eval {name}: a template of the task does not fit its data: {_line(error)}; correct "
        "the template, or give data with the columns that it names"
    )


def _needing(name: str, error: AssertionError | ImportError) -> ConfigError:
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


class ScorerLM(TemplateLM):
    """A model behind any layout as lm-evaluation-harness calls it.

    Every rank has one and makes the same calls, as rank 0 of 1: the scorer shares the work over all
    ranks. Pass the instance to `lm_eval.simple_evaluate(model=...)`, with its seeds as None.

    `writer` None: the model generates no text.
    """

    backend = "causal"

    def __init__(self, scorer: Scorer, encoder: TextEncoder, writer: Writer | None = None) -> None:
        super().__init__()
        self._scorer, self._encoder, self._writer = scorer, encoder, writer

    @property
    def eot_token_id(self) -> int:
        """The end-of-document token."""
        return self._encoder.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return self._encoder.prefix_id

    @property
    def tokenizer_name(self) -> str:
        """The digest of the tokenizer, which keys the harness's cache of requests."""
        return self._encoder.tokenizer.identity

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the source of the tokenizer's chat template, where one is asked for."""
        return (self._encoder.tokenizer.chat_template or "") if chat_template else ""

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return messages as text; raises DataError without a chat template."""
        template = TextEncoder.of(self._encoder.tokenizer, chat=True, named="lm-eval").template
        assert template is not None
        return template.render(chat_history, None, add_generation_prompt=add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, with the begin-of-text token unless it is told not to."""
        if add_special_tokens is False:
            return [int(one) for one in self._encoder.tokenizer.encode_batch([string])[0]]
        return [int(one) for one in self._encoder.texts([string])[0]]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [
            Request(np.array(context, np.int32), np.array(answer, np.int32))
            for _, context, answer in requests
        ]
        return [(score.log_prob, score.is_greedy) for score in self._scorer.score(asked)]

    def loglikelihood_rolling(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,  # noqa: ARG002
    ) -> list[float]:
        """Return the log-probability of whole texts, each token scored once."""
        windows: list[Request] = []
        counts = []
        for request in requests:
            ids = np.array(self.tok_encode(request.args[0]), np.int32)
            found = rolling_requests(
                ids, prefix_id=self.prefix_token_id, positions=self._scorer.positions
            )
            windows += found
            counts.append(len(found))
        scores = iter(self._scorer.score(windows))
        return [sum(next(scores).log_prob for _ in range(count)) for count in counts]

    def generate_until(
        self,
        requests: Sequence[Any],
        disable_tqdm: bool = False,  # noqa: ARG002
    ) -> list[str]:
        """Return greedy texts, in calls of equal stops and lengths.

        Raises ConfigError for sampling, and DataError where the prompt has no room.
        """
        found: dict[int, str] = {}
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(_settings(request.args[1]), []).append(number)
        for (stops, limit), numbers in alike.items():
            room = self._scorer.positions - limit
            if room < 1 or self._writer is None:
                raise DataError(
                    f"lm-eval: max_gen_toks = {limit}, and the model has {self._scorer.positions} "
                    "positions; lower it in gen_kwargs"
                )
            prompts = [self.tok_encode(requests[number].args[0])[-room:] for number in numbers]
            texts = self._writer.write(
                prompts, stop_ids=(self.eot_token_id,), stops=stops, limit=limit
            )
            found |= {number: one.text for number, one in zip(numbers, texts, strict=True)}
        return [found[number] for number in range(len(requests))]


def _settings(given: Mapping[str, Any]) -> tuple[tuple[str, ...], int]:
    """Return the stop strings and the most tokens of a request."""
    if given.get("do_sample") and given.get("temperature", 1.0) > 0:
        raise ConfigError("lm-eval: do_sample = true: texts are greedy; set it to false")
    until = given.get("until") or ()
    stops = (until,) if isinstance(until, str) else tuple(until)
    return tuple(stop for stop in stops if stop), int(given.get("max_gen_toks", 256))
