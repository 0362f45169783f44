"""`Scheduler`: who waits, and who runs on which data shard; all shards step together.

The rules:
- Requests go in order of precedence, see `RequestQueue`: to a row, to the prefill call, and from
  the other end when pages run out.
- A waiting request gets a row when there are pages for all that it knows and one window more,
  beside as much for each that runs.
- Pages are allocated for what a plan computes. When none is left, the running request that goes
  last gives its own back and waits again; later it computes again what it knew. So the first of all
  can always go on.
- What another request has computed or is about to compute is shared: see `PageAllocator` and
  `merge`.
- Rows that decode do so in every plan; beside a prefill call, which is one chunk at most, by one
  step.

Plans follow from the calls made so far and nothing else: no clock, no randomness, no order of a
set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jaxinfer.config import EngineConfig, require
from jaxinfer.sched.counters import Counters
from jaxinfer.sched.limits import max_total_len
from jaxinfer.sched.plan import StepPlan
from jaxinfer.sched.prefix_cache import Entry
from jaxinfer.sched.queue import RequestQueue
from jaxinfer.sched.request import Request, Status
from jaxinfer.sched.shard import Shard

# A shard that can take a request, the cached pages that the request finds there, and how many more
# it needs.
Fit = tuple[Shard, list[Entry], int]


class Scheduler:
    """Closes the gap between known and computed tokens of every request, a step at a time.

    Whoever waits, waits in one queue, in the one order of precedence. The first goes to the shard
    where it costs least, see `_cheapest`, as soon as one has room for it; then the next. A request
    that had to give way waits again in that queue, and may go on elsewhere.

    Args:
        window: keys that a query sees at most, if that holds in every layer; else None.
        num_shards: data shards, each with the rows and pages of `config`.
    """

    def __init__(self, config: EngineConfig, window: int | None = None, num_shards: int = 1):
        self.config = config
        self.counters = Counters()
        self._waiting = RequestQueue(config)
        self._requests: dict[str, Request] = {}
        self.shards = tuple(
            Shard(number, config, window, self._waiting, self.counters)
            for number in range(num_shards)
        )

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return sum(len(shard.running) for shard in self.shards)

    @property
    def is_idle(self) -> bool:
        """Whether every request is over."""
        return not self._requests

    def add(self, request: Request, now: float | None = None) -> None:
        """Returns None; `request` now waits its turn.

        Raises ValueError, and leaves the scheduler as it was, for one that could never run.
        """
        require(
            request.status is Status.WAITING and request.id not in self._requests,
            f"Request {request.id!r} was added before. Give each request an id of its own.",
        )
        request.max_total_len = max_total_len(request, self.config, self.shards[0].pages)
        request.order = self.counters.added
        request.times.arrival = now
        self.counters.added += 1
        self._requests[request.id] = request
        self._waiting.add(request)

    def check(self, request: Request) -> None:
        """Returns None, or raises ValueError for a request that could never run, whatever others
        do.
        """
        max_total_len(request, self.config, self.shards[0].pages)

    def schedule(self, now: float | None = None) -> tuple[StepPlan, ...]:
        """The next plan of each shard; all count as dispatched from now on.

        Hand every result of them to `update`.
        """
        for shard in self.shards:
            shard.release_unseen()
        if self._waiting and any(shard.has_row for shard in self.shards):
            self._admit(now)
        most_steps = min(shard.most_steps for shard in self.shards)
        return tuple(shard.plan(most_steps) for shard in self.shards)

    def update(
        self, request: Request, new_ids: Iterable[int], now: float | None = None
    ) -> str | None:
        """The finish reason of `request` after `new_ids`, tokens just read; None if it goes on.

        To be called once for each of the `starts` and then of the `decode` of each plan, with what
        it brought, also if that is nothing: a preempted request comes back when all is read. What
        comes in for a request that was cancelled meanwhile is dropped. A finished request's row and
        pages are free at once: the device stopped the row before any later dispatch.
        """
        new_ids = tuple(new_ids)
        assert request.under_way, f"{request.id}: no plan asked for {new_ids}"
        num_steps = request.under_way.popleft()
        assert len(new_ids) <= num_steps, f"{request.id}: {new_ids} are more than {num_steps}"
        self.counters.idle_row_steps += num_steps - len(new_ids)
        if request.status is Status.FINISHED:
            return request.finish_reason
        if new_ids:
            times = request.times
            times.first_token = now if times.first_token is None else times.first_token
            times.last_token = now
        reason = request.extend(new_ids)
        if request.row is not None:
            # Of the newest token only the next step computes K and V, and there may be none.
            certain = min(request.num_computed, request.num_known - 1)
            self.shards[request.shard].pages.register(request, certain)
        if reason is not None:
            self.finish(request, reason)
        return reason

    def cancel(self, request_id: str) -> int | None:
        """The row to deactivate before the next dispatch; None if the request holds none."""
        request = self._requests.get(request_id)
        return None if request is None else self.finish(request, "cancelled")

    def finish(self, request: Request, reason: str) -> int | None:
        """The row that `request`, now over for `reason`, held on its shard; None if it held none or
        was over.

        Unless the device has stopped the row itself, deactivate it before the next dispatch. Work
        under way may still write to the freed pages; the device runs it before their next use.
        """
        if request.status is Status.FINISHED:
            return None
        row = request.row
        if row is None:
            self._waiting.remove(request)
        else:
            self.shards[request.shard].stop(request)
        del self._requests[request.id]
        request.status, request.finish_reason = Status.FINISHED, reason
        self.counters.finished[reason] += 1
        return row

    def reset_prefix_cache(self) -> None:
        """Returns None; nothing computed so far is shared again. For weights that changed."""
        for shard in self.shards:
            shard.pages.reset(shard.running)

    def check_integrity(self) -> None:
        """Returns None if the accounts of every shard are exact and each request is in one queue,
        in order.
        """
        for shard in self.shards:
            shard.check_integrity()
        self._waiting.check_integrity()
        assert len(self._requests) == self.num_running + self.num_waiting, "a request is lost"
        for request in self._waiting:
            request.check_integrity()
            assert request.status is Status.WAITING, "one that runs waits"

    def _admit(self, now: float | None) -> None:
        """Returns None; the waiting requests run, in order, up to the first that fits nowhere."""
        spare = [shard.num_spare() for shard in self.shards]
        admitted = []
        # Of one with work under way not all that it has to compute again is known.
        while self._waiting and not self._waiting.first.under_way:
            request = self._waiting.first
            fitting = list(self._fitting(request, spare))
            if not fitting:
                break
            (shard, found, needed), num_own = self._cheapest(request, fitting, spare)
            spare[shard.number] -= needed
            self._waiting.remove(request)
            shard.run(request, found, num_own, now)
            admitted.append(request)
        self._waiting.overtake(admitted)

    def _fitting(self, request: Request, spare: Sequence[int]) -> Iterator[Fit]:
        """The shards that have a row for `request`, and pages besides what others there need."""
        for shard in self.shards:
            if shard.has_row:
                found, needed = shard.look_up(request)
                if needed <= spare[shard.number] or not shard.running:
                    yield shard, found, needed

    def _cheapest(
        self, request: Request, fitting: Sequence[Fit], spare: Sequence[int]
    ) -> tuple[Fit, int]:
        """Where `request` costs least, and how many tokens of it are to be computed there.

        Those count twice, as they also take pages and hold up whoever comes later; what the shard
        has to do already counts once. So an idle shard is better than to share a short beginning,
        and to share a long one better than an idle shard. Of equal costs the most free pages
        decide, then the first shard.
        """
        if len(self.shards) == 1:
            return fitting[0], request.num_known

        def num_own(fit: Fit) -> int:
            shard, found, _ = fit
            num_shared = self.config.page_size * max(len(found), shard.num_coming(request))
            return max(request.num_known - num_shared, 1)

        def cost(choice: tuple[Fit, int]) -> tuple[int, int]:
            (shard, *_), own = choice
            return shard.load + 2 * own, -spare[shard.number]

        return min(((fit, num_own(fit)) for fit in fitting), key=cost)
