"""A model class of lm-evaluation-harness over the scorer; its import needs the extra `lm-eval`."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import datasets
import lm_eval
import numpy as np
from datasets.exceptions import DatasetsError
from jinja2 import TemplateError
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from megatron_distill.data.chat.conversations import BadConversationError
from megatron_distill.data.chat.encode import chat_prompt
from megatron_distill.data.tokenizers.protocol import Tokenizer
from megatron_distill.errors import DataError
from megatron_distill.evaluation.lm_eval_errors import (
    needing,
    require_metrics,
    task_error,
    template_error,
    unknown_task,
)
from megatron_distill.evaluation.lm_eval_settings import Writing, writing_settings
from megatron_distill.evaluation.requests import Request, Scorer, Writer
from megatron_distill.evaluation.tasks.encode import TextEncoder, rolling_requests
from megatron_distill.log import get_logger

__all__ = ["ScorerLM", "harness_tasks", "require_chat_template", "run_harness"]

_LOGGER = get_logger(__name__)

# Resamples for the standard error of a metric that is no mean, such as F1. The harness takes
# 100,000, minutes of every rank; at 0 it gives none of means either.
_RESAMPLES: Final = 200
_IN_ONE_PROCESS: Final = "DISABLE_MULTIPROC"  # the harness's switch, a variable of the environment


def harness_tasks(names: Sequence[str], *, include: str | None) -> list[Any]:
    """Load tasks and groups of the harness with their data; `include`: folder of more tasks.

    Raises ConfigError for one that does not exist, whose data or metrics cannot be read, or
    whose own code needs a package that is missing.
    """
    # It would tell a server of each file that it reads, and wait for one that does not answer.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # The harness's own tasks are thousands of files to read; one of `include` needs none of them,
    # unless it is a group.
    manager = TaskManager(include_path=include, include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=include)
    found: list[Any] = []
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            raise unknown_task(name, manager.all_tasks)
        try:
            with _without_defaults_of_metrics():
                loaded = manager.load([name])
        except (AssertionError, ImportError) as error:  # in the task's code, as it is imported
            raise needing(name, error) from error
        except TemplateError as error:
            raise template_error(name, error) from error
        except (AttributeError, DatasetsError, KeyError, OSError, TypeError, ValueError) as error:
            raise task_error(name, error) from error
        for task in loaded["tasks"].values():
            require_metrics(name, task)
        groups = loaded.get("groups") or {}
        found += [groups[name]] if name in groups else loaded["tasks"].values()
    return found


def run_harness(
    model: ScorerLM,
    tasks: list[Any],
    *,
    limit: int | None,
    num_fewshot: int | None = None,
    apply_chat_template: bool = False,
    samples: bool = False,
) -> dict[str, Any] | None:
    """Return the harness's results on its rank 0, None elsewhere.

    num_fewshot: examples in front of an item; None: as in each task. apply_chat_template: prompts
    in the tokenizer's chat template, one turn per example. samples: with the items, requests and
    answers of each task under `samples`. The results have the requests that lost tokens on the left
    under `truncated`, and the generated texts that reached their most tokens under `cut`, by task.

    Raises ConfigError where the code of a task needs a package that is missing, or a template names
    a column that is missing. Also for settings of generation that the writer does not have.

    Collective: those of the model's scorer and writer.
    """
    try:
        with _bootstrapping_here():
            found: dict[str, Any] | None = lm_eval.simple_evaluate(
                model=model,
                tasks=tasks,
                task_manager=TaskManager(include_defaults=False),  # they are loaded
                num_fewshot=num_fewshot,
                apply_chat_template=apply_chat_template,
                limit=limit,
                bootstrap_iters=_RESAMPLES,
                log_samples=samples,
                random_seed=None,
                numpy_random_seed=None,
                torch_random_seed=None,
            )
    except ImportError as error:  # that a task's code defers until it judges
        raise needing(_names(tasks), error) from error
    except TemplateError as error:  # of a template that no example was rendered with before
        raise template_error(_names(tasks), error) from error
    except UnicodeDecodeError as error:  # in a row that no example was made of before
        raise task_error(_names(tasks), error) from error
    if found is None:
        return None
    counts = {"truncated": dict(model.truncated), "cut": dict(model.cut)}
    return {**found, **model.tokenizer_info(), **counts}


@contextmanager
def _without_defaults_of_metrics() -> Iterator[None]:
    """A block without the harness's warnings that a metric has its usual mean and direction."""
    logger = logging.getLogger("lm_eval.api.task")
    logger.addFilter(_tells_no_default)
    try:
        yield
    finally:
        logger.removeFilter(_tells_no_default)


