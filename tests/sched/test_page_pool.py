"""Every page is free, cached or held by as many as were counted, whatever is asked of the pool."""

import random
from collections import Counter

import pytest

from jaxinfer.sched import PagePool


def registered(pool, pages):
    """Registers the pages as a chain of their own; their entries."""
    entries, entry = [], pool.cache.root
    for page in pages:
        entry = pool.cache.insert(entry, (page, len(pool.cache)), page)
        entries.append(entry)
    return entries


def counts(pool):
    return pool.num_free, pool.num_cached, pool.num_held


def test_pages_are_handed_out_oldest_first():
    pool = PagePool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) == [2, 3]
    pool.free([3, 0])
    assert counts(pool) == (3, 0, 2)
    assert pool.allocate(3) == [4, 3, 0]


def test_too_many_pages_take_none():
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) is None
    pool.check_integrity(held=[3, 2, 1, 0])


def test_registered_pages_are_kept_and_evicted_only_when_none_is_free_the_first_freed_first():
    pool = PagePool(5)
    pool.allocate(5)
    a, b, c = registered(pool, [2, 0, 3])
    pool.free([4, 3, 0])
    assert (counts(pool), pool.num_available) == ((1, 2, 2), 3)
    pool.free([1, 2])
    assert pool.allocate(2) == [4, 1]
    assert pool.num_evicted == 0
    assert pool.allocate(1) == [3]
    assert (pool.num_evicted, 3 in pool.cache) == (1, False)
    assert pool.cache.find(b, c.token_ids) is None
    assert pool.cache.find(a, b.token_ids) is b
    pool.share([2])  # in use again, so it is not the next to go
    assert pool.allocate(1) == [0]
    assert pool.allocate(1) is None
    assert pool.num_evicted == 2
    pool.free([2])
    assert counts(pool) == (0, 1, 4)
    assert pool.allocate(1) == [2]
    assert len(pool.cache) == 0
    pool.check_integrity(held=[4, 1, 3, 0, 2])


def test_a_page_used_again_is_evicted_after_those_that_were_not():
    pool = PagePool(3)
    pool.allocate(3)
    registered(pool, [0, 1, 2])
    pool.free([2, 1, 0])
    pool.share([2])
    pool.free([2])
    assert pool.allocate(3) == [1, 0, 2]


def test_reset_forgets_everything():
    pool = PagePool(4)
    pool.allocate(4)
    (entry, *_) = registered(pool, [0, 1, 2])
    pool.free([2, 1])
    pool.reset()
    assert (counts(pool), len(pool.cache)) == ((2, 0, 2), 0)
    assert pool.cache.find(pool.cache.root, entry.token_ids) is None
    pool.free([0, 3])
    assert counts(pool) == (4, 0, 0)
    assert pool.num_evicted == 0
    pool.check_integrity(held=[])


@pytest.mark.parametrize("pages", [[0, 0], [1, 2], [4], [-1], [0, 7], [3]])
def test_freeing_what_is_not_held_raises_and_frees_nothing(pages):
    pool = PagePool(4)
    pool.allocate(4)
    registered(pool, [3])
    pool.free([3, 2])  # one is cached, one is free
    with pytest.raises(ValueError, match="exactly once"):
        pool.free(pages)
    assert counts(pool) == (1, 1, 2)
    pool.check_integrity(held=[0, 1])


def test_double_free_raises():
    pool = PagePool(4)
    pages = pool.allocate(4)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.free(pages[-1:])
    assert pool.num_free == 4


def test_a_shared_page_is_free_when_its_last_holder_frees_it():
    pool = PagePool(4)
    pool.allocate(3)
    pool.share([0, 1])
    pool.share([1])
    pool.check_integrity(held=[0, 0, 1, 1, 1, 2])
    pool.free([1, 0, 2])
    assert pool.num_free == 2
    pool.check_integrity(held=[0, 1, 1])
    pool.free([0, 1])
    pool.free([1])
    assert pool.allocate(4) == [3, 2, 0, 1]


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([0, 0], r"share\(\[0, 0\]\): \[0\] named twice"),
        ([1, 3], r"share\(\[1, 3\]\): \[3\] not held"),
        ([-1], r"share\(\[-1\]\): \[-1\] not held"),
    ],
)
def test_sharing_what_is_free_raises_and_shares_nothing(pages, message):
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match=message):
        pool.share(pages)
    pool.check_integrity(held=[0, 1])


def test_two_holders_are_not_freed_in_one_call():
    pool = PagePool(4)
    pool.allocate(2)
    pool.share([0])
    with pytest.raises(ValueError, match=r"free\(\[1, 0, 0\]\): \[0\] named twice"):
        pool.free([1, 0, 0])
    pool.check_integrity(held=[0, 0, 1])


