"""`PrefixCache`: which page holds the keys and values of which tokens, those before them included.

Full pages only. What a page holds follows from its own tokens and all before them, so an entry is
found by its parent, the entry of the page before, and its tokens: a chain from `root` on. The hash
only says where to look; the parent and the tokens themselves are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


def hash_page(parent_key: int, token_ids: tuple[int, ...]) -> int:
    """The key of the page of these tokens behind the page of that key."""
    return hash((parent_key, token_ids))


@dataclass(eq=False, frozen=True)
class Entry:
    """A page and what it holds; compared by identity. `depth` counts the pages of its chain."""

    key: int
    token_ids: tuple[int, ...]
    page: int
    depth: int
    parent: Entry | None = field(repr=False)


class PrefixCache:
    """The registered pages. It holds none of them: `PagePool` says which may be overwritten.

    An entry whose parent was removed is not found any more.
    """

    def __init__(self, hash_page: Callable[[int, tuple[int, ...]], int] = hash_page):
        self.root = Entry(key=0, token_ids=(), page=-1, depth=0, parent=None)
        self._hash_page = hash_page
        self._entries: dict[int, list[Entry]] = {}
        self._by_page: dict[int, Entry] = {}

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def find(self, parent: Entry, token_ids: tuple[int, ...]) -> Entry | None:
        """The entry of these tokens behind `parent`; None if there is none."""
        for entry in self._entries.get(self._hash_page(parent.key, token_ids), ()):
            if entry.parent is parent and entry.token_ids == token_ids:
                return entry
        return None

    def insert(self, parent: Entry, token_ids: tuple[int, ...], page: int) -> Entry | None:
        """The entry of these tokens behind `parent`: that of `page`, or of the page that was first.

        None, with nothing registered, if `parent` itself was removed.
        """
        if parent is not self.root and self._by_page.get(parent.page) is not parent:
            return None
        found = self.find(parent, token_ids)
        if found is not None:
            return found
        assert page not in self._by_page, f"page {page} holds something else"
        key = self._hash_page(parent.key, token_ids)
        entry = Entry(key, token_ids, page, parent.depth + 1, parent)
        self._entries.setdefault(key, []).append(entry)
        self._by_page[page] = entry
        return entry

    def remove(self, page: int) -> None:
        """Returns None; what `page` holds is not found any more."""
        entry = self._by_page.pop(page)
        entries = self._entries[entry.key]
        entries.remove(entry)
        if not entries:
            del self._entries[entry.key]

    def clear(self) -> None:
        """Returns None; nothing is found any more."""
        self._entries.clear()
        self._by_page.clear()

    def check_integrity(self) -> None:
        """Returns None if the keys and the pages lead to the same entries."""
        by_key = [entry for entries in self._entries.values() for entry in entries]
        assert len(by_key) == len(self._by_page), f"{len(by_key)} entries, {len(self)} pages"
        for key, entries in self._entries.items():
            assert entries, f"nothing is left under the key {key}"
            for entry in entries:
                assert entry.key == key, f"{entry} stands under the key {key}"
                assert self._by_page.get(entry.page) is entry, f"{entry}: not of its page"
                assert entry.parent is not None and entry.depth == entry.parent.depth + 1
