"""Requests that give way when pages run out: nothing of them is lost, repeated or changed."""

import random

import pytest

from jaxinfer.sched import Status

from .simulation import World, config

LONG = dict(max_tokens=40, ignore_eos=True)


def tokens(count, first=1):
    return tuple(range(first, first + count))


def outputs(world):
    return {r.id: (r.output_ids, r.finish_reason) for r in world.requests.values()}


def test_the_last_gives_way_and_comes_back_at_its_place():
    world = World(config(page_size=4, num_pages=14, max_num_seqs=2, max_window=4))
    a, b = world.put("a", tokens(10), **LONG), world.put("b", tokens(3, 200), **LONG)
    late = world.put("late", tokens(3, 300), **LONG)
    plans = []
    while not world.scheduler.counters.preempted:
        plans.append(world.step())
    plan = plans[-1]
    assert plan.preempted == ((1, b),)
    assert (plan.admitted, [r for _, r in plan.decode]) == ((), [a])
    assert (b.status, b.row, b.pages, b.num_computed) == (Status.WAITING, None, [], 0)
    while b.status is Status.WAITING:
        plan = world.step()
    assert a.status is Status.FINISHED
    assert plan.admitted == (b, late)
    # It comes back with all that it had produced, as one prompt, and samples what follows that.
    chunk, start = plan.prefill[0], plan.starts[0]
    assert (chunk.request, start) == (b, (0, b))
    assert chunk.start + chunk.length == 3 + len(b.output_ids) > 10
    world.run()
    world.check_results()
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)


def test_tokens_under_way_count_and_only_then_it_may_come_back():
    world = World(config(page_size=4, num_pages=13, max_num_seqs=2, max_window=4))
    a, b = world.put("a", tokens(10), **LONG), world.put("b", tokens(10, 100), **LONG)
    scheduler, device = world.scheduler, world.device
    under_way = []
    while not b.num_preemptions:
        (plan,) = scheduler.schedule()
        device.dispatch(plan)
        under_way += device.read()
        if len(under_way) > 6:  # far behind the plans
            scheduler.update(*under_way.pop(0))
    known, num_under_way = b.num_known, len(b.under_way)
    assert num_under_way >= 2
    scheduler.cancel("a")
    device.deactivate(plan.decode[0][0])
    while b.under_way:  # all pages are free, and yet
        (plan,) = scheduler.schedule()
        assert plan.is_empty and b.status is Status.WAITING
        scheduler.update(*under_way.pop(0))
        scheduler.check_integrity()
    assert b.num_known > known
    assert scheduler.schedule()[0].admitted == (b,)
    assert (b.output_ids, a.finish_reason) == (
        world.expected(b)[0][: len(b.output_ids)],
        "cancelled",
    )


def test_a_preempted_request_may_end_with_what_was_under_way():
    world = World(config(page_size=4, num_pages=9, max_num_seqs=2, max_window=8))
    a = world.put("a", tokens(9), max_tokens=22, ignore_eos=True)
    world.outputs["b"] = [5, 5, 5, 5, 5, 5, 5, 0]
    b = world.put("b", tokens(4, 100), max_tokens=20)
    world.run()
    world.check_results()
    assert (b.num_preemptions, b.num_lost) == (1, 13)
    assert (b.finish_reason, world.device.covered["b"]) == ("stop", 4)  # never computed again
    assert a.num_preemptions == 0


def test_what_was_computed_stays_cached_while_it_can():
    """The 4 pages of 16 tokens that were known to be full; none of them counts as a hit."""
    world = World(config(page_size=4, num_pages=12, max_num_seqs=2, max_window=4))
    a = world.put("a", tokens(18), max_tokens=26, ignore_eos=True)
    b = world.put("b", tokens(18, 100), max_tokens=8, ignore_eos=True)
    while not b.num_preemptions:
        world.step()
    world.cancel("a")
    world.run()
    world.check_results(cancelled={"a"})
    counters = world.scheduler.counters
    # 23 tokens were computed of which 20 were known; when it comes back, all 24.
    assert world.device.covered["b"] == 18 + (24 - 16)
    assert counters.recomputed_tokens == 23 - 16
    assert (a.num_cached, b.num_cached, counters.cached_tokens) == (0, 0, 0)


