"""`Scheduler`: turns requests into step plans; owns the queue, the rows and the pages.

First come, first served. A request is admitted with a row and pages for its longest possible
length, so it always runs to its end. Of the samples of one prompt the first computes it for those
that have a row by then: see `forks`. Plans follow from the calls made so far and nothing else: no
clock, no randomness, no order of a set.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from jaxinfer.config import EngineConfig, require
from jaxinfer.sched import forks
from jaxinfer.sched.buckets import Shape, pick, prefill_shapes
from jaxinfer.sched.page_pool import PagePool
from jaxinfer.sched.request import Request, Status


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
    """What to dispatch next, in this order: the admitted rows' state, one prefill call, the first
    tokens that it brings, copies of pages, one decode window.

    A plan counts as dispatched once it is made. One with neither prefill nor decode means that
    nothing can go on before results under way are read.

    Attributes:
        admitted: requests that just got their row and pages; a fork among them starts when its
            leader does, in this plan or a later one.
        shape: (rows, tokens) of the prefill call; None when there is none.
        prefill: its chunks, one per row of the call from the first on.
        starts: (index into `prefill`, request) of each first token to sample at the end of a chunk:
            for the request whose last chunk it is, then for its forks. One for a row at most.
        copies: (source, destination) of each page to copy, after the prefill call and before the
            decode window: for a fork, the page that its prompt ends in. No page is both.
        decode: (row, request) of each row that the window may advance, those that start in this
            plan among them. Results are attributed by this list: when they are read, the row
            may already belong to another request.
        num_steps: steps of the decode window; 0 when no row decodes.
    """

    admitted: tuple[Request, ...]
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


class Scheduler:
    """Closes the gap between known and computed tokens of every request, a step at a time.

    The device stops a row by itself (stop id or budget); the host learns of it when the tokens are
    read. Until then the row and its pages stay taken.
    """

    def __init__(self, config: EngineConfig):
        self.config = config
        self.shapes = prefill_shapes(
            config.prefill_chunk, config.max_num_seqs, max(config.max_model_len - 1, 1)
        )
        self.pool = PagePool(config.cache.num_pages)
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}  # in order of admission
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._num_added = 0

    @property
    def num_waiting(self) -> int:
        """Requests that hold no row yet."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether every request is over."""
        return not self._waiting and not self._running

    def add(self, request: Request, now: float | None = None) -> None:
        """Returns None; `request` now waits its turn.

        A leader that is over, or generates already, is too late for it: `fork_of` becomes None.
        Raises ValueError, and leaves the scheduler as it was, for one that could never run.
        """
        name, limit = f"Request {request.id!r}", self.config.max_model_len
        num_prompt = len(request.prompt_ids)
        require(
            request.status is Status.WAITING
            and request.id not in self._waiting
            and request.id not in self._running,
            f"{name} was added before. Give each request an id of its own.",
        )
        require(num_prompt > 0, f"{name} has an empty prompt. Give it at least one token.")
        require(
            num_prompt < limit,
            f"{name} has a prompt of {num_prompt} tokens; max_model_len={limit} leaves room for "
            f"{limit - 1} and one output. Shorten the prompt or raise max_model_len.",
        )
        max_total_len = min(num_prompt + request.params.max_tokens, limit)
        needed = self._num_pages(max_total_len)
        require(
            needed <= self.pool.num_pages,
            f"{name} needs {needed} pages of {self.config.page_size} tokens for its "
            f"{max_total_len}; the pool has {self.pool.num_pages}. "
            "Shorten the prompt, lower max_tokens or raise num_pages.",
        )
        request.max_total_len = max_total_len
        request.order = self._num_added
        request.times.arrival = now
        self._num_added += 1
        self._waiting[request.id] = request
        leader = request.fork_of
        is_under_way = leader is not None and self._get(leader.id) is leader
        forks.follow(request, is_under_way=is_under_way)

    def schedule(self, now: float | None = None) -> StepPlan:
        """The next plan, which counts as dispatched from now on."""
        admitted = self._admit(now)
        shape, prefill = self._plan_prefill()
        starts, copies = self._plan_starts(prefill)
        decoding = [r for r in self._running.values() if r.status is Status.DECODE]
        num_steps = self._num_steps(decoding, bool(prefill))
        decode = []
        for request in decoding:
            if request.decode_gap and request.row is not None:
                decode.append((request.row, request))
                request.num_computed += min(num_steps, request.decode_gap)
        return StepPlan(admitted, shape, prefill, starts, copies, tuple(decode), num_steps)

    def update(
        self, request: Request, new_ids: Iterable[int], now: float | None = None
    ) -> str | None:
        """The finish reason of `request` after `new_ids`, tokens just read; None if it goes on.

        What comes in for a request that was cancelled meanwhile is dropped. A finished request's
        row and pages are free at once: the device stopped the row before any later dispatch.
        """
        if request.status is Status.FINISHED:
            return request.finish_reason
        reason = None
        for token in new_ids:
            assert reason is None, f"{request.id}: token {token} follows the end of the output"
            reason = request.append(token)
            if request.times.first_token is None:
                request.times.first_token = now
            request.times.last_token = now
        if reason is not None:
            self.finish(request, reason)
        return reason

    def cancel(self, request_id: str) -> int | None:
        """The row to deactivate before the next dispatch; None if the request holds none."""
        request = self._get(request_id)
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
            del self._waiting[request.id]
        else:
            del self._running[request.id]
            self._free_rows.append(row)
            self.pool.free(request.pages)
        forks.leave(request)
        request.row, request.pages = None, []
        request.status, request.finish_reason = Status.FINISHED, reason
        return row

    def check_integrity(self) -> None:
        """Returns None if each row is free or held by one request, each page free or held by one or
        by siblings, and order holds.
        """
        running, waiting = list(self._running.values()), list(self._waiting.values())
        self.pool.check_integrity(held=[page for r in running for page in r.pages])
        rows = sorted([*self._free_rows, *(-1 if r.row is None else r.row for r in running)])
        assert rows == list(range(self.config.max_num_seqs)), f"rows lost or doubled: {rows}"
        orders = [r.order for r in [*running, *waiting]]
        assert orders == sorted(set(orders)), f"requests out of order: {orders}"
        forks.check_forks([*running, *waiting], self.config.page_size)
        for request in waiting:
            assert request.status is Status.WAITING, f"{request.id} waits as {request.status}"
            assert request.row is None and not request.pages, f"{request.id} waits with a row"
        for request in running:
            assert request.status in (Status.PREFILL, Status.DECODE), f"{request.id} does not run"
            assert len(request.pages) == self._num_pages(request.max_total_len), request.id
            assert (request.status is Status.PREFILL) == (
                request.num_computed < len(request.prompt_ids)
            )
            assert request.decode_gap >= 0, f"{request.id} computes beyond its end"

    def _get(self, request_id: str) -> Request | None:
        return self._running.get(request_id) or self._waiting.get(request_id)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.page_size)

    def _admit(self, now: float | None) -> tuple[Request, ...]:
        """The waiting requests that now run, in order, up to the first that does not fit."""
        admitted = []
        while self._waiting and self._free_rows:
            request = next(iter(self._waiting.values()))
            shared = forks.shared_pages(request, self.config.page_size)
            pages = self.pool.allocate(self._num_pages(request.max_total_len) - len(shared))
            if pages is None:
                break
            self.pool.share(shared)
            del self._waiting[request.id]
            self._running[request.id] = request
            request.row, request.pages = self._free_rows.pop(), [*shared, *pages]
            request.status, request.times.first_scheduled = Status.PREFILL, now
            admitted.append(request)
        return tuple(admitted)

    def _plan_prefill(self) -> tuple[Shape | None, tuple[Chunk, ...]]:
        """The shape and the chunks of the next prefill call; (None, ()) if every gap is closed."""
        computing = (r for r in self._running.values() if r.fork_of is None)
        pending = [r for r in computing if r.status is Status.PREFILL]
        if not pending:
            return None, ()
        shape, indices = pick(self.shapes, [r.prefill_gap for r in pending])
        return shape, tuple(self._chunk(pending[i], shape[1]) for i in indices)

    def _plan_starts(
        self, prefill: tuple[Chunk, ...]
    ) -> tuple[tuple[tuple[int, Request], ...], tuple[tuple[int, int], ...]]:
        """`(starts, copies)` of the plan that has these chunks: requests that now generate."""
        starts, copies = [], []
        for index, chunk in enumerate(prefill):
            if chunk.is_last:
                siblings, pairs = forks.fork(chunk.request, self.config.page_size)
                starts += [(index, request) for request in (chunk.request, *siblings)]
                copies += pairs
        return tuple(starts), tuple(copies)

    @staticmethod
    def _chunk(request: Request, max_tokens: int) -> Chunk:
        """The next `max_tokens` or fewer of `request`; they count as computed from now on."""
        start, length = request.num_computed, min(request.prefill_gap, max_tokens)
        request.num_computed += length
        is_last = request.prefill_gap == 0
        if is_last:
            request.status = Status.DECODE
        return Chunk(request, start, length, is_last)

    def _num_steps(self, decoding: list[Request], is_prefilling: bool) -> int:
        """The length of the decode window.

        1 beside a prefill, so that its next chunk and its first token do not wait; 1 too when a
        request waits and a row's last step is under way, since the next read then frees that row.
        Else as long as allowed and of use to any row.
        """
        gaps = [request.decode_gap for request in decoding]
        longest = max(gaps, default=0)
        if longest and (is_prefilling or (self._waiting and 0 in gaps)):
            return 1
        return min(self.config.max_window, longest)
