"""Pages of equal beginnings: computed once, found by everyone after, and by nobody else.

The device of `simulation` fails when a row finds anything but its own tokens in its pages.
"""

import pytest

from jaxinfer.sched import Status

from .simulation import World, config


def tokens(count, first=1):
    return tuple(range(first, first + count))


def served(world, request_id, prompt, **params):
    """The request after it has run alone."""
    request = world.put(request_id, prompt, **params)
    world.run()
    world.check_results()
    return request


def chunks(plans, request):
    return [
        (c.start, c.length, c.is_last)
        for plan in plans
        for c in plan.prefill
        if c.request is request
    ]


@pytest.mark.parametrize("length", [16, 32])
def test_a_prompt_that_is_cached_whole_computes_its_last_page_again(length):
    world = World(config())
    first = served(world, "a", tokens(length))
    second = served(world, "b", tokens(length))
    assert second.output_ids == first.output_ids
    assert (first.num_cached, second.num_cached) == (0, length - 16)


def test_what_is_left_after_a_hit_is_one_chunk():
    world = World(config(page_size=8, prefill_chunk=8))
    first = served(world, "a", tokens(45))
    second = world.put("b", tokens(45))
    plans = world.run()
    assert chunks(plans, second) == [(40, 5, True)]
    assert second.output_ids == first.output_ids
    assert second.num_cached == 40


def test_an_evicted_page_is_not_found_under_its_old_name():
    """4 pages: those of A give way to B, then A comes again."""
    world = World(config(num_pages=4))
    a = served(world, "a", tokens(40), max_tokens=20)
    b = served(world, "b", tokens(45, first=500), max_tokens=15)
    again = served(world, "again", tokens(40), max_tokens=20)
    assert again.output_ids == a.output_ids
    assert (b.num_cached, again.num_cached) == (0, 0)
    assert world.scheduler.counters.evicted_pages == 6  # none but full pages is worth a name
    world.scheduler.shards[0].pool.check_integrity(held=[])


def test_of_a_request_that_ended_the_last_pages_are_evicted_first():
    """What is left is the beginning, of use to all that begin like it."""
    world = World(config(page_size=4, num_pages=5))
    served(world, "a", tokens(17), max_tokens=1)
    served(world, "b", tokens(5, first=500), max_tokens=1)  # takes the free page and one more
    assert served(world, "c", tokens(17), max_tokens=1).num_cached == 12


def test_a_hash_that_tells_nothing_apart_changes_no_output():
    outputs = []
    for hash_page in (None, lambda parent_key, token_ids: 0):
        world = World(config(page_size=4))
        if hash_page is not None:
            world.scheduler.shards[0].pool.cache._hash_page = hash_page
        prompts = [tokens(20), tokens(20), tokens(8) + tokens(12), tokens(4) * 5, tokens(4) * 3]
        requests = [served(world, str(i), prompt) for i, prompt in enumerate(prompts)]
        outputs.append([(r.output_ids, r.num_cached) for r in requests])
    assert outputs[0] == outputs[1]
    assert [num_cached for _, num_cached in outputs[0]] == [0, 16, 8, 4, 8]


@pytest.mark.parametrize(
    ("length", "expected"), [(1600, 1600), (1610, 1600), (1631, 1600), (1632, 1632)]
)
def test_a_shared_beginning_is_counted_exactly_one_after_the_other(length, expected):
    world = World(config(max_model_len=2048, page_size=32, prefill_chunk=512))
    requests = [
        served(world, str(i), tokens(length) + tokens(100, first=10_000 * (i + 1)), max_tokens=4)
        for i in range(5)
    ]
    assert [r.num_cached for r in requests] == [0] + [expected] * 4
    counters = world.scheduler.counters
    assert counters.prompt_tokens == 5 * (length + 100)
    assert counters.cached_tokens == 4 * expected
    assert counters.prefill_tokens == 5 * (length + 100) - 4 * expected == world.num_computed


