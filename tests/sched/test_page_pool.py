"""Every page is free or held, once, whatever is asked of the pool."""

import random

import pytest

from jaxinfer.sched import PagePool


def test_pages_are_handed_out_oldest_first():
    pool = PagePool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(2) == [2, 3]
    pool.free([3, 0])
    assert pool.num_free == 3
    assert pool.allocate(3) == [4, 3, 0]


def test_too_many_pages_take_none():
    pool = PagePool(4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) is None
    pool.check_integrity(held=[3, 2, 1, 0])


@pytest.mark.parametrize("pages", [[0, 0], [1, 2], [4], [-1], [0, 7]])
def test_freeing_what_is_not_held_raises_and_frees_nothing(pages):
    pool = PagePool(4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="exactly once"):
        pool.free(pages)
    assert pool.num_free == 2
    pool.check_integrity(held=[0, 1])


def test_double_free_raises():
    pool = PagePool(4)
    pages = pool.allocate(4)
    assert pages is not None
    pool.free(pages)
    with pytest.raises(ValueError, match="not held"):
        pool.free(pages[-1:])
    assert pool.num_free == 4


def test_counts_below_one_raise():
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(0)
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(4).allocate(0)


def test_integrity_check_sees_lost_doubled_and_unclaimed_pages():
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="claimed"):
        pool.check_integrity(held=[])
    with pytest.raises(AssertionError, match="claimed"):
        pool.check_integrity(held=[0, 0])
    pool._free.append(0)
    with pytest.raises(AssertionError, match="doubled"):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_every_page_once(seed):
    rng = random.Random(seed)
    pool, owners = PagePool(17), []
    for _ in range(400):
        if owners and rng.random() < 0.5:
            pool.free(owners.pop(rng.randrange(len(owners))))
        else:
            free_before, count = pool.num_free, rng.randint(1, 6)
            pages = pool.allocate(count)
            assert (pages is None) == (count > free_before)
            if pages is not None:
                owners.append(pages)
        pool.check_integrity(held=[page for pages in owners for page in pages])
    for pages in owners:
        pool.free(pages)
    assert pool.num_free == 17
