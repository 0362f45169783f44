"""`StopMatcher`: finds stop strings in streamed text before any of them is given out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from jaxinfer.config import require


@final
class StopMatcher:
    """Passes text through until a stop string is complete, whatever pieces it comes in.

    The stop string that is complete first wins, the longest of those that end at the same
    character; the text ends before it. Text that may become a stop string is held back. The result
    is a function of the joined text, so streamed and whole outputs agree. Every character costs one
    step per stop string (Knuth, Morris and Pratt, 1977).
    """

    def __init__(self, stops: str | Sequence[str]):
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in self._stops:
            require(
                isinstance(stop, str) and stop != "",
                f"stop={list(self._stops)} holds {stop!r}. Use strings of at least one character.",
            )
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string that end the text
        self._held = ""
        self.stopped = False

    def add(self, text: str) -> tuple[str, bool]:
        """(the text that is now certain, whether a stop string was found); then ("", True)."""
        if self.stopped or not self._stops:
            return ("" if self.stopped else text), self.stopped
        pending = self._held + text
        for end in range(len(self._held) + 1, len(pending) + 1):
            length = self._advance(pending[end - 1])
            if length:
                self.stopped = True
                self._held = ""
                return pending[: end - length], True
        certain = len(pending) - max(self._matched)
        self._held = pending[certain:]
        return pending[:certain], False

    def finish(self) -> str:
        """The text that was held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """The length of the longest stop string that `character` completes, or 0."""
        longest = 0
        for n, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            length = self._matched[n]
            while length and stop[length] != character:
                length = borders[length - 1]
            length += stop[length] == character
            self._matched[n] = length
            if length == len(stop):
                longest = max(longest, length)
        return longest


def _borders(text: str) -> tuple[int, ...]:
    """For every prefix of `text`, the length of its longest proper suffix that is a prefix too."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        length = borders[end - 1]
        while length and text[length] != text[end]:
            length = borders[length - 1]
        borders[end] = length + (text[length] == text[end])
    return tuple(borders)