def three(num_pages, seed=0, **params):
    world = World(config(page_size=4, num_pages=num_pages, max_num_seqs=3, max_window=3))
    for i in range(3):
        world.put(str(i), tokens(9 + i, 100 * i), seed=seed + i, **(LONG | params))
    return world


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_pages", [13, 14, 17, 20])
def test_three_that_preempt_each_other_give_what_a_big_pool_gives(num_pages, seed):
    small, big = three(num_pages, seed), three(200, seed)
    small.run()
    big.run()
    assert outputs(small) == outputs(big)
    assert (small.scheduler.counters.preempted > 0, big.scheduler.counters.preempted) == (True, 0)
    assert all(len(r.output_ids) == 40 for r in small.requests.values())
    small.check_results()


def preempt(world, request):
    """Makes the request give way now, as if another had needed its pages."""
    row = request.row
    world.scheduler.shards[0]._preempt(request)
    world.device.deactivate(row)
    world.scheduler.check_integrity()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("step", range(1, 20))
def test_preempted_after_any_step_the_output_is_that_of_a_big_pool(step, prefix_cache):
    """In each chunk of its prompt, at its first token, at each token of each window."""
    world = World(
        config(
            page_size=4, prefill_chunk=4, max_window=3, max_num_seqs=2, prefix_cache=prefix_cache
        )
    )
    request = world.put("a", tokens(18), **LONG)
    other = world.put("b", tokens(6, 100), **LONG)
    for _ in range(step):
        world.step()
    assert request.row is not None
    preempt(world, request)
    world.run()
    world.check_results()
    assert (request.num_preemptions, other.num_preemptions) == (1, 0)
    assert world.scheduler.counters.cached_tokens == 0


def test_one_preempted_at_every_second_step_still_ends():
    world = World(config(page_size=4, prefill_chunk=16, max_window=2, max_num_seqs=2))
    request = world.put("a", tokens(18), **LONG)
    while not world.scheduler.is_idle:
        world.step()
        world.step()
        if request.row is not None and request.status is Status.DECODE:
            preempt(world, request)
    world.check_results()
    assert request.num_preemptions > 5


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_hundred_unique_prompts_in_a_crowded_pool_hit_nothing_and_all_end(policy):
    rng = random.Random(1)
    world = World(
        config(page_size=4, num_pages=40, max_num_seqs=8, prefill_chunk=32, policy=policy),
        num_ids=10**6,
    )
    for i in range(100):
        prompt = tokens(rng.randint(1, 40), 1000 * i + 1)
        world.put(
            str(i),
            prompt,
            max_tokens=rng.randint(1, 60),
            ignore_eos=True,
            priority=rng.randint(0, 2),
        )
    world.run()
    world.check_results()
    counters = world.scheduler.counters
    assert counters.preempted > 20
    assert counters.recomputed_tokens > 100
    assert counters.cached_tokens == sum(r.num_cached for r in world.requests.values()) == 0
    assert counters.preempted == sum(r.num_preemptions for r in world.requests.values())
    # Rather seldom: a request is taken in only where there is room for more than its prompt.
    assert counters.preempted < 100


def test_first_come_first_served_the_first_is_never_preempted():
    world = three(13)
    world.run()
    assert world.requests["0"].num_preemptions == 0
    assert list(world.requests) == sorted(
        world.requests, key=lambda name: world.requests[name].num_preemptions
    )


def test_one_that_fits_only_alone_runs_alone():
    world = World(config(num_pages=4, page_size=4, max_num_seqs=4))
    small = [world.put(f"s{i}", tokens(3, 100 * i), max_tokens=6, ignore_eos=True) for i in (1, 2)]
    large = world.put("large", tokens(12), max_tokens=5, ignore_eos=True)  # 16 tokens, all 4 pages
    after = world.put("after", tokens(3, 900), max_tokens=6)
    world.run()
    world.check_results()
    assert len(large.output_ids) == 5
    assert all(r.num_preemptions == 0 for r in (*small, large, after))


def test_samples_that_run_out_of_pages_give_way_one_by_one():
    world = World(config(page_size=4, num_pages=14, max_num_seqs=6))
    group = [
        world.put(f"s{i}", tokens(10), seed=i, max_tokens=24, ignore_eos=True) for i in range(6)
    ]
    world.run()
    world.check_results()
    assert len({tuple(r.output_ids) for r in group}) == 6
    assert world.scheduler.counters.preempted > 2
    assert group[0].num_preemptions == 0


def test_a_leader_preempted_in_its_prompt_is_followed_again_when_it_comes_back():
    world = World(config(page_size=4, prefill_chunk=4, max_num_seqs=3))
    group = [world.put(f"s{i}", tokens(18), seed=i, max_tokens=5) for i in range(3)]
    world.step()
    world.step()
    preempt(world, group[0])
    world.run()
    world.check_results()
    assert world.num_computed < 2 * 18
