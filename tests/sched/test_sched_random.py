"""Small crowded engines fed requests, cancels, new weights and steps at random.

The device of `simulation` fails when a row finds anything but its own tokens in its pages; every
output is compared with what the request gives alone; pages are counted after every operation.
"""

import random
from collections import Counter

import pytest

from jaxinfer.sched import Status

from .simulation import World, config, shown


class Life:
    """One engine at random; `operate` does the next thing and checks everything."""

    def __init__(self, seed, now=lambda: None, **changes):
        self.rng = rng = random.Random(seed)
        self.now = now
        page_size = rng.choice([1, 2, 4, 8])
        self.window = rng.choice([None, None, None, 1, 3, 9, 20])
        num_rows = rng.randint(1, 9)
        fields = dict(
            page_size=page_size,
            num_pages=rng.randint(64, 130) // page_size,
            max_num_seqs=num_rows,
            prefill_chunk=rng.choice([3, 16, 64, 200]),
            max_window=rng.randint(1, 8),
            prefix_cache=rng.random() < 0.85,
            token_budget=rng.choice([None, None, num_rows + rng.randint(1, 20)]),
            policy=rng.choice(["fcfs", "priority"]),
            max_overtakes=rng.randint(1, 5),
        )
        self.world = World(config(**(fields | changes)), self.window, num_ids=12)
        self.live, self.cancelled, self.mixed = [], set(), set()
        self.num_added, self.plans, self.num_preempted = 0, [], 0
        # Prompts begin alike, so that they share pages; all of few ids, so that wrong hits show.
        self.stems = [self._ids(rng.randint(1, 40)) for _ in range(4)]

    def _ids(self, count):
        return tuple(self.rng.randint(1, 2) for _ in range(count))

    def operate(self):
        rng, draw = self.rng, self.rng.random()
        if draw < 0.3 and len(self.live) < 14:
            self.add()
        elif draw < 0.315 and self.live:
            victim = rng.choice(self.live)
            self.cancelled.add(victim.id)
            self.world.cancel(victim.id)
        elif draw < 0.32:
            self.replace_weights()
        else:
            self.plans.append(shown(self.world.step(self.now())))
        self.check()

    def add(self):
        rng = self.rng
        stem = rng.choice(self.stems)[: rng.randint(1, 40)]
        prompt = stem + self._ids(rng.choice([0, 0, 1, 3, 20]))
        params = dict(
            max_tokens=rng.randint(1, 63 - len(prompt))
            if rng.random() < 0.3
            else rng.randint(1, 9),
            ignore_eos=rng.random() < 0.6,
            prompt_logprobs=rng.choice([None] * 9 + [1]),
            priority=rng.randint(-1, 1),
        )
        for _ in range(rng.choice([1, 1, 1, 2, 5])):
            request = self.world.put(
                str(self.num_added), prompt, self.now(), seed=rng.choice([1, 2]), **params
            )
            self.num_added += 1
            self.live.append(request)

    def replace_weights(self):
        """What has begun goes on, on old and new keys: its output is nobody's alone."""
        self.mixed |= {r.id for r in self.live if r.num_computed or r.output_ids or r.under_way}
        for request in self.world.scheduler.shards[0].running:
            self.world.device.skip(request.row, request.num_computed)
        self.world.device.weights += 1
        self.world.scheduler.reset_prefix_cache()

    def check(self):
        world = self.world
        pool, running = world.scheduler.shards[0].pool, world.scheduler.shards[0].running
        assert pool.num_free + pool.num_cached + pool.num_held == pool.num_pages
        held = Counter(page for r in running for page in r.pages if page is not None)
        assert held == pool._holders
        for request in [r for r in self.live if r.status is Status.FINISHED]:
            self.live.remove(request)
            output, reason = world.expected(request)
            if request.id in self.mixed:
                assert request.finish_reason is not None
            elif request.id in self.cancelled:
                assert output[: len(request.output_ids)] == request.output_ids
            else:
                assert (request.output_ids, request.finish_reason) == (output, reason)
            if request.must_compute or not world.config.prefix_cache:
                assert not request.num_cached
            self.num_preempted += request.num_preemptions
            del world.requests[request.id]

    def finish(self):
        while not self.world.scheduler.is_idle:
            self.plans.append(shown(self.world.step(self.now())))
            self.check()
        pool = self.world.scheduler.shards[0].pool
        assert pool.num_available == pool.num_pages
        counters = self.world.scheduler.counters
        assert counters.added == sum(counters.finished.values()) == self.num_added
        assert counters.prefill_tokens == self.world.num_computed


def live(seed, num_operations, **arguments):
    life = Life(seed, **arguments)
    for _ in range(num_operations):
        life.operate()
    life.finish()
    return life


@pytest.mark.parametrize("seed", range(40))
def test_20_000_operations(seed):
    live(seed, 500)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_1_000_000_operations(seed):
    live(seed, 10_000)


def test_a_hash_that_tells_nothing_apart_changes_no_plan():
    lives = []
    for hash_page in (None, lambda parent_key, token_ids: 3):
        life = Life(1, page_size=2, num_pages=50, prefix_cache=True)
        if hash_page is not None:
            life.world.scheduler.shards[0].pool.cache._hash_page = hash_page
        for _ in range(600):
            life.operate()
        life.finish()
        lives.append(life)
    assert lives[0].plans == lives[1].plans
    assert lives[0].world.scheduler.counters.cached_tokens > 300


@pytest.mark.parametrize("seed", [3, 8, 11])
def test_same_inputs_and_skewed_clocks_give_identical_plans(seed):
    clock = iter(range(10**9, 0, -1))
    plans = live(seed, 500).plans
    assert plans == live(seed, 500, now=lambda: float(next(clock))).plans
    assert len(plans) > 200


def test_these_lives_meet_every_case():
    met = Counter()
    for seed in range(12):
        life = live(seed, 500)
        counters = life.world.scheduler.counters
        met.update({key: value for key, value in vars(counters).items() if key != "finished"})
        met.update(counters.finished)
        for plan in life.plans:
            met.update(
                copies=len(plan.copies),
                mapped=len(plan.mapped),
                forks=len(plan.starts) - sum(is_last for *_, is_last in plan.prefill),
                gaps=sum(None in pages for _, _, pages in plan.admitted),
                cut=sum(not is_last for *_, is_last in plan.prefill),
            )
    assert met["preempted"] > 50 and met["recomputed_tokens"] > 500
    assert met["cached_tokens"] > 5000 and met["evicted_pages"] > 1000
    assert met["copies"] > 50 and met["forks"] > met["copies"] and met["mapped"] > 2000
    assert min(met["gaps"], met["cut"], met["cancelled"], met["stop"], met["length"]) > 20
