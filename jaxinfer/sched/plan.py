"""`StepPlan`: what the device is to do next."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.sched.buckets import Shape
from jaxinfer.sched.request import Request


@dataclass(frozen=True)
class Chunk:
    """Known tokens start..start+length-1 of one request, to compute in one row of a prefill call.

    After the last chunk of its known tokens (`is_last`) the request generates.
    """

    request: Request
    start: int
    length: int
    is_last: bool


@dataclass(frozen=True)
class StepPlan:
    """What to dispatch next, in this order: rows to stop, the admitted rows' state, pages of the
    others, one prefill call, the first tokens that it brings, copies of pages, one decode window.

    A plan counts as dispatched once it is made. One with neither prefill nor decode means that
    nothing can go on before results under way are read.

    Attributes:
        preempted: (row, request) of each row to stop: its request lost it and its pages. Tokens of
            it that are under way still count.
        admitted: requests that just got their row, with the pages that they have in this plan. One
            that was preempted comes back like this, its output so far part of what it knows.
        mapped: (row, index, page) of each page that a row admitted earlier gets: entry `index` of
            its page table.
        shape: (rows, tokens) of the prefill call; None when there is none.
        prefill: its chunks, one per row of the call from the first on.
        starts: (index into `prefill`, request) of each token to sample at the end of a chunk: for
            the request whose last chunk it is, and for those of equal tokens that waited for it.
            The token is that of position `request.num_known`. One for a row at most.
        copies: (source, destination) of each page to copy, after the prefill call and before the
            decode window: for one that waited, the page that its tokens end in. No page is both.
        decode: (row, request) of each row that the window may advance, those that start in this
            plan among them. Results are attributed by this list: when they are read, the row
            may already belong to another request.
        num_steps: steps of the decode window; 0 when no row decodes.
    """

    preempted: tuple[tuple[int, Request], ...]
    admitted: tuple[Request, ...]
    mapped: tuple[tuple[int, int, int], ...]
    shape: Shape | None
    prefill: tuple[Chunk, ...]
    starts: tuple[tuple[int, Request], ...]
    copies: tuple[tuple[int, int], ...]
    decode: tuple[tuple[int, Request], ...]
    num_steps: int

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.prefill and not self.num_steps
