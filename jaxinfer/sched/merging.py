"""Requests that are about to compute the same: the first does it, the others wait for the result.

What comes next of a request belongs to one page, its piece. Where two have the same piece behind
the same pages, the second can share that page once it is computed. If all their tokens are the
same, as those of samples of one prompt, it can even start from the last hidden state of the first.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxinfer.sched.prefix_cache import Entry
from jaxinfer.sched.request import Request

Piece = tuple[Entry, tuple[int, ...]]  # the page before, and the tokens of the next as far as known


def merge(
    requests: Iterable[Request], page_size: int, most: int
) -> tuple[list[Request], dict[Request, Request]]:
    """`(computing, leaders)`: those that compute for themselves, `most` at most, and for each of
    those that will start with another, that other.

    `requests` are all in prefill, in order of precedence. What is in neither waits for a page that
    one ahead of it computes, or comes behind the `most`.
    """
    computing: list[Request] = []
    leaders: dict[Request, Request] = {}
    ahead: dict[Piece, list[Request]] = {}
    for request in requests:
        piece = _next_piece(request, page_size)
        others = ahead.setdefault(piece, []) if piece is not None else []
        if others and _may_wait(request, page_size):
            leader = next((other for other in others if _is_same(request, other)), None)
            if leader is not None:
                leaders[request] = leader
                continue
            if request.num_known - request.num_computed > page_size:
                continue
        if len(computing) == most:
            break
        computing.append(request)
        others.append(request)
    return computing, leaders


def num_alike(request: Request, other: Request, page_size: int) -> int:
    """Pages in which `request` and `other`, which is to compute them, begin alike; one more if all
    is alike. 0 for a request that computes all itself.
    """
    if request.must_compute:
        return 0
    if _is_same(request, other):
        return request.num_known // page_size + 1
    most = min(request.num_known, other.num_known) // page_size
    for i in range(most):
        first, length = i * page_size, page_size
        if request.known_ids(first, length) != other.known_ids(first, length):
            return i
    return most


def _next_piece(request: Request, page_size: int) -> Piece | None:
    """What `request` computes next; None where the pages before are not registered."""
    entry = request.entry
    if entry is None or entry.depth != request.num_computed // page_size:
        return None
    return entry, request.known_ids(entry.depth * page_size, page_size)


def _may_wait(request: Request, page_size: int) -> bool:
    """Whether `request` can use what others compute: it has not begun to fill a page itself."""
    return not request.must_compute and request.num_computed % page_size == 0


def _is_same(request: Request, other: Request) -> bool:
    """Whether both know the same tokens."""
    return request.prompt_ids == other.prompt_ids and request.output_ids == other.output_ids
