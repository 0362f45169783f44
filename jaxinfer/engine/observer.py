"""What an engine tells an observer, if it has one, about each piece of work of its device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Work:
    """One prefill call with what follows it (scores, first tokens), or one decode window.

    Attributes:
        kind: "prefill" or "decode".
        shape: what the device computes, padding included: (rows, tokens) or (rows, steps).
        num_rows: rows of it that hold a request.
        num_tokens: of the prompts that are computed; in a window, the most that it can produce.
    """

    kind: str
    shape: tuple[int, int]
    num_rows: int
    num_tokens: int


class Observer(Protocol):
    """Is called by the engine's thread as it goes, and must not hold it up.

    Times are those of `time.perf_counter`.
    """

    def dispatched(self, work: Work, results: Any, start_s: float) -> None:
        """Returns None; the host began to dispatch `work` at `start_s` and has just done so.

        `results` are arrays of the device, all of them ready once the work is done. They are not
        donated to later work, and keep device memory as long as they are held.
        """
        ...

    def fetched(self, start_s: float) -> None:
        """Returns None; the host has just got the results of the oldest work that it had not read,
        for which it has waited since `start_s`.
        """
        ...
