"""The endless, shuffled and packed stream of one source of conversations."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_distill.data.chat.cache import PreparedConversations
from megatron_distill.data.samples import (
    FULLY_TRAINED,
    PADDING_DOCUMENT,
    Sample,
    State,
    permutation,
    shuffled,
)
from megatron_distill.errors import DataError, counted
from megatron_distill.log import get_logger

_LOG = get_logger(__name__)


@dataclass(frozen=True)
class ConversationOptions:
    """How conversations are masked, packed and prepared.

    truncation: policy for conversations longer than the window, see `cut_conversation`.
    packing_buffer: number of conversations that are packed together. workers: worker processes
    of the preparation, 0: none; None: chosen by the machine and the amount of data.
    cache: folder of prepared conversations. keeps_weights: whether the reader of the samples
    uses weights other than 0 and 1.
    """

    cache: Path
    distill_on_prompt: bool = False
    train_on: str = "all_responses"
    truncation: str = "right"
    packing_buffer: int = 4096
    workers: int | None = None
    shows_progress: bool = False
    keeps_weights: bool = True


@dataclass(frozen=True)
class ConversationSplit:
    """Selection of a source's conversations (training or held-out), and the seed of their order."""

    seed: int
    held_out_fraction: float
    is_held_out: bool


@dataclass(frozen=True)
class TooLong:
    """The chosen conversations that do not fit into a window."""

    count: int
    longest: int  # its number
    lost_labels: int  # trained labels that the truncation policy leaves out


class HasLength(Protocol):
    """A piece of a conversation, with its length in the unit of its layout."""

    @property
    def length(self) -> int:
        """At most the layout's width."""
        ...


Part = TypeVar("Part", bound=HasLength)


class WindowLayout(Protocol[Part]):
    """How conversations are cut and laid out into windows: for one tokenizer, or for two."""

    @property
    def identity(self) -> State:
        """The sizes of the windows, as part of a source's state."""
        ...

    @property
    def width(self) -> int:
        """The room of a window, in the unit of lengths."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The length of each conversation, before it is cut."""
        ...

    def describe(self, number: int) -> tuple[str, str]:
        """A conversation's tokens and the tokens that fit, for messages."""
        ...

    def pieces(self, number: int) -> list[Part]:
        """The pieces of a conversation that have trained labels."""
        ...

    def trained(self, piece: Part) -> int:
        """The number of a piece's trained labels."""
        ...

    def sample(self, pieces: Sequence[Part], sample_id: int) -> Sample:
        """The sample of one window."""
        ...


@dataclass(frozen=True)
class TokenLayout:
    """Conversations in one tokenizer's tokens, in windows of `width` tokens; a `WindowLayout`."""

    prepared: PreparedConversations
    width: int
    padding_token: int
    truncation: str

    @property
    def identity(self) -> State:
        """See `WindowLayout`."""
        return {"sequence_length": self.width - 1}

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """See `WindowLayout`."""
        return np.asarray(np.diff(self.prepared.index["stop"], prepend=0), np.int64)

    def describe(self, number: int) -> tuple[str, str]:
        """See `WindowLayout`."""
        return (
            f"{self.lengths[number]} tokens",
            f"{self.width} fit (data.sequence_length + 1)",
        )

    def pieces(self, number: int) -> list[ConversationPiece]:
        """See `WindowLayout`."""
        start, stop = self.prepared.bounds(number)
        pieces = cut_conversation(start, stop, width=self.width, truncation=self.truncation)
        return [piece for piece in pieces if trains_something(piece, self.prepared.flags_n)]

    def trained(self, piece: ConversationPiece) -> int:
        """See `WindowLayout`."""
        flags_n = self.prepared.flags_n[piece.start + 1 : piece.stop]
        return int(np.count_nonzero(flags_n & FULLY_TRAINED))

    def sample(self, pieces: Sequence[ConversationPiece], sample_id: int) -> Sample:
        """See `WindowLayout`."""
        return packed_sample(
            pieces,
            self.prepared.tokens_n,
            self.prepared.flags_n,
            width=self.width,
            padding_token=self.padding_token,
            sample_id=sample_id,
        )


