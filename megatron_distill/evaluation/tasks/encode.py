"""Token ids of prompts and answers, by the rules of lm-evaluation-harness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.chat.conversations import BadConversationError, ConversationSpec
from megatron_distill.data.chat.template import (
    ChatTemplate,
    chat_template,
    encode_rendered,
)
from megatron_distill.data.tokenizers.protocol import Tokenizer, begin_token
from megatron_distill.errors import DataError
from megatron_distill.evaluation.requests import Request
from megatron_distill.evaluation.tasks.prompts import Prompt

__all__ = ["TextEncoder", "rolling_requests"]

IdArray = NDArray[np.int32]


@dataclass(frozen=True)
class TextEncoder:
    """Encodes texts for a model: begin-of-text tokens, answers after contexts, chat templates.

    Attributes:
        template: chat template of prompts with `chat`; None where none is asked for.
        add_bos: of prompts without a template, as `data.add_bos`; None: by the tokenizer's files.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None = None
    add_bos: bool | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, *, chat: bool, named: str, add_bos: bool | None = None
    ) -> TextEncoder:
        """Return the encoder of a task; raises DataError: chat, and no chat template."""
        if not chat:
            return cls(tokenizer, add_bos=add_bos)
        if tokenizer.chat_template is None:
            raise DataError(
                f"{named}: chat is true, but {tokenizer.name} has no chat template; add a "
                "chat_template.jinja to its folder, or set chat to false"
            )
        return cls(tokenizer, chat_template(ConversationSpec(), tokenizer))

    @property
    def prefix_id(self) -> int:
        """The token before a text without a context: begin-of-text, else end-of-document."""
        bos_id = self.tokenizer.bos_id
        return self.tokenizer.eos_id if bos_id is None else bos_id

    def rendered(self, prompt: Prompt, *, named: str) -> str:
        """Return a prompt as text, in the chat template if there is one; raises DataError."""
        if self.template is None:
            return prompt.text
        try:
            return self.template.render(prompt.messages, None, add_generation_prompt=True)
        except BadConversationError as error:
            raise DataError(
                f"{named}: {self.tokenizer.name}: {error}; set chat to false, or leave out the "
                "description, which is the system message"
            ) from error

    def texts(self, texts: Sequence[str]) -> list[IdArray]:
        """Return the ids of whole texts, with one begin-of-text token where the model has one.

        A text that spells this token out has no second one. Raises DataError for two of them, and
        as `begin_token`.
        """
        bos_id = self.tokenizer.bos_id
        begin = begin_token(self.tokenizer, self.add_bos)
        spelled = None if bos_id is None else self._spelled(bos_id)
        begins = [bool(spelled) and text.startswith(str(spelled)) for text in texts]
        reads = [text for text, begun in zip(texts, begins, strict=True) if not begun]
        plain: Iterator[IdArray] = iter(self._plain(reads))
        special = iter(
            encode_rendered(
                self.tokenizer, [text for text, begun in zip(texts, begins, strict=True) if begun]
            )
        )
        found = []
        for begun in begins:
            ids = next(special).ids_n if begun else next(plain)
            if not begun and begin is not None:
                ids = np.concatenate([np.array([begin], np.int32), ids])
            if bos_id is not None and len(ids) > 1 and ids[0] == ids[1] == bos_id:
                raise DataError(
                    f"a prompt begins with two begin-of-text tokens ({spelled!r}); remove one from "
                    "the task's text or from the chat template"
                )
            found.append(ids)
        return found

    def _plain(self, texts: Sequence[str]) -> list[IdArray]:
        if self.template is not None:
            return [one.ids_n for one in encode_rendered(self.tokenizer, texts)]
        return self.tokenizer.encode_batch(texts)

    def _spelled(self, number: int) -> str | None:
        return next(
            (text for text, one in self.tokenizer.special_ids.items() if one == number), None
        )

    def requests(self, pairs: Sequence[tuple[str, Sequence[str]]]) -> list[list[Request]]:
        """Return the requests of answers after contexts.

        Spaces at the end of a context belong to its answers. Context and answer are encoded
        together, and cut behind as many tokens as the context has alone. An empty context becomes
        the prefix token, unless the answer begins with it.
        """
        texts: list[str] = []
        for context, answers in pairs:
            body = context.rstrip()
            spaces = context[len(body) :]
            texts.append(body)
            texts += [f"{body}{spaces}{answer}" for answer in answers]
        encoded = iter(self.texts(texts))
        found = []
        for context, answers in pairs:
            context_ids = next(encoded)
            wholes = [next(encoded) for _ in answers]
            if context.strip():
                cut = len(context_ids)
                found.append([Request(context_ids, whole[cut:]) for whole in wholes])
            else:
                alone = self._without_context([f"{context}{answer}" for answer in answers])
                found.append(alone)
        return found

    def _without_context(self, answers: Sequence[str]) -> list[Request]:
        prefix = np.array([self.prefix_id], np.int32)
        found = []
        for ids in self._plain(answers):
            has_prefix = len(ids) > 1 and ids[0] == prefix[0]
            found.append(Request(ids[:1], ids[1:]) if has_prefix else Request(prefix, ids))
        return found


def rolling_requests(ids: IdArray, *, prefix_id: int, positions: int) -> list[Request]:
    """Return requests that score each token of a text once.

    The first window is conditioned on the prefix token. Each later one is a whole input whose first
    token is only context, or as much of it as the last tokens need.
    """
    if not len(ids):
        return []
    prefix = np.array([prefix_id], np.int32)
    found = [Request(prefix, ids[:positions])]
    done = positions
    while done < len(ids):
        stop = min(len(ids), done + positions)
        first = max(0, stop - positions - 1)
        found.append(Request(ids[first:done], ids[done:stop]))
        done = stop
    return found
