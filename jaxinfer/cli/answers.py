"""Answers on a terminal: printed as they come, stopped by Ctrl-C; and how fast they were."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer import RequestOutput
    from jaxinfer.engine.llm import RequestStream


@dataclass(frozen=True)
class Answer:
    """What one stream gave: its text, the last output (if any), whether Ctrl-C ended it."""

    text: str
    last: RequestOutput | None
    interrupted: bool
    seconds: float


@contextlib.contextmanager
def catch_interrupt() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C is pressed; a second Ctrl-C raises KeyboardInterrupt.

    A step on the device is never torn: whoever reads the list stops between two steps.
    """
    pressed: list[int] = []

    def press(signum, frame):
        if pressed:
            raise KeyboardInterrupt
        pressed.append(signum)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def print_answer(stream: RequestStream) -> Answer:
    """The answer of `stream`, written to stdout piece by piece; Ctrl-C cancels the request."""
    start = time.perf_counter()
    text, last = "", None
    with catch_interrupt() as pressed, contextlib.closing(stream):
        for output in stream:
            last = output
            piece = output.outputs[0].text_delta
            text += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
            if pressed:
                break
        interrupted = bool(pressed)
    sys.stdout.write("\n")
    sys.stdout.flush()
    return Answer(text, last, interrupted, time.perf_counter() - start)


def speed_line(outputs: Sequence[RequestOutput], seconds: float) -> str:
    """`TTFT .. ms  TPOT .. ms  .. tokens/s`: medians, and tokens of all `outputs` per second."""
    num_tokens = sum(len(one.token_ids) for output in outputs for one in output.outputs)
    return (
        f"TTFT {_milliseconds([output.metrics.ttft_s for output in outputs])}  "
        f"TPOT {_milliseconds([output.metrics.tpot_s for output in outputs])}  "
        f"{num_tokens / seconds:.1f} tokens/s"
    )


def _milliseconds(times: Sequence[float | None]) -> str:
    """The median of the known `times`, in ms; a dash if none is known."""
    known = [seconds for seconds in times if seconds is not None]
    return f"{1000 * median(known):.1f} ms" if known else "- ms"
