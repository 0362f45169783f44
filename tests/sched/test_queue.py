"""Who goes first: by arrival or by priority, and never too late."""

import pytest

from jaxinfer.sched import Status
from jaxinfer.sched.queue import RequestQueue

from .simulation import World, config


def tokens(count, first=1):
    return tuple(range(first, first + count))


def started(plans):
    return [request.id for plan in plans for request in plan.admitted]


def test_first_come_first_served_ignores_priorities():
    world = World(config(max_num_seqs=1))
    for i, priority in enumerate((3, -1, 0)):
        world.put(str(i), tokens(4, 10 * i), priority=priority)
    assert started(world.run()) == ["0", "1", "2"]
    assert all(r.num_overtaken == 0 for r in world.requests.values())


def test_lower_priority_goes_first_and_equal_ones_by_arrival():
    world = World(config(max_num_seqs=1, policy="priority"))
    for i, priority in enumerate((0, 3, -1, 3, 0, -1)):
        world.put(str(i), tokens(4, 10 * i), priority=priority)
    plans = [world.step()]
    world.put("urgent", tokens(4, 100), priority=-9)
    plans += world.run()
    assert started(plans) == ["2", "urgent", "5", "0", "4", "1", "3"]
    assert [world.requests[name].num_overtaken for name in ("0", "1", "2", "3")] == [3, 4, 0, 3]


def test_prefill_goes_by_priority_too():
    """A long prompt that began first gives the prefill call to a more urgent one."""
    world = World(config(max_model_len=256, prefill_chunk=16, policy="priority"))
    world.put("slow", tokens(100), priority=5)
    world.step()
    fast = world.put("fast", tokens(40, 300), priority=0)
    plans = [world.step() for _ in range(3)]
    assert [c.request for plan in plans for c in plan.prefill] == [fast] * 3
    assert fast.status is Status.DECODE
    world.run()
    world.check_results()


def test_victims_are_taken_from_the_other_end():
    params = dict(max_tokens=30, ignore_eos=True)
    world = World(config(page_size=4, num_pages=14, max_num_seqs=3, policy="priority"))
    world.put("low", tokens(6), priority=2, **params)
    world.put("high", tokens(6, 100), priority=0, **params)
    world.put("middle", tokens(6, 200), priority=1, **params)
    world.run()
    world.check_results()
    assert world.requests["low"].num_preemptions >= world.requests["middle"].num_preemptions
    assert world.requests["low"].num_preemptions >= 1
    assert world.requests["high"].num_preemptions == 0


@pytest.mark.parametrize(("max_overtakes", "num_rows"), [(1, 1), (5, 1), (20, 1), (20, 3)])
def test_nobody_is_overtaken_for_ever(max_overtakes, num_rows):
    """More urgent requests keep coming, faster than they are served."""
    world = World(config(max_num_seqs=num_rows, policy="priority", max_overtakes=max_overtakes))
    low = [world.put(f"low{i}", tokens(4, 10 * i), priority=1) for i in range(2)]
    plans = []
    while any(r.status is not Status.FINISHED for r in low):
        for _ in range(4):
            name = str(len(world.requests))
            world.put(name, tokens(4, 100 * len(world.requests)), max_tokens=2, priority=0)
        plans.append(world.step())
        assert len(plans) < 200
    order = started(plans)
    # Those admitted in one plan are counted together.
    assert max_overtakes <= order.index("low0") < max_overtakes + num_rows
    assert order.index("low1") - order.index("low0") <= num_rows
    assert all(max_overtakes <= r.num_overtaken < max_overtakes + num_rows for r in low)


def test_one_that_was_overtaken_enough_is_no_longer_the_first_to_give_way():
    queue = RequestQueue(config(policy="priority", max_overtakes=2))
    world = World(config(max_num_seqs=1))
    low, high = world.put("low", (1,), priority=9), world.put("high", (2,), priority=0)
    queue.add(low)
    queue.add(high)
    assert [*queue] == [high, low] and (queue.first, queue.last) == (high, low)
    queue.remove(low)
    low.num_overtaken = 2
    queue.add(low)
    assert [*queue] == [low, high]


def test_a_queue_keeps_its_order_whatever_is_added_and_removed():
    queue = RequestQueue(config(policy="priority", max_overtakes=3))
    world = World(config(max_model_len=64))
    requests = [world.put(str(i), (1,), priority=i * 7 % 5) for i in range(30)]
    for request in requests[::-1]:
        queue.add(request)
    queue.check_integrity()
    for request in requests[3::4]:
        queue.remove(request)
    queue.overtake(requests[3::4])
    queue.check_integrity()
    assert len(queue) == 23
    left = [r for r in requests if r not in requests[3::4]]
    assert [r.num_overtaken for r in left] == [
        sum(other.order > r.order for other in requests[3::4]) for r in left
    ]
    starved = [r for r in left if r.num_overtaken >= 3]
    assert [*queue][: len(starved)] == starved
    assert [r.priority for r in [*queue][len(starved) :]] == sorted(
        r.priority for r in left if r not in starved
    )
    with pytest.raises(AssertionError, match="not in its place"):
        queue.remove(requests[3])


def most_chunks_between_tokens(plans, request):
    """The most prefill tokens that the request waited for between two of its decode steps."""
    waits, waited = [], 0
    for plan in plans:
        waited += sum(chunk.length for chunk in plan.prefill)
        if any(r is request for _, r in plan.decode):
            waits.append(waited)
            waited = 0
    return max(waits)


@pytest.mark.parametrize(("token_budget", "most"), [(None, 64), (40, 38), (24, 22), (6, 4)])
def test_rows_that_decode_wait_one_chunk_within_the_budget_at_most(token_budget, most):
    world = World(
        config(
            max_model_len=512,
            prefill_chunk=64,
            max_num_seqs=5,
            token_budget=token_budget,
            max_window=4,
        )
    )
    old = [
        world.put(f"old{i}", tokens(4, 100 * i), max_tokens=300, ignore_eos=True) for i in (1, 2)
    ]
    plans = [world.step() for _ in range(3)]
    for i in range(3):
        world.put(f"new{i}", tokens(90, 1000 * (i + 1)), max_tokens=3)
    plans += world.run()
    world.check_results()
    assert all(most_chunks_between_tokens(plans[2:], r) <= most for r in old)
    budget = token_budget or 64 + 5
    for plan in plans:
        before = len(plan.decode) - len(plan.starts)  # those that start here come on top
        assert sum(chunk.length for chunk in plan.prefill) + before <= budget
        assert plan.num_steps == 1 or not plan.prefill
    assert sum(len(plan.prefill) for plan in plans) >= 3 * 90 / most


def test_a_budget_that_all_rows_use_up_is_refused():
    with pytest.raises(ValueError, match="token_budget=4 must exceed max_num_seqs=4"):
        config(token_budget=4)
    with pytest.raises(ValueError, match="policy='sjf' is unknown. Known: fcfs, priority"):
        config(policy="sjf")
    with pytest.raises(ValueError, match="max_overtakes=0 must be an integer of at least 1"):
        config(max_overtakes=0)