def test_counts_below_one_raise():
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(4).allocate(0)


def test_integrity_check_sees_lost_doubled_unclaimed_and_wrongly_registered_pages():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="claimed"):
        pool.check_integrity(held=[])
    with pytest.raises(AssertionError, match="claimed"):
        pool.check_integrity(held=[0, 0])
    pool.share([0])
    for wrong in ([0], [0, 0, 0], [0, 1]):
        with pytest.raises(AssertionError, match="claimed"):
            pool.check_integrity(held=wrong)
    registered(pool, [1])
    with pytest.raises(AssertionError, match="a free page is registered"):
        pool.check_integrity()
    pool.cache.clear()
    pool._free.remove(1)
    pool._cached[1] = None
    with pytest.raises(AssertionError, match="a cached page is not registered"):
        pool.check_integrity()
    pool._free.append(0)
    with pytest.raises(AssertionError, match="doubled"):
        pool.check_integrity()


class Model:
    """A pool with a prefix cache in the plainest words: lists, and the whole text of each page."""

    def __init__(self, num_pages):
        self.free, self.cached, self.held = list(range(num_pages)), [], Counter()
        self.texts = {}  # page -> the tokens of its chain, page by page

    def allocate(self, count):
        if count > len(self.free) + len(self.cached):
            return None
        pages = [self.free.pop(0) if self.free else self.cached.pop(0) for _ in range(count)]
        for page in pages:
            self.texts.pop(page, None)
            self.held[page] += 1
        return pages

    def release(self, pages):
        for page in pages:
            self.held[page] -= 1
            if not self.held[page]:
                del self.held[page]
                (self.cached if page in self.texts else self.free).append(page)


def run_model(seed, num_operations, hash_page=None):
    """Random holders that share, extend, register and release; compared after every operation."""
    rng = random.Random(seed)
    pool, model = PagePool(23), Model(23)
    if hash_page is not None:
        pool.cache._hash_page = hash_page
    holders = []  # [pages, entry or None, chain of tokens so far]
    for _ in range(num_operations):
        draw = rng.random()
        if draw < 0.4 or not holders:
            text = [(rng.randint(0, 1),) for _ in range(rng.randint(1, 6))]
            _begin(pool, model, holders, text)
        elif draw < 0.6:
            _extend(pool, model, rng.choice(holders), (rng.randint(0, 1),))
        elif draw < 0.995:
            pages, *_ = holders.pop(rng.randrange(len(holders)))
            pool.free(reversed(pages))
            model.release(reversed(pages))
        else:
            pool.reset()
            model.free += model.cached
            model.cached, model.texts = [], {}
            for holder in holders:
                holder[1] = None
        pool.check_integrity(held=[page for pages, *_ in holders for page in pages])
        assert list(pool._free) == model.free
        assert list(pool._cached) == model.cached
        assert pool._holders == model.held
        assert {*pool.cache._by_page} == {*model.texts}
        assert sum(counts(pool)) == 23


def _begin(pool, model, holders, text):
    """A holder of the pages that are cached for the beginning of `text`, all of them if it can."""
    entry, found = pool.cache.root, []
    for tokens in text:
        following = pool.cache.find(entry, tokens)
        if following is None:
            break
        entry = following
        found.append(entry.page)
    for index, page in enumerate(found):
        assert model.texts[page] == tuple(text[: index + 1])  # the very same tokens from the start
    pool.share(found)
    for page in found:
        model.held[page] += 1
        if page in model.cached:
            model.cached.remove(page)
    holders.append([found, entry, text[: len(found)]])
    for tokens in text[len(found) :]:
        _extend(pool, model, holders[-1], tokens)


def _extend(pool, model, holder, tokens):
    pages, entry, text = holder
    got = pool.allocate(1)
    assert got == model.allocate(1)
    if got is None:
        return
    pages += got
    text.append(tokens)
    if entry is None:
        return
    holder[1] = new = pool.cache.insert(entry, tokens, got[0])
    if new is not None and new.page == got[0]:
        model.texts[got[0]] = tuple(text)
    elif new is not None:
        assert model.texts[new.page] == tuple(text)


@pytest.mark.parametrize("seed", range(4))
def test_random_use_agrees_with_a_plain_model(seed):
    run_model(seed, 2000)


def test_a_hash_that_is_always_the_same_changes_nothing():
    run_model(9, 2000, hash_page=lambda parent_key, token_ids: 5)


@pytest.mark.slow
def test_long_random_use_agrees_with_a_plain_model():
    for seed in range(100, 200):
        run_model(seed, 5000)