class ConversationSource(Generic[Part]):
    """Packed samples of prepared conversations, epoch after epoch; a `SampleSource`.

    All conversations of an epoch are shuffled. Each `packing_buffer` of them in this order are
    packed into windows, and the windows are shuffled. The order is a function of (seed, epoch,
    buffer), and the state is three numbers. Resuming plans one buffer again, from lengths alone.
    Raises DataError: no conversation has a trained label, or one is too long under truncation
    "error".
    """

    def __init__(
        self,
        prepared: PreparedConversations,
        layout: WindowLayout[Part],
        *,
        choice: ConversationSplit,
        truncation: str,
        packing_buffer: int,
        name: str,
        epochs: int | None = None,
    ) -> None:
        self._prepared = prepared
        self._layout = layout
        self._truncation = truncation
        self._buffer = packing_buffer
        self._name = name
        self._seed = choice.seed
        self._epochs = epochs
        self._chosen_c = _chosen(prepared, choice)
        self._identity: State = {
            "conversations": prepared.manifest.content,
            "seed": choice.seed,
            **layout.identity,
            "truncation": truncation,
            "packing_buffer": packing_buffer,
            "validation_fraction": choice.held_out_fraction,
        }
        self._say_long()
        if epochs is None and not any(layout.pieces(int(one)) for one in self._chosen_c):
            raise DataError(
                f"data source {name}: no conversation to train on (none, none with a trained token "
                "within data.sequence_length, or all held out); add some, or lower "
                "data.validation_fraction"
            )
        self._begin(epoch=0, buffer=0, given=0, samples=0)

    def _begin(self, *, epoch: int, buffer: int, given: int, samples: int) -> None:
        self._epoch, self._number, self._given = epoch, buffer, given
        self._samples = samples
        self._windows: list[list[Part]] | None = None

    def _say_long(self) -> None:
        long = self.too_long
        if not long.count:
            return
        place = self._prepared.place(long.longest)
        size, room = self._layout.describe(long.longest)
        if self._truncation == "error":
            raise DataError(
                f"{place}: the conversation has {size}, {room}; too long in this source: "
                f"{counted(long.count, 'conversation')}; raise data.sequence_length, or choose "
                "another data.truncation"
            )
        _LOG.warning(
            "%s: too long: %d of %d conversations; the longest has %s, %s (%s); truncation %r "
            "leaves out %d trained labels",
            self._name,
            long.count,
            len(self),
            size,
            room,
            place,
            self._truncation,
            long.lost_labels,
        )

    @cached_property
    def too_long(self) -> TooLong:
        """Conversations longer than the window, counted over one epoch."""
        lengths_c = self._layout.lengths[self._chosen_c]
        long_c = np.nonzero(lengths_c > self._layout.width)[0]
        if not len(long_c):
            return TooLong(0, -1, 0)
        lost = 0
        for number in map(int, self._chosen_c[long_c]):
            trained = sum(map(self._layout.trained, self._layout.pieces(number)))
            lost += int(self._prepared.index[number]["trained"]) - trained
        longest = int(self._chosen_c[long_c[np.argmax(lengths_c[long_c])]])
        return TooLong(len(long_c), longest, lost)

    def __len__(self) -> int:
        """Conversations of one epoch."""
        return len(self._chosen_c)

    def samples_in_epoch(self) -> int:
        """Packed samples of the first epoch, planned from lengths alone."""
        buffers = -(-len(self._chosen_c) // self._buffer)
        return sum(len(self._planned(0, number)) for number in range(buffers))

    def _planned(self, epoch: int, number: int) -> list[list[Part]]:
        """The windows of one buffer in shuffled order; empty after the end of an epoch."""
        count = len(self._chosen_c)
        first = number * self._buffer
        order = [
            int(self._chosen_c[shuffled(place, count, self._seed, epoch)])
            for place in range(first, min(first + self._buffer, count))
        ]
        pieces = [piece for number in order for piece in self._layout.pieces(number)]
        windows = fill_windows([piece.length for piece in pieces], width=self._layout.width)
        key = (self._seed, epoch, number)
        return [
            [pieces[place] for place in windows[window]]
            for window in permutation(len(windows), *key)
        ]

    def next_sample(self) -> Sample:
        """The next sample of an endless stream."""
        sample = self.next_or_none()
        assert sample is not None, "the stream has an end"
        return sample

    def next_or_none(self) -> Sample | None:
        """The next sample; None after the last epoch."""
        while self._epochs is None or self._epoch < self._epochs:
            if self._windows is None:
                self._windows = self._planned(self._epoch, self._number)
            if self._given < len(self._windows):
                window = self._windows[self._given]
                self._given += 1
                self._samples += 1
                return self._layout.sample(window, self._samples - 1)
            is_last = (self._number + 1) * self._buffer >= len(self._chosen_c)
            self._begin(
                epoch=self._epoch + is_last,
                buffer=0 if is_last else self._number + 1,
                given=0,
                samples=self._samples,
            )
        return None

    def state_dict(self) -> State:
        """Plain values, less than 1 kB."""
        return {
            **self._identity,
            "epoch": self._epoch,
            "buffer": self._number,
            "given": self._given,
            "samples": self._samples,
        }

    def load_state_dict(self, state: State) -> None:
        """Continue from a state. Raises DataError if conversations or order are not the same."""
        for key, value in self._identity.items():
            if state.get(key) != value:
                raise DataError(
                    f"data source {self._name}: {key} differs from the checkpoint ({value}, was "
                    f"{state.get(key)}); restore it, or start a new run with another output"
                )
        self._begin(
            epoch=state["epoch"],
            buffer=state["buffer"],
            given=state["given"],
            samples=state["samples"],
        )


def _chosen(prepared: PreparedConversations, choice: ConversationSplit) -> NDArray[np.int64]:
    """The numbers of the selected conversations: held out or not, by content."""
    # documents.is_held_out, vectorised.
    is_held_out_c = prepared.index["digest"].astype(np.float64) < choice.held_out_fraction * 2.0**64
    has_labels_c = prepared.index["trained"] > 0
    return np.nonzero((is_held_out_c == choice.is_held_out) & has_labels_c)[0]


TRUNCATIONS: Final = ("right", "left", "split", "drop", "error")


@dataclass(frozen=True, slots=True)
class ConversationPiece:
    """Tokens [start, stop) of all tokens of a source: a conversation, or a part of a long one."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


def cut_conversation(
    start: int, stop: int, *, width: int, truncation: str
) -> list[ConversationPiece]:
    """The pieces of at most `width` tokens of a conversation under a truncation policy.

    right keeps the beginning, left the end, split all of it. The last token of a split piece is the
    first of the next. So each label is trained once, without the context before its piece. drop
    keeps no piece of a longer conversation; nor does error, which the caller raises.
    """
    assert truncation in TRUNCATIONS, truncation
    if stop - start <= width:
        return [ConversationPiece(start, stop)]
    if truncation == "right":
        return [ConversationPiece(start, start + width)]
    if truncation == "left":
        return [ConversationPiece(stop - width, stop)]
    if truncation == "split":
        begins = range(start, stop - 1, width - 1)
        return [ConversationPiece(begin, min(begin + width, stop)) for begin in begins]
    return []


def fill_windows(lengths: Sequence[int], *, width: int) -> list[list[int]]:
    """Pack pieces into windows of at most `width` tokens; returns the pieces' indices per window.

    Best fit decreasing: the longest first, each into the window with the least sufficient space.
    Indices ascend within a window, and pieces of equal length are placed in input order.
    O(n log n), a pure function.
    """
    windows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens free, window), ascending
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        length = lengths[place]
        assert 0 < length <= width, length
        found = bisect_left(free, (length, -1))
        if found < len(free):
            left, window = free.pop(found)
        else:
            left, window = width, len(windows)
            windows.append([])
        windows[window].append(place)
        if left > length:
            insort(free, (left - length, window))
    return [sorted(window) for window in windows]


def packed_sample(
    pieces: Sequence[ConversationPiece],
    tokens_n: NDArray[np.int32],
    flags_n: NDArray[np.uint8],
    *,
    width: int,
    padding_token: int,
    sample_id: int,
) -> Sample:
    """One sample of pieces, each a separate document, padded at the end."""
    tokens = np.full(width, padding_token, np.int32)
    documents = np.full(width, PADDING_DOCUMENT, np.int32)
    flags = np.zeros(width, np.uint8)
    filled = 0
    for document, piece in enumerate(pieces):
        own = slice(filled, filled + piece.length)
        tokens[own] = tokens_n[piece.start : piece.stop]
        flags[own] = flags_n[piece.start : piece.stop]
        documents[own] = document
        filled += piece.length
    return Sample(tokens, documents, flags, sample_id)


def trains_something(piece: ConversationPiece, flags_n: NDArray[np.uint8]) -> bool:
    """Whether a label of the piece is trained; its first token is not a label."""
    return bool((flags_n[piece.start + 1 : piece.stop] & FULLY_TRAINED).any())
