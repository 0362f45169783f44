"""Signs of progress, on a terminal only: a pipe or a log file gets none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TextIO

# (what, done, total): how far a named piece of work has come, in the same unit.
Report = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bars(stream: TextIO) -> Iterator[Report | None]:
    """A callback that draws a bar per piece of work on `stream`; None off a terminal.

    A bar is wiped when its work is done, and all are at the end of the context.
    """
    if not stream.isatty():
        yield None
        return
    from tqdm import tqdm  # noqa: PLC0415  (slow to import)

    bars: dict[str, tqdm] = {}

    def report(what: str, done: int, total: int) -> None:
        bar = bars.get(what)
        if bar is None:
            bar = bars[what] = tqdm(
                total=total, desc=what, file=stream, leave=False, unit_scale=True, unit=""
            )
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.refresh()
            bars.pop(what).close()

    try:
        yield report
    finally:
        for bar in bars.values():
            bar.close()


@contextlib.contextmanager
def under_way(what: str, stream: TextIO) -> Iterator[None]:
    """A context with the line `what` on `stream`, for work of unknown length; wiped at its end."""
    if not stream.isatty():
        yield
        return
    stream.write(what)
    stream.flush()
    try:
        yield
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