@pytest.mark.parametrize("prefill_chunk", [40, 512])
def test_a_shared_beginning_is_counted_exactly_all_at_once(prefill_chunk):
    """Those behind the first wait for its pages, chunk by chunk, rather than compute them too."""
    world = World(
        config(max_model_len=2048, max_num_seqs=8, page_size=32, prefill_chunk=prefill_chunk)
    )
    requests = [
        world.put(str(i), tokens(1600) + tokens(100, first=10_000 * (i + 1)), max_tokens=4)
        for i in range(8)
    ]
    world.run()
    world.check_results()
    assert [r.num_cached for r in requests] == [0] + [1600] * 7
    assert world.num_computed == 1600 + 8 * 100
    assert world.scheduler.counters.cached_tokens == 7 * 1600


def test_what_lies_behind_those_that_a_call_chooses_among_is_shared_later():
    """40 prompts of their own, more than are looked at; among the last of all, four begin alike."""
    world = World(config(max_model_len=64, max_num_seqs=44, page_size=8, prefill_chunk=64))
    for i in range(40):
        world.put(f"own {i}", tokens(30, first=100 * (i + 1)), max_tokens=4)
    alike = [
        world.put(f"alike {i}", tokens(24) + tokens(6, first=9000 + 100 * i), max_tokens=4)
        for i in range(4)
    ]
    plan = world.step()
    assert len(plan.admitted) == 44
    world.run()
    world.check_results()
    assert [request.num_cached for request in alike] == [0, 24, 24, 24]
    assert world.num_computed == 40 * 30 + 24 + 4 * 6


def test_one_that_waits_takes_pages_as_they_are_planned_and_none_of_its_own_before():
    world = World(config(page_size=4, prefill_chunk=8))
    a, b = world.put("a", tokens(22)), world.put("b", (*tokens(17), 99, 98, 97))
    plan = world.step()
    assert [c.request for c in plan.prefill] == [a]
    assert (a.pages, b.pages, b.num_computed) == ([0, 1], [], 0)
    plan = world.step()
    assert plan.mapped == ((1, 0, 0), (1, 1, 1), (0, 2, 2), (0, 3, 3))
    assert (b.num_computed, b.num_cached, b.status) == (8, 8, Status.PREFILL)
    # The page after the next they have in common no more: b fills its own beside the last of a.
    plans = [world.step(), *world.run()]
    assert chunks(plans, b) == [(16, 4, True)]
    assert b.num_cached == 16
    world.check_results()


def test_one_that_comes_later_takes_what_is_planned_and_goes_on_behind_it():
    world = World(config(page_size=4, prefill_chunk=8))
    a = world.put("a", tokens(30))
    world.step()
    b = world.put("b", tokens(30) + tokens(3, first=90))
    plan = world.step()
    assert plan.admitted == (b,)
    assert (b.num_computed, b.pages) == (8, a.pages[:2])
    plans = world.run()
    assert chunks(plans, b) == [(28, 5, True)]  # a ends in that page and b does not
    world.check_results()


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_when_the_one_ahead_is_cancelled_the_next_computes_the_rest_itself(num_steps):
    world = World(config(page_size=4, prefill_chunk=8))
    world.put("a", tokens(30))
    b, c = world.put("b", (*tokens(26), 88)), world.put("c", (*tokens(26), 99))
    for _ in range(num_steps):
        world.step()
    world.cancel("a")
    plans = world.run()
    world.check_results(cancelled={"a"})
    assert chunks(plans, b)[0][0] == b.num_cached == 8 * num_steps
    assert c.num_cached == 24
    assert world.num_computed == 8 * num_steps + (27 - 8 * num_steps) + 3


def test_pages_filled_by_decode_are_shared_once_their_tokens_are_read():
    world = World(config(page_size=8, max_window=4))
    first = served(world, "a", tokens(20), max_tokens=20, ignore_eos=True)
    history = (*first.prompt_ids, *first.output_ids)
    assert len(history) == 40
    # The last token was never computed: 39 tokens, 4 pages.
    second = served(world, "b", (*history, 7, 8, 9))
    assert second.num_cached == 32
    third = served(world, "c", (*history[:33], 7))
    assert third.num_cached == 32


