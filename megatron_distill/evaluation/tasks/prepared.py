"""A task in the tokens of one model: its requests, and the facts that its results need."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron_distill.data.chat.encode import chat_prompt
from megatron_distill.data.tokenizers.protocol import Tokenizer
from megatron_distill.errors import ConfigError, DataError, counted
from megatron_distill.evaluation.requests import Request
from megatron_distill.evaluation.tasks.encode import TextEncoder, rolling_requests
from megatron_distill.evaluation.tasks.graders import ANSWERS, opened_grader
from megatron_distill.evaluation.tasks.prompts import Item, Prompt, read_task
from megatron_distill.evaluation.tasks.record import OF_LETTERS, Task

__all__ = ["ItemFacts", "PreparedTask", "prepare_task"]


@dataclass(frozen=True)
class ItemFacts:
    """The facts of an item that its scores are compared with.

    Attributes:
        requests: number of its requests, which follow one another.
        right: index of the right choice.
        lengths: characters of each choice, of multiple choice.
        target: the right answer, of generation.
        counted: bytes and words of the text, of a perplexity.
        tokens: scored tokens.
        group: of the item; empty without groups.
    """

    requests: int
    right: int = 0
    lengths: tuple[int, ...] = ()
    target: str = ""
    counted: tuple[int, int] = (0, 0)
    tokens: int = 0
    group: str = ""


@dataclass(frozen=True)
class PreparedTask:
    """A task whose prompts are encoded for one model.

    Attributes:
        requests: of all items, one after another.
        items: facts of each item.
        prompt_hash: digest of all prompts and answers as text, and of the chat template's use.
        first_prompt: text of the first item's prompt.
        shots_dropped: items that lost examples, since their prompt was too long.
        truncated: items that lost tokens on the left.
        is_single: whether each choice is one token, so that probabilities of letters exist.
        stop_ids: that end a generated text.
        is_limited: whether `limit` leaves rows out.
    """

    task: Task
    requests: Sequence[Request] = field(repr=False)
    items: tuple[ItemFacts, ...] = field(repr=False)
    prompt_hash: str
    first_prompt: str
    shots_dropped: int = 0
    truncated: int = 0
    is_single: bool = False
    stop_ids: tuple[int, ...] = ()
    is_limited: bool = False

    @property
    def measures(self) -> tuple[str, ...]:
        """The names of its results, the usual one first; those of letters need single tokens."""
        return tuple(
            name for name in self.task.measures if self.is_single or name not in OF_LETTERS
        )

    @property
    def identity(self) -> str:
        """Digest of all that a model's measures depend on: tokens, right answers, grading."""
        task = self.task
        rules = (task.kind, task.max_new_tokens, task.stops, task.graders, self.stop_ids)
        found = hashlib.sha256(f"{self.prompt_hash} {rules} {self.items}".encode())
        for request in self.requests:
            for ids in (request.context, request.answer):
                found.update(np.int64(len(ids)).tobytes())
                found.update(ids.astype("<i4").tobytes())
        return f"sha256:{found.hexdigest()}"


def prepare_task(
    task: Task,
    tokenizer: Tokenizer,
    *,
    positions: int,
    items: Sequence[Item] | None = None,
    add_bos: bool | None = None,
) -> PreparedTask:
    """Encode a task for a model with that many positions.

    items: of the task; None: they are read. add_bos: as in `TextEncoder`. Raises ConfigError or
    DataError: files, columns, templates, or graders.
    """
    items = read_task(task) if items is None else items
    encoder = TextEncoder.of(tokenizer, chat=task.chat, named=f"task {task.name}", add_bos=add_bos)
    for grader in task.graders:
        opened_grader(grader)
    prepare = {"perplexity": _of_texts, "multiple_choice": _of_choices}.get(task.kind, _of_prompts)
    found = prepare(task, items, encoder, positions)
    return replace(found, is_limited=any(item.of_rows > len(items) for item in items[:1]))


def _of_prompts(
    task: Task, items: Sequence[Item], encoder: TextEncoder, positions: int
) -> PreparedTask:
    """Encode the prompts of generated texts, which leave room for `max_new_tokens`."""
    named, tokenizer = f"task {task.name}", encoder.tokenizer
    room = positions - task.max_new_tokens
    if room < 1:
        own = f"in a YAML file of your own with `base: {task.name}`"
        raise ConfigError(
            f"{named}: max_new_tokens = {task.max_new_tokens}, and the model has {positions} "
            f"positions; lower it {own if task.is_shipped else f'in {task.place}'}"
        )
    _require_answers(task, items)
    prompts = [item.prompt for item in items]
    texts = [encoder.rendered(prompt, named=named) for prompt in prompts]
    encoded = encoder.texts(texts)
    shots_dropped = truncated = 0
    for place, prompt in enumerate(prompts):
        shorter = prompt
        while len(encoded[place]) > room and task.truncation == "shots" and shorter.shots:
            shorter = shorter.without_last_shot()
            texts[place] = encoder.rendered(shorter, named=named)
            (encoded[place],) = encoder.texts([texts[place]])
        shots_dropped += shorter is not prompt
        truncated += len(encoded[place]) > room
        encoded[place] = encoded[place][-room:]
    nothing, prefix = np.zeros(0, np.int32), np.array([encoder.prefix_id], np.int32)
    return PreparedTask(
        task,
        # A model writes behind a token: an empty prompt becomes the prefix token.
        [Request(ids if len(ids) else prefix, nothing) for ids in encoded],
        tuple(ItemFacts(1, target=item.target, group=item.group) for item in items),
        _digest(task, [*texts, *task.stops]),
        texts[0] if texts else "",
        shots_dropped=shots_dropped,
        truncated=truncated,
        stop_ids=chat_prompt(tokenizer, "a").stop_ids if task.chat else tokenizer.end_ids,
    )