def _tells_no_default(record: logging.LogRecord) -> bool:
    return re.search(r"is defined, but \w+ is not\. using default", record.getMessage()) is None


@contextmanager
def _bootstrapping_here() -> Iterator[None]:
    """A block in which the harness resamples in this process, and prints to standard error.

    Every rank resamples, and would start a process per core; standard output has the results.
    """
    before = os.environ.get(_IN_ONE_PROCESS)
    os.environ[_IN_ONE_PROCESS] = "1"
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if before is None:
            del os.environ[_IN_ONE_PROCESS]
        else:
            os.environ[_IN_ONE_PROCESS] = before


def require_chat_template(tokenizer: Tokenizer) -> None:
    """Raise DataError for a tokenizer without a chat template."""
    if tokenizer.chat_template is None:
        raise DataError(
            f"--apply-chat-template: {tokenizer.name} has no chat template; add a "
            "chat_template.jinja to its folder, or leave the option out"
        )


def _names(tasks: Sequence[Any]) -> str:
    return " ".join(str(getattr(task, "task_name", None) or task.name) for task in tasks)


class ScorerLM(TemplateLM):
    """A model behind any layout as lm-evaluation-harness calls it.

    Every rank has one and makes the same calls, as rank 0 of 1: the scorer shares the work over all
    ranks. Pass the instance to `lm_eval.simple_evaluate(model=...)`, with its seeds as None.

    `writer` None: the model generates no text. `seed`: of sampled texts, which are the same in any
    layout and beside any other tasks. `weights`: their digest, for the results. `most`: positions
    of the model, where the scorer may take fewer.

    Attributes:
        truncated: requests that lost tokens on the left, by task.
        cut: generated texts that reached their most tokens, by task.
    """

    backend = "causal"

    def __init__(
        self,
        scorer: Scorer,
        encoder: TextEncoder,
        writer: Writer | None = None,
        *,
        seed: int = 0,
        weights: str = "",
        most: int | None = None,
    ) -> None:
        super().__init__()
        self._most = scorer.positions if most is None else most
        self._weights = weights
        self._scorer, self._encoder, self._writer = scorer, encoder, writer
        self._seed = seed
        self._warned_of_system = False
        self._cut: list[bool] = []  # of the last `_loglikelihood_tokens`
        self.truncated: Counter[str] = Counter()
        self.cut: Counter[str] = Counter()

    def get_model_info(self) -> dict[str, str]:
        """Return the digest of the weights, which the harness writes into its `config`."""
        return {"model_sha": self._weights}

    def tokenizer_info(self) -> dict[str, Any]:
        """Return the tokenizer's entries of the harness's results, by its names."""
        tokenizer = self._encoder.tokenizer
        texts = {number: text for text, number in tokenizer.special_ids.items()}
        ids = {"pad": tokenizer.pad_id, "eos": tokenizer.eos_id, "bos": tokenizer.bos_id}
        return {
            **{
                f"tokenizer_{name}_token": [None if one is None else texts.get(one), str(one)]
                for name, one in ids.items()
            },
            "eot_token_id": self.eot_token_id,
            "max_length": self._scorer.positions,
        }

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
        """Return messages as text; without a generation prompt the last turn stays open.

        Where the template refuses a system message it is left out, with a warning, as the harness's
        Hugging Face backend does. Raises DataError without a chat template, and where it refuses
        the messages.
        """
        try:
            return self._rendered(chat_history, add_generation_prompt)
        except BadConversationError as error:
            without = [one for one in chat_history if one["role"] != "system"]
            if len(without) == len(chat_history) or not isinstance(error.__cause__, TemplateError):
                raise DataError(f"--apply-chat-template: {error}") from error
        if not self._warned_of_system:
            self._warned_of_system = True
            _LOGGER.warning(
                "%s: the chat template refuses a system message; the description is left out",
                self._encoder.tokenizer.name,
            )
        try:
            return self._rendered(without, add_generation_prompt)
        except BadConversationError as error:
            raise DataError(f"--apply-chat-template: {error}") from error

    def _rendered(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        template = self._chat.template
        assert template is not None
        return template.render(
            messages,
            None,
            add_generation_prompt=add_generation_prompt,
            continues_last=not add_generation_prompt,
        )

    @cached_property
    def _chat(self) -> TextEncoder:
        tokenizer = self._encoder.tokenizer
        require_chat_template(tokenizer)
        return TextEncoder.of(tokenizer, chat=True, named="--apply-chat-template")

    @cached_property
    def _stop_ids(self) -> tuple[int, ...]:
        """The tokenizer's `end_ids`, and the end of a turn of its template."""
        tokenizer = self._encoder.tokenizer
        found = set(tokenizer.end_ids)
        if tokenizer.chat_template is not None:
            found.update(chat_prompt(tokenizer, "a").stop_ids)
        return tuple(sorted(found))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Special tokens, which the harness's Hugging Face backend leaves out of its texts."""
        texts = sorted(self._encoder.tokenizer.special_ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, with the begin-of-text token unless it is told not to."""
        if add_special_tokens is False:
            return [int(one) for one in self._encoder.tokenizer.encode_batch([string])[0]]
        return [int(one) for one in self._encoder.texts([string])[0]]

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of answers after contexts, and whether each is greedy."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        self._count(requests, self._cut, "lower --num-fewshot if its prompts have examples")
        return found

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        most = self._scorer.positions + 1  # the last token of an answer is predicted, not read
        asked = []
        for (context, answer), context_ids, answer_ids in requests:
            if not answer_ids:
                raise DataError(
                    f"lm-eval: the answer {answer!r} after {context[-40:]!r} has no token of its "
                    "own; begin it with a space, as by the task's target_delimiter"
                )
            # A context of spaces has no token before the answer.
            before = context_ids or [self.prefix_token_id]
            asked.append(Request(np.array(before, np.int32), np.array(answer_ids, np.int32)))
        self._cut = [len(one.context) + len(one.answer) > most for one in asked]
        return [(score.log_prob, score.is_greedy) for score in self._scorer.score(asked)]

    def _count(self, requests: Sequence[Any], cut: Sequence[bool], remedy: str) -> None:
        """Count the requests that lose tokens, by task, with a warning."""
        is_short = self._scorer.positions < self._most
        longer = f"raise evaluation.max_length, to {self._most:,} at most"
        remedy = f"{remedy}, or {longer if is_short else 'take a model with more positions'}"
        asked = Counter(str(request.task_name) for request in requests)
        found = Counter(
            str(request.task_name) for request, is_cut in zip(requests, cut, strict=True) if is_cut
        )
        for task, count in found.items():
            _LOGGER.warning(
                "--lm-eval %s: longer than the model's %d positions, and cut on the left: %d of %d "
                "requests; %s",
                *(task, self._scorer.positions, count, asked[task], remedy),
            )
        self.truncated += found

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
        """Return generated texts, in calls of equal stops, lengths and sampling.

        The keys of draws are of tasks, documents and repeats. Raises ConfigError for settings that
        the writer does not have, and DataError where a prompt has no room.
        """
        keys = _draw_keys(requests)
        found: dict[int, str] = {}
        alike: dict[Writing, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(writing_settings(request.args[1], self._seed), []).append(number)
        cut = [False] * len(requests)
        for settings, numbers in alike.items():
            room = self._scorer.positions - settings.limit
            if room < 1 or self._writer is None:
                raise DataError(
                    f"lm-eval: max_gen_toks = {settings.limit}, and the model has "
                    f"{self._scorer.positions} positions; lower it in gen_kwargs"
                )
            prompts = [
                self.tok_encode(requests[number].args[0]) or [self.prefix_token_id]
                for number in numbers
            ]
            for number, prompt in zip(numbers, prompts, strict=True):
                cut[number] = len(prompt) > room
            texts = self._writer.write(
                [prompt[-room:] for prompt in prompts],
                stop_ids=self._stop_ids,
                stops=settings.stops,
                limit=settings.limit,
                sampling=settings.sampling,
                samples=[keys[number] for number in numbers],
            )
            found |= {
                number: self._special.sub("", one.text)
                for number, one in zip(numbers, texts, strict=True)
            }
            self.cut.update(
                str(requests[number].task_name)
                for number, one in zip(numbers, texts, strict=True)
                if one.is_cut
            )
        self._count(requests, cut, "lower max_gen_toks in gen_kwargs, or --num-fewshot")
        return [found[number] for number in range(len(requests))]


def _draw_keys(requests: Sequence[Any]) -> list[int]:
    """Return the number of each request in the key of its draws: of task, document and repeat."""
    met: Counter[tuple[str, str, str]] = Counter()
    found = []
    for request in requests:
        name = (str(request.task_name), str(request.doc_id), str(request.idx))
        text = "\n".join((*name, str(met[name])))
        found.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]))
        met[name] += 1
    return found
