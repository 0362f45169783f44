"""`RequestQueue`: requests in order of precedence, the one order of every decision."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from jaxinfer.config import EngineConfig
from jaxinfer.sched.request import Request


class RequestQueue:
    """Requests, the one that goes first first.

    "fcfs": in order of arrival. "priority": the lower number first, of equal ones the earlier. One
    that was overtaken `max_overtakes` times while it waited goes before all that were not.
    """

    def __init__(self, config: EngineConfig):
        self._is_by_priority = config.policy == "priority"
        self._max_overtakes = config.max_overtakes
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The one that goes first."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """The one that goes last."""
        return self._requests[-1]

    def precedence(self, request: Request) -> tuple[int, int, int]:
        """What requests are sorted by, the lowest first; no two are equal."""
        if request.num_overtaken >= self._max_overtakes:
            return 0, 0, request.order
        return 1, request.priority if self._is_by_priority else 0, request.order

    def add(self, request: Request) -> None:
        """Returns None; `request` stands at its place in the order."""
        place = bisect_left(self._requests, self.precedence(request), key=self.precedence)
        self._requests.insert(place, request)

    def remove(self, request: Request) -> None:
        """Returns None; `request`, which must be in the queue, no longer is."""
        place = bisect_left(self._requests, self.precedence(request), key=self.precedence)
        assert self._requests[place] is request, f"{request.id} is not in its place"
        del self._requests[place]

    def overtake(self, admitted: Iterable[Request]) -> None:
        """Returns None; those here that came before `admitted`, which have left, were overtaken."""
        orders = sorted(request.order for request in admitted)
        if not orders or not self._is_by_priority:
            return  # in order of arrival nobody ever is
        for request in self._requests:
            request.num_overtaken += len(orders) - bisect_right(orders, request.order)
        self._requests.sort(key=self.precedence)

    def check_integrity(self) -> None:
        """Returns None if the requests are in order."""
        places = [self.precedence(request) for request in self._requests]
        assert places == sorted(set(places)), f"requests out of order: {places}"
