"""Text of ids that arrive a few at a time: whole characters, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Decode", "TextStream"]

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Ids that are decoded again with the new ones, so that joining characters come out right: at least,
# and before their first ones are left out. More take longer; leaving some out takes a decode.
_CONTEXT, _MOST = 4, 8


@dataclass
class TextStream:
    """The text of a row so far, from its ids.

    A character whose bytes are in several ids waits for the last of them. A decoder may drop a
    space before the first id, or join ids. So the last few ids are decoded with the new ones, and
    the difference is the new text.
    """

    decode: Decode
    strings: tuple[str, ...] = ()
    context: Sequence[int] = ()  # ids before the text, of which the last few are decoded with it
    text: str = ""
    is_stopped: bool = False
    _ids: list[int] = field(default_factory=list)  # those that are decoded with the next ones
    _before: str = ""  # the text of those of them whose text is complete
    _is_finished: bool = False
    _given: int = 0  # characters returned by `new_text`

    def __post_init__(self) -> None:
        self._keep_last(list(self.context))

    def push(self, token: int) -> bool:
        """Add an id; returns whether a stop string is complete. The text then ends before it."""
        self._ids.append(token)
        self._settle(last=False)
        return self.is_stopped

    def extend(self, tokens: Sequence[int]) -> int:
        """Add ids, up to the one that completes a stop string; returns how many.

        The text is that of `push` for each of them.
        """
        if len(tokens) > 1 and self._took_together(tokens):
            return len(tokens)
        for count, token in enumerate(tokens, 1):
            if self.push(token):
                return count
        return len(tokens)

    def finish(self) -> str:
        """Return the whole text, an unfinished character included."""
        if not self.is_stopped:
            self._settle(last=True)
        self._is_finished = True
        return self.text

    def new_text(self) -> str:
        """Return the text since the last call that no stop string can take back."""
        end = len(self.text)
        if not (self.is_stopped or self._is_finished):
            end -= max((_begun(self.text, string) for string in self.strings), default=0)
        new, self._given = self.text[self._given : end], max(self._given, end)
        return new

    def _took_together(self, tokens: Sequence[int]) -> bool:
        """Add ids whose characters are whole, and end no stop string; else none: returns False."""
        ids = [*self._ids, *tokens]
        now = self.decode(ids)
        new = now[len(self._before) :]
        if not new or _UNFINISHED in new or self._stops(new):
            return False
        self.text += new
        self._ids, self._before = ids, now
        self._keep_short()
        return True

    def _settle(self, *, last: bool) -> None:
        """Take the text of all ids, once it is complete."""
        now = self.decode(self._ids)
        if len(now) <= len(self._before) or (now.endswith(_UNFINISHED) and not last):
            return
        new = now[len(self._before) :]
        places = self._stops(new)
        self.text += new
        if places:
            self.text = self.text[: min(places)]
            self.is_stopped = True
        self._before = now
        self._keep_short()

    def _stops(self, new: str) -> list[int]:
        """Return where stop strings begin that new text completes, in the text with it."""
        found = []
        for string in self.strings:
            start = max(0, len(self.text) - len(string) + 1)
            place = (self.text[start:] + new).find(string)
            if place >= 0:
                found.append(start + place)
        return found

    def _keep_short(self) -> None:
        if len(self._ids) > _MOST:
            self._keep_last(self._ids)

    def _keep_last(self, ids: list[int]) -> None:
        """Keep the last few ids, from the beginning of a character on where one is near."""
        for count in range(_CONTEXT, 2 * _CONTEXT):
            self._ids = ids[-count:]
            self._before = self.decode(self._ids)
            if not self._before.startswith(_UNFINISHED) or count >= len(ids):
                return
        self._ids = ids[-_CONTEXT:]
        self._before = self.decode(self._ids)


def _begun(text: str, string: str) -> int:
    """Return the most characters at the text's end with which a string begins."""
    most = min(len(string) - 1, len(text))
    return next((count for count in range(most, 0, -1) if text.endswith(string[:count])), 0)