def test_a_running_request_shares_what_it_has_generated():
    world = World(config(page_size=4, max_window=4))
    first = world.put("a", tokens(6), max_tokens=40, ignore_eos=True)
    while len(first.output_ids) < 20:
        world.step()
    known = (*first.prompt_ids, *first.output_ids)
    second = world.put("b", (*known[:22], 7, 8, 9))
    plan = world.step()
    assert plan.admitted == (second,)
    assert second.pages[:5] == first.pages[:5]
    assert second.num_cached == 20
    world.run()
    world.check_results()


def test_a_stopped_request_registers_no_token_that_it_did_not_compute():
    """The device stops at token 8; the host has planned more, in a page that looks full."""
    world = World(config(page_size=4, max_window=8))
    world.outputs["a"] = [5, 6, 0]
    a = world.put("a", tokens(5), max_tokens=30)
    world.run()
    assert (a.output_ids, a.finish_reason) == ([5, 6, 0], "stop")
    again = served(world, "b", (*tokens(5), 5, 6, 0, 9))
    assert again.num_cached == 4  # not 8: the EOS at position 7 was never computed


def test_a_request_whose_prompt_is_scored_computes_it_whole():
    world = World(config(page_size=4))
    first = served(world, "a", tokens(20))
    scored = served(world, "b", tokens(20), prompt_logprobs=1)
    assert (scored.num_cached, world.device.covered["b"]) == (0, 20)
    assert scored.output_ids == first.output_ids
    both = [world.put(name, tokens(24, first=300), prompt_logprobs=1) for name in ("c", "d")]
    world.run()
    assert [world.device.covered[r.id] for r in both] == [24, 24]
    assert served(world, "e", tokens(24, first=300)).num_cached == 20  # for others it counts


def test_without_the_cache_nothing_is_shared():
    world = World(config(page_size=4, prefix_cache=False))
    group = [world.put(str(i), tokens(20)) for i in range(3)]
    world.run()
    world.check_results()
    assert served(world, "late", tokens(20)).num_cached == 0
    assert world.num_computed == 80
    assert all(r.num_cached == 0 for r in group)
    pool = world.scheduler.shards[0].pool
    assert (pool.num_free, len(pool.cache)) == (pool.num_pages, 0)


def replace_weights(world):
    world.device.weights += 1
    world.scheduler.reset_prefix_cache()
    world.scheduler.check_integrity()


def test_new_weights_find_nothing_of_the_old():
    world = World(config(page_size=4))
    old = served(world, "a", tokens(30))
    replace_weights(world)
    new = world.put("b", tokens(30))
    world.run()
    fresh = World(config(page_size=4))
    fresh.device.weights = 1
    assert new.output_ids == served(fresh, "b", tokens(30)).output_ids != old.output_ids
    assert new.num_cached == 0
    world.put("c", tokens(30))
    world.run()
    assert world.requests["c"].num_cached == 28


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_what_runs_while_the_weights_change_is_never_shared(num_steps):
    """In its prompt, in the middle of a page, or generating: nothing it goes on to fill counts."""
    world = World(config(page_size=4, prefill_chunk=6, max_window=2))
    a = world.put("a", tokens(20), max_tokens=30, ignore_eos=True)
    for _ in range(num_steps):
        world.step()
    replace_weights(world)
    b = world.put("b", tokens(20), max_tokens=5)
    world.run()
    assert b.num_cached == 0
    assert (b.output_ids, b.finish_reason) == world.expected(b)
    assert len(a.output_ids) == 30
    pool = world.scheduler.shards[0].pool
    assert len(pool.cache) == pool.num_cached == (19 + len(b.output_ids)) // 4


def test_twelve_equal_prompts_in_four_rows_compute_little_more_than_one():
    world = World(config(page_size=4, num_pages=16, max_num_seqs=4))
    requests = [world.put(str(i), tokens(33), max_tokens=8) for i in range(12)]
    world.run()
    world.check_results()
    assert sum(r.num_cached for r in requests) + world.num_computed == 12 * 33
    assert all(r.num_cached >= 32 for r in requests[1:])
