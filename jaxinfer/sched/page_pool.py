"""`PagePool`: which pages of the KV cache are free and which are held."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PagePool:
    """The pages 0..num_pages-1, each either free or held by exactly one owner.

    Pages are handed out in the order in which they were freed, the longest free first: what a page
    holds stays readable for as long as possible.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"PagePool of num_pages={num_pages} must have at least 1.")
        self.num_pages = num_pages
        self._free = deque(range(num_pages))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can still give."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, now held; or None, and nothing is taken, where fewer are free."""
        if count < 1:
            raise ValueError(f"PagePool.allocate({count}): the count must be at least 1.")
        if count > len(self._free):
            return None
        pages = [self._free.popleft() for _ in range(count)]
        self._held.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Returns None; `pages` are free again.

        Raises ValueError, and frees none of them, if one is not held or is named twice.
        """
        pages = tuple(pages)
        wrong = sorted(set(pages) - self._held)
        if wrong or len(set(pages)) != len(pages):
            raise ValueError(
                f"PagePool.free({list(pages)}): {wrong or 'some'} not held or named twice. "
                "Free each allocated page exactly once."
            )
        self._held.difference_update(pages)
        self._free.extend(pages)

    def check_integrity(self, held: Iterable[int] | None = None) -> None:
        """Returns None if free and held pages together are all pages, each once.

        With `held`, the pages that the owners say they hold, those must be exactly the held ones.
        """
        everything = sorted([*self._free, *self._held])
        assert everything == list(range(self.num_pages)), f"pages lost or doubled: {everything}"
        if held is not None:
            claimed = sorted(held)
            assert claimed == sorted(self._held), f"claimed {claimed}, held {sorted(self._held)}"
