"""`Shard`: the rows and pages of one data shard; turns the requests that run there into plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxinfer.config import EngineConfig
from jaxinfer.sched.allocation import PageAllocator
from jaxinfer.sched.buckets import Shape, pick, prefill_shapes
from jaxinfer.sched.counters import Counters
from jaxinfer.sched.merging import merge, num_alike
from jaxinfer.sched.page_pool import PagePool
from jaxinfer.sched.plan import Chunk, StepPlan
from jaxinfer.sched.prefix_cache import Entry
from jaxinfer.sched.queue import RequestQueue
from jaxinfer.sched.request import Request, Status

# Requests that one prefill call chooses among: a multiple of its rows, so that they fill well, and
# few enough that looking at all of them costs little.
LOOKAHEAD = 32


class Shard:
    """Those who run, in order of precedence, each with a row and pages of its own.

    The device stops a row by itself (stop id or budget); the host learns of it when the tokens are
    read. Until then the row and its pages stay taken.

    Args:
        number: its place among the shards.
        window: keys that a query sees at most, if that holds in every layer; else None.
        waiting: where those go that have to give way.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        window: int | None,
        waiting: RequestQueue,
        counters: Counters,
    ):
        self.number, self.config = number, config
        self.shapes = prefill_shapes(
            config.prefill_chunk, config.max_num_seqs, max(config.max_model_len - 1, 1)
        )
        self.pages = PageAllocator(config, window, counters)
        self.running = RequestQueue(config)
        self._waiting, self._counters = waiting, counters
        self._admitted: list[Request] = []  # since the last plan
        self._free_rows = list(reversed(range(config.max_num_seqs)))
        self._budget = config.token_budget or config.prefill_chunk + config.max_num_seqs

    @property
    def pool(self) -> PagePool:
        """The pages."""
        return self.pages.pool

    @property
    def has_row(self) -> bool:
        """Whether a row is free."""
        return bool(self._free_rows)

    @property
    def most_steps(self) -> int:
        """The longest decode window now.

        1 beside a prefill, so that its next chunk and its first token do not wait; 1 too when a
        request waits and a row's last step is under way, since the next read then frees that row.
        Else as long as allowed.
        """
        if Status.PREFILL in [r.status for r in self.running]:
            return 1
        if self._waiting and 0 in [r.decode_gap for r in self.running]:
            return 1
        return self.config.max_window

    def num_spare(self) -> int:
        """Pages that those who run do not need."""
        return self.pool.num_available - sum(map(self._num_missing, self.running))

    @property
    def load(self) -> int:
        """Tokens to compute before those who run all decode, and for each of them a page of tokens:
        decoding costs too.
        """
        return sum(
            self.config.page_size
            + (min(r.num_own, r.prefill_gap) if r.status is Status.PREFILL else 0)
            for r in self.running
        )

    def look_up(self, request: Request) -> tuple[list[Entry], int]:
        """The cached pages that `request`, which waits, could share; how many others it needs."""
        self.pages.begin(request)
        found = self.pages.match(request)
        needed = self._num_missing(request, len(found))
        needed += self.pages.num_claimed(request, found)
        request.entry = None
        return found, needed

    def num_coming(self, request: Request) -> int:
        """Pages of the tokens of `request` that others here are about to compute for it too."""
        if not self.config.prefix_cache:
            return 0
        computing = [other for other in self.running if other.status is Status.PREFILL]
        return max((num_alike(request, r, self.config.page_size) for r in computing), default=0)

    def run(self, request: Request, found: list[Entry], num_own: int, now: float | None) -> None:
        """Returns None; `request` runs and shares the pages `found`; `num_own` of its tokens nobody
        else computes.
        """
        self.running.add(request)
        request.shard, request.num_own = self.number, num_own
        request.row, request.status = self._free_rows.pop(), Status.PREFILL
        if not request.num_preemptions:
            request.times.first_scheduled = now
            self._counters.prompt_tokens += len(request.prompt_ids)
        self.pages.begin(request)
        self.pages.share(request, found)
        self._admitted.append(request)

    def stop(self, request: Request) -> None:
        """Returns None; `request` no longer runs: its row and pages are free."""
        assert request.row is not None
        self.running.remove(request)
        self._free_rows.append(request.row)
        self.pages.release(request)
        request.row, request.num_computed = None, 0

    def release_unseen(self) -> None:
        """Returns None; requests hold no page that they need no more."""
        for request in self.running:
            self.pages.release_unseen(request)

    def plan(self, most_steps: int) -> StepPlan:
        """The next plan of those who run, with a window of at most `most_steps`."""
        admitted, self._admitted = self._admitted, []
        num_evicted = self.pool.num_evicted
        gaps = [r.decode_gap for r in self.running if r.status is Status.DECODE]
        computing, leaders = merge(self._prefilling(), self.config.page_size, LOOKAHEAD)
        shape, lengths = self._pick(computing, self._budget - len(gaps) + gaps.count(0))
        forks = {r: of for r, of in leaders.items() if lengths.get(of) == of.prefill_gap}
        num_steps = 1 if lengths else min(most_steps, max(gaps, default=0))
        targets = self._targets(lengths, forks, num_steps)
        preempted = self._reserve(targets, forks)
        new = frozenset(admitted)

        prefill, starts, copies = self._advance_prefill(shape, lengths, forks)
        decode = self._advance_decode(targets, num_steps)
        self._counters.evicted_pages += self.pool.num_evicted - num_evicted
        return StepPlan(
            preempted=tuple((row, r) for row, r in preempted if r not in new),
            admitted=tuple(r for r in admitted if r.row is not None),
            mapped=self.pages.take_mapped(new),
            shape=shape if prefill else None,
            prefill=prefill,
            starts=starts,
            copies=copies,
            decode=decode,
            num_steps=num_steps if decode else 0,
        )

    def check_integrity(self) -> None:
        """Returns None if each row is free or held by one request, each page accounted for, and
        order holds.
        """
        running = list(self.running)
        self.pages.check_integrity(running)
        rows = sorted([*self._free_rows, *(-1 if r.row is None else r.row for r in running)])
        assert rows == list(range(self.config.max_num_seqs)), f"rows lost or doubled: {rows}"
        self.running.check_integrity()
        for request in running:
            request.check_integrity()
            assert request.status is not Status.WAITING, "one that waits runs"
            assert request.shard == self.number, f"{request.id} runs elsewhere"

    def _prefilling(self) -> Iterator[Request]:
        """Those that run and do not decode yet, each holding all that others computed for it."""
        for request in self.running:
            if request.status is Status.PREFILL:
                self.pages.share(request, self.pages.match(request))
                yield request

    def _num_missing(self, request: Request, num_found: int = 0) -> int:
        """Pages to allocate until the gap of `request`, which shares `num_found` more, is closed
        and one window is over.
        """
        num_known = request.num_computed if request.status is Status.DECODE else request.num_known
        num_tokens = min(num_known + self.config.max_window, request.max_total_len - 1)
        return self.pages.num_missing(len(request.pages) + num_found, num_tokens)

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
        for request in self.running:
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
                self.pages.share_full(forks[request], request)
            while request.row is not None and not self.pages.extend(request, num_tokens):
                victim = self.running.last
                assert victim.row is not None
                preempted.append((victim.row, victim))
                self._preempt(victim)
        return preempted

    def _preempt(self, request: Request) -> None:
        """Returns None; `request` waits at its place in the order, with nothing computed."""
        request.num_lost = max(request.num_lost, request.num_computed)
        request.num_preemptions += 1
        self._counters.preempted += 1
        self.stop(request)
        request.status = Status.WAITING
        self._waiting.add(request)

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
            self.pages.register(request, request.num_computed)
            self._counters.prefill_tokens += length
            self._counters.recomputed_tokens += max(
                min(request.num_computed, request.num_lost) - start, 0
            )
            chunk = Chunk(request, start, length, is_last=request.prefill_gap == 0)
            if chunk.is_last:
                started = [r for r, of in forks.items() if of is request and r.row is not None]
                for fork in started:
                    copies += self.pages.fork(request, fork)
                starts += [(len(prefill), r) for r in (request, *started)]
            prefill.append(chunk)
        for _, request in starts:
            request.status = Status.DECODE
            request.under_way.append(1)
        if prefill:
            self._counters.padded_tokens += shape[0] * shape[1] - sum(c.length for c in prefill)
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
