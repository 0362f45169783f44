"""`PagePool`: which pages of the KV cache are free, held, or kept for what they hold."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable

from jaxinfer.sched.prefix_cache import PrefixCache


class PagePool:
    """The pages 0..num_pages-1, each free, held by one or more holders, or cached.

    A page whose last holder frees it is cached if it is registered in the prefix cache, else free.
    Free pages are handed out in the order in which they were freed; when none is left, the cached
    page that was freed first is evicted.
    """

    def __init__(self, num_pages: int, cache: PrefixCache | None = None):
        if num_pages < 1:
            raise ValueError(f"PagePool of num_pages={num_pages} must have at least 1.")
        self.num_pages = num_pages
        self.cache = PrefixCache() if cache is None else cache
        self.num_evicted = 0
        self._free = deque(range(num_pages))
        self._holders: dict[int, int] = {}  # page -> how many hold it, at least 1
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first freed first

    @property
    def num_free(self) -> int:
        """Pages that hold nothing of use."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Registered pages that nobody holds."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Pages with a holder."""
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free) + len(self._cached)

    def is_held(self, page: int) -> bool:
        """Whether `page` has a holder."""
        return page in self._holders

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder each; or None, taking nothing, where there are fewer."""
        if count < 1:
            raise ValueError(f"PagePool.allocate({count}): the count must be at least 1.")
        if count > self.num_available:
            return None
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Returns None; each of `pages` has one holder more, who must free it too.

        Raises ValueError, and changes nothing, if one is free or is named twice.
        """
        pages = tuple(pages)
        wrong = [p for p in pages if p not in self._holders and p not in self._cached]
        self._require("share", pages, wrong, "Share only pages that are held or cached.")
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] = self._holders.get(page, 0) + 1

    def free(self, pages: Iterable[int]) -> None:
        """Returns None; each of `pages`, in this order, has one holder fewer.

        Raises ValueError, and changes nothing, if one is not held or is named twice.
        """
        pages = tuple(pages)
        wrong = [p for p in pages if p not in self._holders]
        self._require("free", pages, wrong, "Let each holder free each of its pages exactly once.")
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self.cache:
                self._cached[page] = None
            else:
                self._free.append(page)

    def reset(self) -> None:
        """Returns None; the prefix cache is empty: what was cached is free, and what is held will
        be.
        """
        self.cache.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Returns None if free, held and cached pages together are all pages, each once.

        With `held`, the pages that the holders say they hold, each named once per holder, those
        must be exactly what the pool has counted.
        """
        everything = sorted([*self._free, *self._holders, *self._cached])
        assert everything == list(range(self.num_pages)), f"pages lost or doubled: {everything}"
        assert all(count >= 1 for count in self._holders.values()), f"no holder: {self._holders}"
        self.cache.check_integrity()
        registered = sum(page in self.cache for page in self._holders)
        assert all(page in self.cache for page in self._cached), "a cached page is not registered"
        assert len(self.cache) == registered + len(self._cached), "a free page is registered"
        if held is not None:
            claimed = dict(Counter(held))
            assert claimed == self._holders, f"claimed {claimed}, held {self._holders}"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self.cache.remove(page)
        self.num_evicted += 1
        return page

    @staticmethod
    def _require(action: str, pages: tuple[int, ...], wrong: list[int], remedy: str) -> None:
        if not wrong and len(set(pages)) == len(pages):
            return
        twice = sorted(page for page, count in Counter(pages).items() if count > 1)
        named = f"{sorted(set(wrong))} not held" if wrong else f"{twice} named twice"
        raise ValueError(f"PagePool.{action}({list(pages)}): {named}. {remedy}")
