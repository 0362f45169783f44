"""Every page is free or held by as many as were counted, whatever is asked of the pool."""

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
def test_sharing_what_is_not_held_raises_and_shares_nothing(pages, message):
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


def test_integrity_check_sees_lost_doubled_and_unclaimed_pages():
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
    pool._free.append(0)
    with pytest.raises(AssertionError, match="doubled"):
        pool.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_every_page_once(seed):
    rng = random.Random(seed)
    pool, owners = PagePool(17), []
    for _ in range(400):
        draw = rng.random()
        if owners and draw < 0.5:
            pool.free(owners.pop(rng.randrange(len(owners))))
        elif owners and draw < 0.7:
            pages = rng.choice(owners)
            owners.append(rng.sample(pages, rng.randint(1, len(pages))))
            pool.share(owners[-1])
        else:
            free_before, count = pool.num_free, rng.randint(1, 6)
            pages = pool.allocate(count)
            assert (pages is None) == (count > free_before)
            if pages is not None:
                owners.append(pages)
        held = [page for pages in owners for page in pages]
        pool.check_integrity(held=held)
        assert pool.num_free == 17 - len(set(held))
    for pages in owners:
        pool.free(pages)
    assert sorted(pool._free) == list(range(17))