def _require_answers(task: Task, items: Sequence[Item]) -> None:
    """Raise DataError for a right answer that a grader can find in no text."""
    for grader in task.graders:
        if not isinstance(grader, str) or grader not in ANSWERS:
            continue
        pattern, wanted = ANSWERS[grader]
        wrong = next((one for one in items if not re.search(pattern, one.target)), None)
        if wrong is not None:
            raise DataError(
                f"task {task.name}: {wrong.place}: the answer is {wrong.target!r:.80}, without "
                f"{wanted} that {grader} compares; correct `answer` ({task.answer!r}) or the row, "
                "or choose another grader"
            )


def _of_texts(
    task: Task, items: Sequence[Item], encoder: TextEncoder, positions: int
) -> PreparedTask:
    requests: list[Request] = []
    facts = []
    ids_of = encoder.tokenizer.encode_batch([item.target for item in items])
    if not any(map(len, ids_of)):
        raise DataError(
            f"task {task.name} ({task.place}): text = {task.text!r} is empty in each of "
            f"{counted(len(items), 'row')}; name the column that has the texts"
        )
    for item, ids in zip(items, ids_of, strict=True):
        windows = rolling_requests(ids, prefix_id=encoder.prefix_id, positions=positions)
        requests += windows
        # As the harness counts: a blank at an end is followed, or preceded, by an empty word.
        words = len(re.split(r"\s+", item.counted))
        sizes = (len(item.counted.encode()), words)
        facts.append(ItemFacts(len(windows), counted=sizes, tokens=len(ids), group=item.group))
    texts = [item.target for item in items]
    return PreparedTask(
        task, requests, tuple(facts), _digest(task, texts), texts[0][:2000] if texts else ""
    )


def _of_choices(
    task: Task, items: Sequence[Item], encoder: TextEncoder, positions: int
) -> PreparedTask:
    named = f"task {task.name}"
    # A chat template ends with the beginning of the answer's turn.
    delimiter = "" if task.chat else task.delimiter
    answers = [[f"{delimiter}{choice}" for choice in item.choices] for item in items]
    prompts = [item.prompt for item in items]
    texts = [encoder.rendered(prompt, named=named) for prompt in prompts]
    encoded = encoder.requests(list(zip(texts, answers, strict=True)))
    shots_dropped = truncated = 0
    for place, requests in enumerate(encoded):
        if _fits(requests, positions):
            continue
        prompt = prompts[place]
        if task.truncation == "shots" and prompt.shots:
            encoded[place], texts[place] = _shortened(
                prompt, answers[place], encoder, positions, named
            )
            shots_dropped += 1
        truncated += not _fits(encoded[place], positions)
    _require_tokens(task, items, answers, encoded)
    facts = tuple(
        ItemFacts(
            len(requests),
            right=item.right,
            lengths=tuple(len(choice) for choice in item.choices),
            tokens=sum(len(request.answer) for request in requests),
            group=item.group,
        )
        for item, requests in zip(items, encoded, strict=True)
    )
    content = [text for pair in zip(texts, answers, strict=True) for text in (pair[0], *pair[1])]
    flat = [request for requests in encoded for request in requests]
    return PreparedTask(
        task,
        flat,
        facts,
        _digest(task, content),
        texts[0] if texts else "",
        shots_dropped=shots_dropped,
        truncated=truncated,
        is_single=all(len(request.answer) == 1 for request in flat),
    )


def _require_tokens(
    task: Task,
    items: Sequence[Item],
    answers: Sequence[Sequence[str]],
    encoded: Sequence[Sequence[Request]],
) -> None:
    """Raise DataError for a choice without a token: its probability is one, so it always wins.

    White space at the end of a prompt is scored with the answer, but is none of an empty one.
    """
    for item, texts, requests in zip(items, answers, encoded, strict=True):
        for number, request in enumerate(requests):
            if not texts[number] or not len(request.answer):
                choice = item.choices[number]
                remedy = ", or set chat=false" if task.chat else ", or set `delimiter` to a space"
                if not task.chat and task.delimiter == " ":
                    remedy = ""
                raise DataError(
                    f"task {task.name}: {item.place}: choice {number}, {choice!r}, has no token of "
                    f"its own behind the prompt; correct the row or `choices`{remedy}"
                )


def _fits(requests: Sequence[Request], positions: int) -> bool:
    """Whether no token is lost; the last token of an answer is predicted, not read."""
    return all(len(one.context) + len(one.answer) <= positions + 1 for one in requests)


def _shortened(
    prompt: Prompt, answers: Sequence[str], encoder: TextEncoder, positions: int, named: str
) -> tuple[list[Request], str]:
    """Drop examples from the last on until the prompt fits, or none is left."""
    while True:
        prompt = prompt.without_last_shot()
        text = encoder.rendered(prompt, named=named)
        (requests,) = encoder.requests([(text, answers)])
        if _fits(requests, positions) or not prompt.shots:
            return requests, text


def _digest(task: Task, texts: Sequence[str]) -> str:
    found = hashlib.sha256(b"chat" if task.chat else b"plain")
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        found.update(np.int64(len(content)).tobytes())
        found.update(content)
    return f"sha256:{found.hexdigest()}"
