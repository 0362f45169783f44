"""Data shards: who goes where, in whose order, and that all step together."""

import random

import pytest

from jaxinfer.sched import Scheduler, Status

from .simulation import FakeDevice, World, config


class Shards(World):
    """A scheduler of several shards and a fake device for each."""

    def __init__(self, config, num_shards=2, num_ids=40):
        super().__init__(config, num_ids=num_ids)
        self.scheduler = Scheduler(config, num_shards=num_shards)
        self.devices = [
            FakeDevice(config, self.outputs, num_ids=num_ids) for _ in range(num_shards)
        ]

    def step(self, now=None):
        plans = self.scheduler.schedule(now)
        self.scheduler.check_integrity()
        steps = {plan.num_steps for plan in plans if plan.num_steps}
        if any(plan.prefill for plan in plans):
            assert steps <= {1}, "a window holds up another shard's prefill"
        for plan, device in zip(plans, self.devices):
            device.dispatch(plan)
        late = 0 if all(plan.is_empty for plan in plans) else 1
        while len(self.devices[0].under_way) > late:
            for device in self.devices:
                for request, tokens in device.read():
                    self.scheduler.update(request, tokens, now)
                    self.scheduler.check_integrity()
        return plans

    def run(self, limit=5000):
        plans = []
        while not self.scheduler.is_idle:
            plans.append(self.step())
            assert len(plans) < limit
        for shard in self.scheduler.shards:
            assert shard.pool.num_available == shard.pool.num_pages
        return plans

    def cancel(self, request_id):
        request = self.requests[request_id]
        row = self.scheduler.finish(request, "cancelled")
        self.devices[request.shard].deactivate(row)
        self.scheduler.check_integrity()


def tokens(count, first=100):
    return tuple(range(first, first + count))


def test_the_shard_with_the_least_to_do_takes_what_nobody_knows():
    world = Shards(config(num_pages=12), num_shards=3)
    requests = [world.put(f"{i}", tokens(20 - i, 100 * i), max_tokens=3) for i in range(6)]
    world.step()
    assert [r.shard for r in requests] == [0, 1, 2, 2, 1, 0]
    world.run()
    world.check_results()


def test_a_prompt_goes_where_its_beginning_is_cached_if_there_is_room():
    world = Shards(config(num_pages=8, max_num_seqs=1))
    first = world.put("first", tokens(16), max_tokens=2)
    other = world.put("other", tokens(40, 500), max_tokens=2)
    world.run()
    assert (first.shard, other.shard) == (0, 1)
    again = world.put("again", (*tokens(40, 500), 7), max_tokens=9)
    world.step()
    assert (again.shard, again.num_cached) == (1, 32)
    late = world.put("late", (*tokens(40, 500), 8), max_tokens=2)
    world.step()
    assert (late.shard, late.num_cached) == (0, 0), "the only row of the other shard is taken"
    world.run()
    world.check_results()


def test_who_shares_a_long_beginning_stays_together_and_it_is_computed_once():
    world = Shards(config(max_model_len=128, num_pages=32))
    samples = [world.put(f"{i}", tokens(50), seed=i, max_tokens=3) for i in range(3)]
    alike = world.put("alike", (*tokens(64, 300), 5), max_tokens=3)
    longer = world.put("longer", (*tokens(64, 300), 6, 7), max_tokens=3)
    world.run()
    world.check_results()
    assert len({r.shard for r in samples}) == 1
    assert alike.shard == longer.shard
    assert sum(sum(device.covered.values()) for device in world.devices) == 50 + 65 + 2


@pytest.mark.parametrize(
    ("common", "own", "caching"),
    [(16, 40, True), (50, 0, False), (40, 10, False)],
    ids=["a short beginning", "samples without a cache", "a beginning without a cache"],
)
def test_idle_shards_take_their_part_where_little_can_be_shared(common, own, caching):
    world = Shards(config(num_pages=64, prefix_cache=caching), num_shards=4)
    prompts = [(*tokens(common), *tokens(own, 1000 * i)) for i in range(1, 9)]
    requests = [world.put(f"{i}", ids, max_tokens=3) for i, ids in enumerate(prompts)]
    world.step()
    assert sorted(r.shard for r in requests) == [0, 0, 1, 1, 2, 2, 3, 3]
    world.run()
    world.check_results()


def test_rows_that_decode_count_too():
    """Of prompts that come one after the other, each beginning with a page that is there."""
    world = Shards(config(max_num_seqs=8, num_pages=64))
    requests = []
    for i in range(8):
        ids = (*tokens(16), *tokens(10, 1000 * (i + 1)))
        requests.append(world.put(f"{i}", ids, max_tokens=30, ignore_eos=True))
        for _ in range(2):
            world.step()
    assert {r.shard for r in requests} == {0, 1}
    world.run()
    world.check_results()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_order_of_precedence_holds_over_all_shards(policy):
    world = Shards(config(num_pages=4, max_num_seqs=1, policy=policy))
    running = [world.put(f"r{i}", tokens(20, 100 * i), max_tokens=8) for i in range(2)]
    world.step()
    waiting = [
        world.put(f"w{i}", tokens(20, 1000 * i), max_tokens=8, priority=-i) for i in range(1, 5)
    ]
    order = []
    while not world.scheduler.is_idle:
        world.step()
        new = {r.id for r in waiting if r.row is not None}.difference(*order)
        order += [new] if new else []
    pairs = [{"w1", "w2"}, {"w3", "w4"}]
    assert order == (pairs if policy == "fcfs" else pairs[::-1])
    assert all(r.status is Status.FINISHED for r in running)
    world.check_results()


def test_one_that_gave_way_goes_on_where_there_is_room():
    """Two grow on one shard until its pages end; the other shard is empty by then."""
    world = Shards(config(max_model_len=128, page_size=4, num_pages=12, max_num_seqs=2))
    short = world.put("short", tokens(30, 900), max_tokens=1)
    first = world.put("first", tokens(8), max_tokens=36, ignore_eos=True)
    second = world.put("second", (*tokens(8), 3), max_tokens=30, ignore_eos=True)
    world.step()
    assert (short.shard, first.shard, second.shard) == (0, 1, 1)
    while not second.num_preemptions:
        world.step()
    world.run()
    world.check_results()
    assert (first.shard, second.shard) == (1, 0)


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_gives_what_each_request_gives_alone(seed):
    rng = random.Random(seed)
    world = Shards(
        config(
            page_size=rng.choice([2, 4, 8]),
            num_pages=rng.randint(32, 40),
            max_num_seqs=rng.randint(1, 4),
            prefill_chunk=rng.choice([8, 32]),
            max_window=rng.randint(1, 5),
            policy=rng.choice(["fcfs", "priority"]),
            max_overtakes=2,
        ),
        num_shards=rng.randint(2, 4),
        num_ids=12,
    )
    cancelled = set()
    for i in range(60):
        prompt = tokens(rng.randint(1, 20)) + tokens(rng.randint(1, 10), rng.randint(1, 3))
        params = dict(max_tokens=rng.randint(1, 9), priority=rng.randint(0, 2))
        world.put(str(i), prompt, seed=rng.randint(1, 2), **params)
        for _ in range(rng.randint(0, 2)):
            world.step()
        if rng.random() < 0.1:
            cancelled.add(rng.choice(list(world.requests)))
            victim = max(cancelled, key=int)
            if world.requests[victim].status is not Status.FINISHED:
                world.cancel(victim)
    world.run()
    gone = {r.id for r in world.requests.values() if r.finish_reason == "cancelled"}
    world.check_results(gone)
    assert len({r.shard for r in world.requests.values()}) > 1
