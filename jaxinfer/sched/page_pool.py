"""`PagePool`: which pages of the KV cache are free, and how many hold each of the others."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable


class PagePool:
    """The pages 0..num_pages-1, each either free or held by one or more holders.

    Pages are handed out in the order in which they were freed, the longest free first: what a page
    holds stays readable for as long as possible.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"PagePool of num_pages={num_pages} must have at least 1.")
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._holders: dict[int, int] = {}  # page -> how many hold it, at least 1

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages with one holder each; or None, taking nothing, where fewer are free."""
        if count < 1:
            raise ValueError(f"PagePool.allocate({count}): the count must be at least 1.")
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Returns None; each of `pages` has one holder more, who must free it too.

        Raises ValueError, and changes nothing, if one is not held or is named twice.
        """
        pages = tuple(pages)
        self._require_held("share", pages, "Share only pages that are allocated.")
        for page in pages:
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Returns None; each of `pages` has one holder fewer, and with none it is free again.

        Raises ValueError, and changes nothing, if one is not held or is named twice.
        """
        pages = tuple(pages)
        self._require_held("free", pages, "Let each holder free each of its pages exactly once.")
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Returns None if free and held pages together are all pages, each once.

        With `held`, the pages that the holders say they hold, each named once per holder, those
        must be exactly what the pool has counted.
        """
        everything = sorted([*self._free, *self._holders])
        assert everything == list(range(self.num_pages)), f"pages lost or doubled: {everything}"
        assert all(count >= 1 for count in self._holders.values()), f"no holder: {self._holders}"
        if held is not None:
            claimed = dict(Counter(held))
            assert claimed == self._holders, f"claimed {claimed}, held {self._holders}"

    def _require_held(self, action: str, pages: tuple[int, ...], remedy: str) -> None:
        wrong = sorted(set(pages) - self._holders.keys())
        twice = sorted(page for page, count in Counter(pages).items() if count > 1)
        if wrong or twice:
            named = f"{wrong} not held" if wrong else f"{twice} named twice"
            raise ValueError(f"PagePool.{action}({list(pages)}): {named}. {remedy}")
