"""`Scheduler`: turns requests into step plans; owns the queues, the rows and the pages.

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
from jaxinfer.sched.allocation import PageAllocator
from jaxinfer.sched.buckets import Shape, pick, prefill_shapes
from jaxinfer.sched.counters import Counters
from jaxinfer.sched.limits import max_total_len
from jaxinfer.sched.merging import merge, num_alike
from jaxinfer.sched.page_pool import PagePool
from jaxinfer.sched.plan import Chunk, StepPlan
from jaxinfer.sched.prefix_cache import Entry
from jaxinfer.sched.queue import RequestQueue
from jaxinfer.sched.request import Request, Status

# Requests that one prefill call chooses among: a multiple of its rows, so that they fill well, and
# few enough that looking at all of them costs little.
LOOKAHEAD = 32


class Scheduler:
    """Closes the gap between known and computed tokens of every request, a step at a time.

    The device stops a row by itself (stop id or budget); the host learns of it when the tokens are
    read. Until then the row and its pages stay taken.

    Args:
        window: keys that a query sees at most, if that holds in every layer; else None.
        beside: another scheduler, with which this one shares counters and whoever waits; rows and
            pages are its own. See `Placement`.
    """

    def __init__(
        self, config: EngineConfig, window: int | None = None, beside: Scheduler | None = None
    ):
        self.config = config
        self.counters = Counters() if beside is None else beside.counters
        self.shapes = prefill_shapes(
            config.prefill_chunk, config.max_num_seqs, max(config.max_model_len - 1, 1)
        )
        self._pages = PageAllocator(config, window, self.counters)
        self._requests: dict[str, Request] = {} if beside is None else beside._requests
        self.waiting = RequestQueue(config) if beside is None else beside.waiting
        self._running = RequestQueue(config)
        self._shards: list[Scheduler] = [] if beside is None else beside._shards
        self.shard = len(self._shards)
        self._shards.append(self)
        self._admitted: list[Request] = []  # since the last plan
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._budget = config.token_budget or config.prefill_chunk + config.max_num_seqs

    @property
    def pool(self) -> PagePool:
        """The pages."""
        return self._pages.pool

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row."""
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return len(self._running)

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
        request.max_total_len = max_total_len(request, self.config, self._pages)
        request.order = self.counters.added
        request.times.arrival = now
        self.counters.added += 1
        self._requests[request.id] = request
        self.waiting.add(request)

    def check(self, request: Request) -> None:
        """Returns None, or raises ValueError for a request that could never run, whatever others
        do.
        """
        max_total_len(request, self.config, self._pages)

    def schedule(self, now: float | None = None) -> StepPlan:
        """The next plan, which counts as dispatched from now on.

        Hand every result of it to `update`.
        """
        self.catch_up()
        self._admit(now)
        return self.plan(self.most_steps)

    def plan(self, most_steps: int) -> StepPlan:
        """The next plan of those who run, with a window of at most `most_steps`."""
        admitted, self._admitted = self._admitted, []
        num_evicted = self.pool.num_evicted
        gaps = [r.decode_gap for r in self._running if r.status is Status.DECODE]
        computing, leaders = merge(self._prefilling(), self.config.page_size, LOOKAHEAD)
        shape, lengths = self._pick(computing, self._budget - len(gaps) + gaps.count(0))
        forks = {r: of for r, of in leaders.items() if lengths.get(of) == of.prefill_gap}
        num_steps = 1 if lengths else min(most_steps, max(gaps, default=0))
        targets = self._targets(lengths, forks, num_steps)
        preempted = self._reserve(targets, forks)
        new = frozenset(admitted)

        prefill, starts, copies = self._advance_prefill(shape, lengths, forks)
        decode = self._advance_decode(targets, num_steps)
        self.counters.evicted_pages += self.pool.num_evicted - num_evicted
        return StepPlan(
            preempted=tuple((row, r) for row, r in preempted if r not in new),
            admitted=tuple(r for r in admitted if r.row is not None),
            mapped=self._pages.take_mapped(new),
            shape=shape if prefill else None,
            prefill=prefill,
            starts=starts,
            copies=copies,
            decode=decode,
            num_steps=num_steps if decode else 0,
        )

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
            self._pages.register(request, certain)
        if reason is not None:
            self.finish(request, reason)
        return reason

    def cancel(self, request_id: str) -> int | None:
        """The row to deactivate before the next dispatch; None if the request holds none."""
        request = self._requests.get(request_id)
        return None if request is None else self.finish(request, "cancelled")

    def finish(self, request: Request, reason: str) -> int | None:
        """The row that `request`, now over for `reason`, held; None if it held none or was over.

        Unless the device has stopped the row itself, deactivate it before the next dispatch. Work
        under way may still write to the freed pages; the device runs it before their next use.
        """
        if request.status is Status.FINISHED:
            return None
        row = request.row
        if row is None:
            self.waiting.remove(request)
        else:
            self._stop(request)
        del self._requests[request.id]
        request.status, request.finish_reason = Status.FINISHED, reason
        self.counters.finished[reason] += 1
        return row

    def reset_prefix_cache(self) -> None:
        """Returns None; nothing computed so far is shared again. For weights that changed."""
        self._pages.reset(self._running)

    @property
    def most_steps(self) -> int:
        """The longest decode window now.

        1 beside a prefill, so that its next chunk and its first token do not wait; 1 too when a
        request waits and a row's last step is under way, since the next read then frees that row.
        Else as long as allowed.
        """
        if Status.PREFILL in [r.status for r in self._running]:
            return 1
        if self.waiting and 0 in [r.decode_gap for r in self._running]:
            return 1
        return self.config.max_window

    def check_integrity(self) -> None:
        """Returns None if each row is free or held by one request, each page accounted for, and
        order holds.
        """
        running, waiting = list(self._running), list(self.waiting)
        self._pages.check_integrity(running)
        rows = sorted([*self._free_rows, *(-1 if r.row is None else r.row for r in running)])
        assert rows == list(range(self.config.max_num_seqs)), f"rows lost or doubled: {rows}"
        self._running.check_integrity()
        self.waiting.check_integrity()
        num_running = sum(len(shard._running) for shard in self._shards)
        assert len(self._requests) == num_running + len(waiting), "a request is in no queue"
        for request in running + waiting:
            request.check_integrity()
        assert all(r.status is not Status.WAITING for r in running), "one that waits runs"
        assert all(r.status is Status.WAITING for r in waiting), "one that runs waits"

    def catch_up(self) -> None:
        """Returns None; requests hold no page that they need no more."""
        for request in self._running:
            self._pages.release_unseen(request)

    def _prefilling(self) -> Iterator[Request]:
        """Those that run and do not decode yet, each holding all that others computed for it."""
        for request in self._running:
            if request.status is Status.PREFILL:
                self._pages.share(request, self._pages.match(request))
                yield request

    def _admit(self, now: float | None) -> None:
        """Returns None; the waiting requests run, in order, up to the first that does not fit."""
        if not self.waiting or not self._free_rows:
            return
        spare = self._num_spare()
        while self.waiting and self._free_rows:
            request = self.waiting.first
            if request.under_way:
                break  # not all that it has to compute again is known
            found, needed = self._look_up(request)
            if self._running and needed > spare:
                break
            spare -= needed
            self.waiting.remove(request)
            self._run(request, found, now)
        self.waiting.overtake(self._admitted)

    def room_for(self, request: Request) -> tuple[int, int] | None:
        """How many pages of the tokens of `request` are there or about to be computed, and how many
        are free, less what those who run need; None if it does not fit now.
        """
        if not self._free_rows:
            return None
        (found, needed), spare = self._look_up(request), self._num_spare()
        if self._running and needed > spare:
            return None
        computing = [other for other in self._running if other.status is Status.PREFILL]
        alike = [num_alike(request, other, self.config.page_size) for other in computing]
        return max(len(found), *alike, 0), spare

    def admit(self, request: Request, now: float | None) -> None:
        """Returns None; `request`, which waits no longer and fits, runs here."""
        self._run(request, self._look_up(request)[0], now)

    def _run(self, request: Request, found: list[Entry], now: float | None) -> None:
        """Returns None; `request` runs, and shares the pages `found`."""
        self._running.add(request)
        request.shard = self.shard
        request.row, request.status = self._free_rows.pop(), Status.PREFILL
        if not request.num_preemptions:
            request.times.first_scheduled = now
            self.counters.prompt_tokens += len(request.prompt_ids)
        self._pages.begin(request)
        self._pages.share(request, found)
        self._admitted.append(request)

    def _look_up(self, request: Request) -> tuple[list[Entry], int]:
        """The cached pages that `request`, which waits, could share; how many others it needs."""
        self._pages.begin(request)
        found = self._pages.match(request)
        needed = self._num_missing(request, len(found))
        needed += self._pages.num_claimed(request, found)
        request.entry = None
        return found, needed

    def _num_spare(self) -> int:
        """Pages that those who run do not need."""
        return self.pool.num_available - sum(map(self._num_missing, self._running))

    def _num_missing(self, request: Request, num_found: int = 0) -> int:
        """Pages to allocate until the gap of `request`, which shares `num_found` more, is closed
        and one window is over.
        """
        num_known = request.num_computed if request.status is Status.DECODE else request.num_known
        num_tokens = min(num_known + self.config.max_window, request.max_total_len - 1)
        return self._pages.num_missing(len(request.pages) + num_found, num_tokens)

    def _pick(self, computing: Sequence[Request], limit: int) -> tuple[Shape, dict[Request, int]]:
        """The shape of the next prefill call, and how many tokens of whom it computes."""
        if not computing:
            return self.shapes[0], {}
        shape, taken = pick(self.shapes, [r.prefill_gap for r in computing], limit)
        return shape, {computing[index]: length for index, length in taken}

    def _targets(
        self, lengths: dict[Request, int], forks: dict[Request, Request], num_steps: int
    ) -> dict[Request, int]:
        """How many tokens each request that goes on has computed after the plan, in order of
        precedence. One whose gap is closed also decodes.
        """
        targets = {}
        for request in self._running:
            num_tokens = request.num_computed + lengths.get(request, 0)
            if request in forks:
                num_tokens = request.num_known
            if request.status is Status.DECODE or num_tokens == request.num_known:
                num_tokens = min(num_tokens + num_steps, request.max_total_len - 1)
            if num_tokens > request.num_computed:
                targets[request] = num_tokens
        return targets

    def _reserve(
        self, targets: dict[Request, int], forks: dict[Request, Request]
    ) -> list[tuple[int, Request]]:
        """(row, request) of each that gave way so that the others have pages for the plan."""
        preempted: list[tuple[int, Request]] = []
        for request, num_tokens in targets.items():
            if request in forks and request.row is not None:
                self._pages.share_full(forks[request], request)
            while request.row is not None and not self._pages.extend(request, num_tokens):
                victim = self._running.last
                assert victim.row is not None
                preempted.append((victim.row, victim))
                self._preempt(victim)
        return preempted

    def _preempt(self, request: Request) -> None:
        """Returns None; `request` waits at its place in the order, with nothing computed."""
        request.num_lost = max(request.num_lost, request.num_computed)
        request.num_preemptions += 1
        self.counters.preempted += 1
        self._stop(request)
        request.status = Status.WAITING
        self.waiting.add(request)

    def _stop(self, request: Request) -> None:
        """Returns None; `request` no longer runs: its row and pages are free."""
        assert request.row is not None
        self._running.remove(request)
        self._free_rows.append(request.row)
        self._pages.release(request)
        request.row, request.num_computed = None, 0

    def _advance_prefill(
        self, shape: Shape, lengths: dict[Request, int], forks: dict[Request, Request]
    ) -> tuple[tuple[Chunk, ...], tuple[tuple[int, Request], ...], tuple[tuple[int, int], ...]]:
        """`(prefill, starts, copies)` of the plan; what they compute counts as computed."""
        prefill, starts, copies = [], [], []
        for request, length in lengths.items():
            if request.row is None:
                continue  # preempted meanwhile
            start = request.num_computed
            request.num_computed += length
            self._pages.register(request, request.num_computed)
            self.counters.prefill_tokens += length
            self.counters.recomputed_tokens += max(
                min(request.num_computed, request.num_lost) - start, 0
            )
            chunk = Chunk(request, start, length, is_last=request.prefill_gap == 0)
            if chunk.is_last:
                started = [r for r, of in forks.items() if of is request and r.row is not None]
                for fork in started:
                    copies += self._pages.fork(request, fork)
                starts += [(len(prefill), r) for r in (request, *started)]
            prefill.append(chunk)
        for _, request in starts:
            request.status = Status.DECODE
            request.under_way.append(1)
        if prefill:
            self.counters.padded_tokens += shape[0] * shape[1] - sum(c.length for c in prefill)
        return tuple(prefill), tuple(starts), tuple(copies)

    def _advance_decode(
        self, targets: dict[Request, int], num_steps: int
    ) -> tuple[tuple[int, Request], ...]:
        """`decode` of the plan; its steps count as computed."""
        decode = []
        for request, num_tokens in targets.items():
            if request.status is Status.DECODE and num_tokens > request.num_computed:
                assert request.row is not None
                decode.append((request.row, request))
                request.num_computed = num_tokens
                request.under_way.append(num_steps)
        return tuple(decode)
