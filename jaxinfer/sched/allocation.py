"""`PageAllocator`: gives requests pages, cached ones that hold their tokens before fresh ones."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from jaxinfer.config import EngineConfig
from jaxinfer.sched.counters import Counters
from jaxinfer.sched.page_pool import PagePool
from jaxinfer.sched.prefix_cache import Entry
from jaxinfer.sched.request import Request, Status


class PageAllocator:
    """Keeps `pages` and `entry` of every running request.

    A page is registered in the prefix cache as soon as the computation that fills it is planned:
    programs run in order, so whatever is planned later may read it.

    Args:
        window: keys that a query sees at most, in any layer; None: all.
    """

    def __init__(self, config: EngineConfig, window: int | None, counters: Counters):
        self.pool = PagePool(config.cache.num_pages)
        self._page_size, self._window = config.page_size, window
        self._is_caching = config.prefix_cache
        self._counters = counters
        self._given: list[tuple[Request, int, int]] = []  # first and end of the pages of each
        # A plan computes a chunk and one decode step, or a decode window, of a request.
        longest_step = max(config.prefill_chunk + 1, config.max_window)
        self._most_seen = None if window is None else window - 1 + longest_step

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self._page_size)

    def most_held(self, num_tokens: int) -> int:
        """Most pages that a request holds at once on its way to `num_tokens` computed tokens."""
        pages = self.num_pages(num_tokens)
        if self._most_seen is None:
            return pages
        return min(pages, self.num_pages(self._most_seen) + 1)

    def num_missing(self, num_pages: int, num_tokens: int) -> int:
        """Pages to allocate until a request that has had `num_pages` has computed `num_tokens`."""
        return max(min(self.num_pages(num_tokens) - num_pages, self.most_held(num_tokens)), 0)

    def begin(self, request: Request) -> None:
        """Returns None; `request`, which holds no page, is at the start of its tokens."""
        assert not request.pages and not request.num_computed, f"{request.id} holds pages"
        request.entry = self.pool.cache.root if self._is_caching else None

    def match(self, request: Request) -> list[Entry]:
        """The cached pages that hold the next known tokens; at least one token is left to compute.

        None for a request that must compute its whole prompt, or that has begun to fill a page.
        """
        entry, size, start = request.entry, self._page_size, request.num_computed
        if entry is None or request.must_compute or entry.depth * size != start:
            return []
        found = []
        while start + size < request.num_known:
            entry = self.pool.cache.find(entry, request.known_ids(start, size))
            if entry is None:
                break
            found.append(entry)
            start += size
        return found

    def num_claimed(self, request: Request, found: Sequence[Entry]) -> int:
        """How many of the pages `found` for `request` could be evicted if it did not share them."""
        seen = self._first_seen(request.num_computed + len(found) * self._page_size)
        pages = (entry.page for entry in found[max(seen - len(request.pages), 0) :])
        return sum(not self.pool.is_held(page) for page in pages)

    def share(self, request: Request, found: Sequence[Entry]) -> None:
        """Returns None; `request` has computed what the pages `found` hold."""
        if not found:
            return
        pages = [entry.page for entry in found]
        self.pool.share(pages)
        self._give(request, pages)
        request.entry = found[-1]
        self._skip(request, len(found) * self._page_size)
        self.release_unseen(request)

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Whether `request` now has pages for `num_tokens` tokens; False if too few are left."""
        missing = -(-num_tokens // self._page_size) - len(request.pages)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing)
        if pages is not None:
            self._give(request, pages)
        return pages is not None

    def register(self, request: Request, num_tokens: int) -> None:
        """Returns None; others may share the pages that the first `num_tokens` tokens fill.

        Those are known, and their computation is planned for certain.
        """
        size = self._page_size
        while request.entry is not None and (request.entry.depth + 1) * size <= num_tokens:
            depth = request.entry.depth
            token_ids, page = request.known_ids(depth * size, size), request.pages[depth]
            request.entry = (
                None if page is None else self.pool.cache.insert(request.entry, token_ids, page)
            )

    def share_full(self, leader: Request, fork: Request) -> None:
        """Returns None; `fork` also holds the pages that the known tokens of `leader`, its own too,
        fill.
        """
        num_full = leader.num_known // self._page_size
        pages = [page for page in leader.pages[len(fork.pages) : num_full] if page is not None]
        self.pool.share(pages)
        self._give(fork, pages)
        assert len(fork.pages) == num_full, f"{leader.id} has let go of a page"

    def fork(self, leader: Request, fork: Request) -> tuple[tuple[int, int], ...]:
        """The (source, destination) pages to copy so that `fork` has computed all that `leader`
        has.

        It holds the pages that the tokens fill together with the leader; that in which they end is
        copied, since both go on to write to it.
        """
        num_full, rest = divmod(leader.num_computed, self._page_size)
        self._skip(fork, leader.num_computed - fork.num_computed)
        source, destination = leader.pages[num_full : num_full + 1], fork.pages[num_full:]
        if not rest:
            return ()
        assert source[0] is not None and destination[0] is not None
        return ((source[0], destination[0]),)

    def release_unseen(self, request: Request) -> None:
        """Returns None; pages of which no later query sees a token are given back."""
        if self._window is None:
            return
        last = self._first_seen(request.num_computed) - 1
        unseen = []
        while last >= 0 and (page := request.pages[last]) is not None:
            unseen.append(page)
            request.pages[last] = None
            last -= 1
        if unseen:
            self.pool.free(unseen)

    def release(self, request: Request) -> None:
        """Returns None; `request` holds nothing any more. Its last page is the first to be evicted:
        what begins like it can then still use those before.
        """
        self.pool.free([page for page in reversed(request.pages) if page is not None])
        request.pages, request.entry = [], None

    def reset(self, running: Iterable[Request]) -> None:
        """Returns None; what was computed so far is never shared again, as the weights changed."""
        self.pool.reset()
        for request in running:
            request.entry = None

    def take_mapped(self, new: Container[Request]) -> tuple[tuple[int, int, int], ...]:
        """(row, index, page) of each page that requests other than the `new` have got since this
        was last called, if they still run.
        """
        given, self._given = self._given, []
        return tuple(
            (request.row, index, page)
            for request, first, end in given
            if request.row is not None and request not in new
            for index, page in enumerate(request.pages[first:end], first)
            if page is not None
        )

    def check_integrity(self, running: Sequence[Request]) -> None:
        """Returns None if each page is held by as many as were counted, each of them for the same
        known tokens, and each request has pages for exactly what it has computed.
        """
        held: dict[int, tuple[int, tuple[int, ...]]] = {}
        counted = []
        for request in running:
            assert len(request.pages) == self.num_pages(request.num_computed), request.id
            for index, page in enumerate(request.pages):
                if page is None:
                    assert index < self._first_seen(request.num_computed), f"{request.id}: a hole"
                    continue
                counted.append(page)
                content = index, request.known_ids(0, (index + 1) * self._page_size)
                if page in held:
                    assert held[page] == content, f"page {page} holds two different things"
                    full = len(content[1]) == (index + 1) * self._page_size
                    assert full, f"page {page} is shared and not full"
                held[page] = content
            self._check_entry(request)
        self.pool.check_integrity(held=counted)

    def _check_entry(self, request: Request) -> None:
        entry, size = request.entry, self._page_size
        if entry is None:
            return
        assert entry.depth * size <= min(request.num_computed, request.num_known), request.id
        if request.status is Status.PREFILL:
            assert entry.depth == request.num_computed // size, f"{request.id}: not registered"
        while entry.parent is not None:
            first = (entry.depth - 1) * size
            assert entry.token_ids == request.known_ids(first, size), f"{request.id}: {entry}"
            entry = entry.parent

    def _first_seen(self, position: int) -> int:
        """The index of the first page of which a query at `position` or later sees a token."""
        if self._window is None:
            return 0
        return max(position - self._window + 1, 0) // self._page_size

    def _give(self, request: Request, pages: list[int]) -> None:
        first = len(request.pages)
        request.pages += pages
        self._given.append((request, first, len(request.pages)))

    def _skip(self, request: Request, num_tokens: int) -> None:
        """Returns None; `num_tokens` more are computed, by another request."""
        request.num_computed += num_tokens
        if not request.num_preemptions:
            request.num_cached += num_tokens
            self._counters.cached_tokens += num_tokens
