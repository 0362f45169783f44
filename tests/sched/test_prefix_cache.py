"""What is found is the page of exactly these tokens behind exactly those before."""

import pytest

from jaxinfer.sched import PrefixCache
from jaxinfer.sched.prefix_cache import hash_page

A, B, C = (1, 2), (3, 4), (5, 6)


@pytest.fixture(params=["a good hash", "always the same"])
def cache(request):
    """Once as it is, once with a hash function that tells nothing apart."""
    good = request.param == "a good hash"
    return PrefixCache(hash_page if good else lambda parent_key, token_ids: 7)


def test_a_page_is_found_behind_its_parent_alone(cache):
    a = cache.insert(cache.root, A, 4)
    b = cache.insert(a, B, 2)
    again = cache.insert(b, A, 0)  # the tokens of the first page, elsewhere
    assert [entry.depth for entry in (a, b, again)] == [1, 2, 3]
    assert cache.find(cache.root, A) is a
    assert cache.find(a, B) is b
    assert cache.find(b, A) is again
    for parent, tokens in (
        (cache.root, B),
        (a, A),
        (b, B),
        (again, B),
        (a, C),
        (cache.root, A[:1]),
    ):
        assert cache.find(parent, tokens) is None
    cache.check_integrity()
    assert (len(cache), 0 in cache, 1 in cache) == (3, True, False)


def test_the_first_page_of_equal_ones_stays(cache):
    a = cache.insert(cache.root, A, 4)
    assert cache.insert(cache.root, A, 5) is a
    assert (len(cache), 5 in cache) == (1, False)
    b = cache.insert(a, B, 6)
    assert cache.find(a, B) is b


def test_what_is_removed_is_not_found_nor_what_follows_it(cache):
    a = cache.insert(cache.root, A, 0)
    b = cache.insert(a, B, 1)
    cache.remove(0)
    assert cache.find(cache.root, A) is None
    assert 1 in cache
    assert cache.insert(a, C, 2) is None  # nobody could get there
    new = cache.insert(cache.root, A, 3)
    assert new is not a
    assert cache.find(new, B) is None  # b follows what page 0 held
    other = cache.insert(new, B, 4)
    assert other is not b
    cache.check_integrity()
    cache.remove(1)
    assert cache.find(new, B) is other
    cache.check_integrity()


def test_a_page_holds_one_thing_at_a_time(cache):
    cache.insert(cache.root, A, 0)
    with pytest.raises(AssertionError, match="page 0 holds something else"):
        cache.insert(cache.root, B, 0)


def test_nothing_is_found_after_clear(cache):
    a = cache.insert(cache.root, A, 0)
    cache.clear()
    assert cache.find(cache.root, A) is None
    assert cache.insert(a, B, 1) is None
    assert len(cache) == 0
    assert cache.insert(cache.root, A, 0) is not a


def test_keys_follow_from_the_whole_chain():
    cache = PrefixCache()
    a = cache.insert(cache.root, A, 0)
    b = cache.insert(cache.root, B, 1)
    assert len({a.key, b.key, cache.insert(a, C, 2).key, cache.insert(b, C, 3).key}) == 4


@pytest.mark.parametrize("broken", ["no page", "no key", "another page"])
def test_integrity_check_sees_keys_and_pages_that_disagree(broken):
    cache = PrefixCache()
    a = cache.insert(cache.root, A, 0)
    b = cache.insert(a, B, 1)
    if broken == "no page":
        del cache._by_page[1]
    elif broken == "no key":
        del cache._entries[b.key]
    else:
        cache._by_page[1] = a
    with pytest.raises(AssertionError):
        cache.check_integrity()
