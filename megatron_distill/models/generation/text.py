"""Text of ids that arrive a few at a time: whole characters, and stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Decode", "TextStream"]

Decode = Callable[[Sequence[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Ids that are decoded again with the new ones, so that joining characters come out right.
_CONTEXT = 4


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
    _ids: list[int] = field(default_factory=list)
    _start: int = 0  # of the ids that are decoded again
    _settled: int = 0  # ids whose text is complete
    _is_finished: bool = False
    _given: int = 0  # characters returned by `new_text`

    def __post_init__(self) -> None:
        self._ids = list(self.context)[-_CONTEXT:]
        self._settled = len(self._ids)

    def push(self, token: int) -> bool:
        """Add an id; returns whether a stop string is complete. The text then ends before it."""
        self._ids.append(token)
        if self._settle(last=False):
            self._find_stop()
        return self.is_stopped

    def finish(self) -> str:
        """Return the whole text, an unfinished character included."""
        if not self.is_stopped and self._settle(last=True):
            self._find_stop()
        self._is_finished = True
        return self.text

    def new_text(self) -> str:
        """Return the text since the last call that no stop string can take back."""
        end = len(self.text)
        if not (self.is_stopped or self._is_finished):
            end -= max((_begun(self.text, string) for string in self.strings), default=0)
        new, self._given = self.text[self._given : end], max(self._given, end)
        return new

    def _settle(self, *, last: bool) -> bool:
        before = self.decode(self._ids[self._start : self._settled])
        now = self.decode(self._ids[self._start :])
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and not last):
            return False
        self.text += now[len(before) :]
        self._settled = len(self._ids)
        self._start = max(0, self._settled - _CONTEXT)
        return True

    def _find_stop(self) -> None:
        found = [self.text.find(string) for string in self.strings]
        places = [place for place in found if place >= 0]
        if places:
            self.text = self.text[: min(places)]
            self.is_stopped = True


def _begun(text: str, string: str) -> int:
    """Return the most characters at the text's end with which a string begins."""
    most = min(len(string) - 1, len(text))
    return next((count for count in range(most, 0, -1) if text.endswith(string[:count])), 0)
