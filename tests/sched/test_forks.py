"""Samples of one prompt: computed once, its pages shared, everything after it apart.

The device of `simulation` checks on every plan that each row finds its own tokens in its pages.
"""

import random
from collections import Counter

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Status
from jaxinfer.sched.forks import check_forks

from .simulation import EOS, World, config, shown

# Outputs that differ from the second token on, so that a page written twice shows.
OUTPUTS = [[7, 10 * i, 10 * i + 1] for i in range(1, 100)]


def statuses(requests):
    return [request.status for request in requests]


def computed(world):
    """Prompt tokens that were computed, in all rows together."""
    return sum(world.device.covered.values())


def test_a_group_from_prompt_to_end():
    world = World(config(page_size=4, num_pages=40, max_window=4))
    leader, *forks = world.add_samples("s", 10, OUTPUTS[:3], max_tokens=7)
    plan = world.step()
    # 5 pages each, of which the prompt fills 2 and half of a third.
    assert [r.pages for r in (leader, *forks)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 5, 6, 7],
        [0, 1, 8, 9, 10],
    ]
    assert shown(plan).starts == [(0, "s0"), (0, "s1"), (0, "s2")]
    assert plan.copies == ((2, 5), (2, 8))
    assert plan.admitted == (leader, *forks)
    assert plan.decode == ((0, leader), (1, forks[0]), (2, forks[1]))
    assert [(c.request, c.start, c.length) for c in plan.prefill] == [(leader, 0, 10)]
    assert [r.fork_of for r in (leader, *forks)] == [None, leader, leader]
    assert leader.forks == []
    world.run()
    world.check_results()
    assert computed(world) == 10


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 7, 8, 9])
def test_pages_that_the_prompt_fills_are_shared_and_the_page_it_ends_in_is_copied(
    prompt_len, page_size
):
    world = World(config(page_size=page_size, max_model_len=16, max_num_seqs=3))
    group = world.add_samples("s", prompt_len, OUTPUTS[:3], max_tokens=5)
    plan = world.step()
    num_full = prompt_len // page_size
    counts = Counter(page for request in group for page in request.pages)
    assert [page for page, count in counts.items() if count == 3] == group[0].pages[:num_full]
    assert set(counts.values()) <= {1, 3}
    assert len(plan.copies) == (2 if prompt_len % page_size else 0)
    needed = -(-(prompt_len + 5) // page_size)
    used = world.scheduler.pool.num_pages - world.scheduler.pool.num_free
    assert used == num_full + 3 * (needed - num_full)
    world.run()
    world.check_results()
    assert computed(world) == prompt_len


def test_forks_start_in_the_plan_of_the_last_chunk_and_compute_none():
    world = World(config(prefill_chunk=8, page_size=8))
    group = world.add_samples("s", 20, OUTPUTS[:3], max_tokens=4)
    for _ in range(2):
        plan = world.step()
        assert (plan.starts, plan.copies, plan.decode) == ((), (), ())
        assert statuses(group) == [Status.PREFILL] * 3
        assert [request.num_computed for request in group[1:]] == [0, 0]
    plan = world.step()
    assert [request for _, request in plan.starts] == [request for _, request in plan.decode]
    assert [request.num_computed for request in group] == [21] * 3
    assert statuses(group) == [Status.DECODE] * 3
    assert len(plan.copies) == 2
    world.run()
    world.check_results()
    assert [world.device.covered[request.id] for request in group] == [20, 0, 0]


def test_groups_in_one_call_start_from_their_own_chunks():
    world = World(config(prefill_chunk=128, max_num_seqs=8))
    a = world.add_samples("a", 20, OUTPUTS[:2])
    b = world.add_samples("b", 30, OUTPUTS[:3])
    alone = world.add("alone", 25)
    plan = world.step()
    assert [chunk.request for chunk in plan.prefill] == [a[0], b[0], alone]
    assert shown(plan).starts == [
        (0, "a0"),
        (0, "a1"),
        (1, "b0"),
        (1, "b1"),
        (1, "b2"),
        (2, "alone"),
    ]
    assert plan.copies == (
        (a[0].pages[1], a[1].pages[1]),
        *((b[0].pages[1], r.pages[1]) for r in b[1:]),
    )
    world.run()
    world.check_results()


def test_rows_are_kept_for_the_forks_ahead_of_later_prompts():
    """A full queue of groups: each prompt is computed once, and nobody is overtaken."""
    world = World(config(max_num_seqs=8))
    groups = [world.add_samples(f"g{g}.", 40, OUTPUTS[4 * g : 4 * g + 4]) for g in range(6)]
    plans = world.run()
    world.check_results()
    assert computed(world) == 6 * 40
    admitted = [request for plan in plans for request in plan.admitted]
    assert admitted == [request for group in groups for request in group]


def test_a_fork_that_does_not_fit_holds_up_those_behind_it_as_any_request_does():
    world = World(config(num_pages=8, prefill_chunk=16))
    leader, fork = world.add_samples("s", 33, OUTPUTS[:2], max_tokens=31)  # 4 pages, 2 shared
    big = world.add_samples("big", 33, OUTPUTS[2:5], max_tokens=31)
    small = world.add("small", 3)
    assert world.step().admitted == (leader, fork)
    assert world.scheduler.pool.num_free == 2
    assert statuses([*big, small]) == [Status.WAITING] * 4
    world.run()
    world.check_results()


def test_samples_beyond_the_rows_compute_the_prompt_once_more():
    world = World(config(max_num_seqs=3, page_size=4))
    group = world.add_samples("s", 6, OUTPUTS[:8], max_tokens=5)
    plan = world.step()
    assert plan.admitted == tuple(group[:3])
    assert [request.fork_of for request in group] == [None, *[group[0]] * 2, None, *[group[3]] * 4]
    assert group[3].forks == group[4:]
    world.run()
    world.check_results()
    assert [world.device.covered[request.id] for request in group] == [6, 0, 0, 6, 0, 0, 6, 0]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_few_rows_serve_any_number_of_samples(num_rows):
    world = World(config(max_num_seqs=num_rows))
    world.add_samples("s", 20, OUTPUTS[:9])
    world.run()
    world.check_results()


def test_a_small_pool_forks_as_many_as_it_holds():
    # 3 pages each, 2 of them the prompt's own: 3 + 1 + 1 of the 5; the fourth has to wait.
    world = World(config(num_pages=5))
    group = world.add_samples("s", 32, OUTPUTS[:4], max_tokens=10)
    plan = world.step()
    assert plan.admitted == tuple(group[:3])
    assert world.scheduler.pool.num_free == 0
    assert (group[3].status, group[3].fork_of) == (Status.WAITING, None)
    world.run()
    world.check_results()
    assert computed(world) == 64


def test_a_leader_that_ends_at_its_first_token_leaves_its_pages_to_the_forks():
    world = World(config(page_size=4))
    outputs = [[EOS], [8, 8, 8, EOS], [9] * 6]
    leader, *forks = world.add_samples("s", 10, outputs, max_tokens=6)
    shared = world.step() and leader.pages[:2]
    world.step()
    assert leader.status is Status.FINISHED and statuses(forks) == [Status.DECODE] * 2
    assert not set(shared) & set(world.scheduler.pool._free)
    late = world.add("late", 40)  # writes to whatever was freed
    world.run()
    world.check_results()
    assert len(late.output_ids) == 16


def test_a_fork_that_ends_at_its_first_token_frees_its_own_pages_alone():
    world = World(config(page_size=4, num_pages=40))
    leader, fork = world.add_samples("s", 10, [[9] * 6, [EOS]], max_tokens=6)
    world.step()
    own, before = fork.pages[2:], world.scheduler.pool.num_free
    world.step()
    assert fork.status is Status.FINISHED and leader.status is Status.DECODE
    assert world.scheduler.pool.num_free == before + len(own)
    world.run()
    world.check_results()


def test_samples_of_one_token_each():
    world = World(config())
    world.add_samples("s", 5, [[i] for i in range(1, 5)], max_tokens=1)
    plan = world.step()
    assert (len(plan.starts), plan.decode, plan.num_steps) == (4, (), 0)
    world.run()
    world.check_results()


def test_samples_may_have_different_lengths():
    world = World(config(page_size=4))
    leader = world.add("a", 6, OUTPUTS[0], max_tokens=2)
    world.add("b", 6, OUTPUTS[1], leader=leader, max_tokens=30)
    world.add("c", 6, OUTPUTS[2], leader=leader, max_tokens=1)
    world.run()
    world.check_results()
    assert computed(world) == 6


def test_a_leader_cancelled_while_it_waits_hands_over_to_its_first_fork():
    world = World(config(max_num_seqs=2))
    world.add_samples("busy", 4, OUTPUTS[:2])
    world.step()
    a, b, c, d = world.add_samples("s", 20, OUTPUTS[2:6])
    world.cancel("s0")
    assert [request.fork_of for request in (b, c, d)] == [None, b, b]
    assert (a.forks, b.forks, c.forks) == ([], [c, d], [])
    world.run()
    world.check_results(cancelled={"s0"})
    assert [world.device.covered.get(request.id) for request in (a, b, c, d)] == [None, 20, 0, 20]


@pytest.mark.parametrize("num_rows", [4, 2, 1])
def test_a_leader_cancelled_in_its_prompt_hands_over_to_its_first_fork(num_rows):
    """With forks that hold the prompt's pages already, with some that wait for a row, with none."""
    world = World(config(max_num_seqs=num_rows, prefill_chunk=8, page_size=8))
    a, b, c, d = world.add_samples("s", 20, OUTPUTS[:4])
    world.step()
    assert (a.status, a.num_computed, a.forks) == (Status.PREFILL, 8, [b, c, d])
    shared = a.pages[:2]
    world.cancel("s0")
    assert [request.fork_of for request in (b, c, d)] == [None, b, b]
    assert b.pages[:2] == (shared if num_rows > 1 else [])
    world.run()
    world.check_results(cancelled={"s0"})
    assert world.device.covered["s1"] == 20


def test_a_leader_cancelled_while_it_generates_changes_nothing_for_its_forks():
    world = World(config(page_size=4))
    a, b, c = world.add_samples("s", 10, OUTPUTS[:3])
    world.step()
    world.step()
    world.cancel("s0")
    assert statuses([a, b, c]) == [Status.FINISHED, Status.DECODE, Status.DECODE]
    late = world.add_samples("late", 21, OUTPUTS[5:7])
    world.run()
    world.check_results(cancelled={"s0"})
    assert [world.device.covered[r.id] for r in (b, c, *late)] == [0, 0, 21, 0]


def test_forks_cancelled_in_any_state_leave_the_others_alone():
    world = World(config(max_num_seqs=3, prefill_chunk=8, page_size=8))
    a, _, _, d, e = world.add_samples("s", 20, OUTPUTS[:5])
    world.step()
    world.cancel("s1")  # has its row and pages
    world.cancel("s3")  # waits
    assert [request.id for request in a.forks] == ["s2", "s4"]
    world.step()
    world.step()
    assert e.status is Status.DECODE  # in the row that s1 left
    world.cancel("s2")  # generates
    world.run()
    world.check_results(cancelled={"s1", "s2", "s3"})
    assert d.fork_of is None or d.status is Status.FINISHED
    assert computed(world) == 20


def test_a_whole_group_cancelled_one_by_one_computes_nothing_more():
    world = World(config(prefill_chunk=8))
    for request in world.add_samples("s", 20, OUTPUTS[:6]):
        world.step()
        world.cancel(request.id)
    assert world.scheduler.is_idle
    assert world.scheduler.pool.num_free == world.scheduler.pool.num_pages


def test_an_error_of_the_leader_is_its_own():
    world = World(config(prefill_chunk=8))
    leader, fork = world.add_samples("s", 20, OUTPUTS[:2])
    world.step()
    world.device.deactivate(world.scheduler.finish(leader, "error"))
    world.run()
    assert (leader.finish_reason, fork.finish_reason) == ("error", "length")


def test_a_leader_that_is_too_late_makes_an_ordinary_request():
    world = World(config())
    ended = world.add("ended", 6, [EOS])
    world.run()
    generating = world.add("generating", 6, max_tokens=20)
    world.step()
    never = Request(id="never", prompt_ids=(9,), params=SamplingParams(), seed=0)
    for leader in (ended, generating, never):
        fork = world.add(f"of {leader.id}", 0, leader=leader)
        assert fork.fork_of is None and leader.forks == []
    world.run()
    world.check_results()


def test_a_fork_that_joins_while_the_prompt_is_computed_forks_too():
    world = World(config(prefill_chunk=8))
    leader = world.add("s0", 20, OUTPUTS[0])
    world.step()
    world.add("s1", 20, OUTPUTS[1], leader=leader)
    world.run()
    world.check_results()
    assert computed(world) == 20


def test_a_fork_that_can_never_run_is_refused_and_its_leader_knows_nothing_of_it():
    world = World(config(num_pages=2))
    leader = world.add("s0", 20, max_tokens=2)
    with pytest.raises(ValueError, match="needs 3 pages"):
        world.add("s1", 20, leader=leader, max_tokens=20)
    assert leader.forks == []
    world.run()


@pytest.mark.parametrize("wrong", ["a prompt of its own", "a leader that follows"])
def test_a_fork_of_another_prompt_or_of_a_fork_is_an_error_of_ours(wrong):
    world = World(config())
    leader, fork = world.add_samples("s", 4, OUTPUTS[:2])
    changes = (
        dict(prompt_ids=(1, 2), fork_of=leader)
        if wrong == "a prompt of its own"
        else dict(prompt_ids=fork.prompt_ids, fork_of=fork)
    )
    with pytest.raises(AssertionError, match="another"):
        world.scheduler.add(Request(id="bad", params=SamplingParams(), seed=0, **changes))


def holder(pages, prompt_len=8, fork_of=None, status=Status.DECODE):
    request = Request(
        id="r", prompt_ids=(1,) * prompt_len, params=SamplingParams(), seed=0, fork_of=fork_of
    )
    request.pages, request.status = pages, status
    return request


def test_integrity_check_sees_pages_shared_by_strangers_or_beyond_the_prompt():
    leader = holder([0, 1, 2])
    check_forks([leader, holder([0, 1, 3], fork_of=leader)], page_size=4)
    with pytest.raises(AssertionError, match="no siblings"):
        check_forks([leader, holder([0, 1, 3])], page_size=4)
    with pytest.raises(AssertionError, match="not the prompt"):
        check_forks([leader, holder([0, 1, 2], fork_of=leader)], page_size=4)
    with pytest.raises(AssertionError, match="not the prompt"):
        check_forks([leader, holder([1, 0, 3], fork_of=leader)], page_size=4)
    with pytest.raises(AssertionError, match="different prompts"):
        check_forks([leader, holder([0, 1, 3], prompt_len=9, fork_of=leader)], page_size=4)


def test_integrity_check_sees_a_fork_that_nobody_will_start():
    leader = holder([0, 1, 2])
    fork = holder([], fork_of=leader, status=Status.WAITING)
    with pytest.raises(AssertionError, match="a leader is over"):
        check_forks([fork], page_size=4)
    with pytest.raises(AssertionError, match="does not know who waits"):
        check_forks([leader, fork], page_size=4)
    leader.forks = [fork]
    with pytest.raises(AssertionError, match="leads as"):
        check_forks([leader, fork], page_size=4)
    leader.status = Status.PREFILL
    check_forks([leader, fork], page_size=4)
    fork.pages = [3, 4, 5]
    with pytest.raises(AssertionError, match="not the leader's"):
        check_forks([leader, fork], page_size=4)
    fork.pages = [0, 1, 5]
    check_forks([leader, fork], page_size=4)


class Ledger:
    """Who holds which page, from the plans and the ends alone."""

    def __init__(self, pool):
        self.pool, self.held = pool, {}

    def check(self, plan=None, requests=()):
        for request in plan.admitted if plan else ():
            self.held[request.id] = tuple(request.pages)
        for request in requests:
            if request.status is Status.FINISHED:
                self.held.pop(request.id, None)
        counts = Counter(page for pages in self.held.values() for page in pages)
        self.pool.check_integrity(held=counts.elements())
        everything = [*self.pool._free, *counts]
        assert sorted(everything) == list(range(self.pool.num_pages))


def random_life(seed, now=lambda: None):
    """A small crowded engine fed groups, singles, cancels and steps at random."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4, 8, 16])
    world = World(
        config(
            page_size=page_size,
            num_pages=rng.randint(64, 250) // page_size,
            max_num_seqs=rng.randint(1, 12),
            prefill_chunk=rng.choice([3, 16, 64, 200]),
            max_window=rng.randint(1, 8),
        )
    )
    ledger, plans, cancelled = Ledger(world.scheduler.pool), [], set()
    for _ in range(400):
        draw, plan = rng.random(), None
        live = [r for r in world.requests.values() if r.status is not Status.FINISHED]
        if draw < 0.06:
            if live:
                victim = rng.choice(live)
                cancelled.add(victim.id)
                world.cancel(victim.id)
        elif draw < 0.4 and len(live) < 20:
            outputs = [
                [rng.choice([EOS, *range(3, 20)]) for _ in range(16)]
                for _ in range(rng.choice([1, 1, 2, 3, 4, 7, 12]))
            ]
            world.add_samples(
                f"{len(world.requests)}.",
                rng.choice([*(rng.randint(1, 40) for _ in range(3)), 2 * page_size]),
                outputs,
                now=now(),
                max_tokens=rng.randint(1, 16),
                ignore_eos=rng.random() < 0.5,
            )
        else:
            plan = world.step(now())
            plans.append(shown(plan))
        ledger.check(plan, world.requests.values())
    while not world.scheduler.is_idle:
        plan = world.step(now())
        plans.append(shown(plan))
        ledger.check(plan, world.requests.values())
    return world, plans, cancelled


@pytest.mark.parametrize("seed", range(14))
def test_random_groups_keep_every_page_counted_and_every_output_right(seed):
    world, plans, cancelled = random_life(seed)
    world.check_results(cancelled)
    pool = world.scheduler.pool
    assert sorted(pool._free) == list(range(pool.num_pages))
    assert not pool._holders
    order = list(world.requests)
    admitted = [order.index(name) for plan in plans for name, _, _ in plan.admitted]
    assert admitted == sorted(set(admitted))
    started = [name for plan in plans for _, name in plan.starts]
    assert len(started) == len(set(started)) >= len(world.requests) - len(cancelled)


def test_random_groups_meet_every_case():
    """The lives above fork, copy, share without a copy, run out of room and hand over."""
    num_forks, num_copies, num_again = 0, 0, 0
    for seed in (3, 6, 9):
        world, plans, _ = random_life(seed)
        forks = [r for r in world.requests.values() if r.fork_of is not None]
        num_forks += sum(world.device.covered.get(r.id) == 0 for r in forks)
        num_copies += sum(len(plan.copies) for plan in plans)
        num_again += sum(
            not name.endswith(".0") and is_last
            for plan in plans
            for name, _, _, is_last in plan.prefill
        )
    assert num_forks > num_copies > 50
    assert num_again > 50


@pytest.mark.parametrize("seed", [3, 8])
def test_same_inputs_and_skewed_clocks_give_identical_plans(seed):
    clock = iter(range(10**9, 0, -1))
    _, plans, _ = random_life(seed)
    _, skewed, _ = random_life(seed, lambda: float(next(clock)))
    assert plans == skewed
