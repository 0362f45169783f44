"""Samples of one prompt: computed once, its pages shared, everything after it apart.

The device of `simulation` checks on every plan that each row finds its own tokens in its pages.
"""

from collections import Counter

import pytest

from jaxinfer.sched import Status

from .simulation import EOS, World, config, shown

# Outputs that differ from the second token on, so that a page written twice shows.
OUTPUTS = [[7, 10 * i, 10 * i + 1] for i in range(1, 100)]


def statuses(requests):
    return [request.status for request in requests]


def covered(world, requests):
    return [world.device.covered.get(request.id) for request in requests]


def test_a_group_from_prompt_to_end():
    world = World(config(page_size=4, num_pages=40, max_window=4))
    group = world.add_samples("s", 10, OUTPUTS[:3], max_tokens=7)
    plan = world.step()
    # The prompt fills 2 pages and half of a third, in which all go on.
    assert [r.pages for r in group] == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert shown(plan).starts == [(0, "s0"), (0, "s1"), (0, "s2")]
    assert plan.copies == ((2, 3), (2, 4))
    assert plan.admitted == tuple(group)
    assert plan.decode == tuple(enumerate(group))
    assert [(c.request, c.start, c.length) for c in plan.prefill] == [(group[0], 0, 10)]
    assert [r.num_cached for r in group] == [0, 10, 10]
    world.run()
    world.check_results()
    assert world.num_computed == 10
    assert world.scheduler.counters.cached_tokens == 20


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
    assert set(counts.values()) == ({1, 3} if num_full else {1})
    assert len(plan.copies) == (2 if prompt_len % page_size else 0)
    needed = -(-(prompt_len + 1) // page_size)
    assert world.scheduler.shards[0].pool.num_held == num_full + 3 * (needed - num_full)
    world.run()
    world.check_results()
    assert world.num_computed == prompt_len


def test_forks_start_in_the_plan_of_the_last_chunk_and_compute_none():
    world = World(config(prefill_chunk=8, page_size=8))
    group = world.add_samples("s", 20, OUTPUTS[:3], max_tokens=4)
    for num_computed in (0, 8):
        plan = world.step()
        assert (plan.starts, plan.copies, plan.decode) == ((), (), ())
        assert statuses(group) == [Status.PREFILL] * 3
        assert [request.num_computed for request in group[1:]] == [num_computed] * 2
    plan = world.step()
    assert [request for _, request in plan.starts] == [request for _, request in plan.decode]
    assert [request.num_computed for request in group] == [21] * 3
    assert statuses(group) == [Status.DECODE] * 3
    assert len(plan.copies) == 2
    world.run()
    world.check_results()
    assert covered(world, group) == [20, 0, 0]


def test_groups_in_one_call_start_from_their_own_chunks():
    world = World(config(prefill_chunk=512, max_num_seqs=8))
    a = world.add_samples("a", 20, OUTPUTS[:2])
    b = world.add_samples("b", 30, OUTPUTS[:3])
    alone = [world.add(f"alone{i}", 32) for i in range(2)]
    plan = world.step()
    assert [chunk.request for chunk in plan.prefill] == [a[0], b[0], *alone]
    assert shown(plan).starts == [
        (0, "a0"),
        (0, "a1"),
        (1, "b0"),
        (1, "b1"),
        (1, "b2"),
        (2, "alone0"),
        (3, "alone1"),
    ]
    assert plan.copies == (
        (a[0].pages[1], a[1].pages[1]),
        *((b[0].pages[1], r.pages[1]) for r in b[1:]),
    )
    world.run()
    world.check_results()


def test_groups_in_order_compute_each_prompt_once_and_overtake_nobody():
    world = World(config(max_num_seqs=8))
    groups = [world.add_samples(f"g{g}.", 40, OUTPUTS[4 * g : 4 * g + 4]) for g in range(6)]
    plans = world.run()
    world.check_results()
    assert world.num_computed == 6 * 40
    admitted = [request for plan in plans for request in plan.admitted]
    assert admitted == [request for group in groups for request in group]


def test_samples_beyond_the_rows_compute_only_what_no_page_holds():
    world = World(config(max_num_seqs=3, page_size=4))
    group = world.add_samples("s", 6, OUTPUTS[:8], max_tokens=5)
    assert world.step().admitted == tuple(group[:3])
    world.run()
    world.check_results()
    assert covered(world, group) == [6, 0, 0, 2, 0, 0, 2, 0]
    assert [r.num_cached for r in group] == [0, 6, 6, 4, 6, 6, 4, 6]


@pytest.mark.parametrize("num_rows", [1, 2])
def test_few_rows_serve_any_number_of_samples(num_rows):
    world = World(config(max_num_seqs=num_rows))
    world.add_samples("s", 20, OUTPUTS[:9])
    world.run()
    world.check_results()
    assert world.num_computed == 20 + 4 * (9 // num_rows - 1 + 9 % num_rows)


def test_a_small_pool_takes_in_as_many_as_it_holds():
    """2 pages of prompt and 1 of output for each; nobody counts on pages not yet computed."""
    world = World(config(num_pages=5))
    group = world.add_samples("s", 32, OUTPUTS[:4], max_tokens=10)
    assert world.step().admitted == (group[0],)
    assert world.step().admitted == (group[1],)  # with the first page; it computes the second
    assert world.scheduler.shards[0].pool.num_available == 0
    world.run()
    world.check_results()
    assert world.num_computed == 32 + 16 + 16
    assert world.scheduler.counters.preempted == 0


def test_a_leader_that_ends_at_its_first_token_leaves_its_pages_to_the_forks():
    world = World(config(page_size=4))
    outputs = [[EOS], [8, 8, 8, EOS], [9] * 6]
    leader, *forks = world.add_samples("s", 10, outputs, max_tokens=6)
    world.step()
    shared = leader.pages[:2]
    world.step()
    assert leader.status is Status.FINISHED and statuses(forks) == [Status.DECODE] * 2
    assert all(world.scheduler.shards[0].pool.is_held(page) for page in shared)
    late = world.add("late", 40)  # writes to whatever was freed
    world.run()
    world.check_results()
    assert len(late.output_ids) == 16


def test_a_fork_that_ends_at_its_first_token_frees_its_own_pages_alone():
    world = World(config(page_size=4, num_pages=40))
    leader, fork = world.add_samples("s", 10, [[9] * 6, [EOS]], max_tokens=6)
    world.step()
    own, before = fork.pages[2:], world.scheduler.shards[0].pool.num_held
    world.step()
    assert fork.status is Status.FINISHED and leader.status is Status.DECODE
    # The leader has got a page more for its window meanwhile.
    assert world.scheduler.shards[0].pool.num_held == before - len(own) + 1
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
    first = world.add("a", 6, OUTPUTS[0], max_tokens=2)
    world.add("b", 6, OUTPUTS[1], like=first, max_tokens=30)
    world.add("c", 6, OUTPUTS[2], like=first, max_tokens=1)
    world.run()
    world.check_results()
    assert world.num_computed == 6


@pytest.mark.parametrize("num_rows", [4, 2, 1])
def test_a_leader_cancelled_in_its_prompt_hands_over_to_the_next(num_rows):
    """With samples that wait in their rows, with some that have none, with all of them waiting."""
    world = World(config(max_num_seqs=num_rows, prefill_chunk=8, page_size=8))
    group = world.add_samples("s", 20, OUTPUTS[:4])
    world.step()
    assert (group[0].status, group[0].num_computed) == (Status.PREFILL, 8)
    world.cancel("s0")
    world.run()
    world.check_results(cancelled={"s0"})
    # The first page is there; who finds no leader computes the page that the prompt ends in.
    again = {4: [8, 12, 0, 0], 2: [8, 12, 0, 4], 1: [8, 12, 4, 4]}
    assert covered(world, group) == again[num_rows]


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
    assert covered(world, [b, c, *late]) == [0, 0, 21, 0]


def test_forks_cancelled_in_any_state_leave_the_others_alone():
    world = World(config(max_num_seqs=3, prefill_chunk=8, page_size=8))
    group = world.add_samples("s", 20, OUTPUTS[:5])
    world.step()
    world.cancel("s1")  # has its row
    world.cancel("s3")  # waits
    world.step()
    world.step()
    assert group[4].status is Status.DECODE  # in the row that s1 left
    world.cancel("s2")  # generates
    world.run()
    world.check_results(cancelled={"s1", "s2", "s3"})
    assert world.num_computed == 20


def test_a_whole_group_cancelled_one_by_one_computes_nothing_more():
    world = World(config(prefill_chunk=8))
    for request in world.add_samples("s", 20, OUTPUTS[:6]):
        world.step()
        world.cancel(request.id)
    assert world.scheduler.is_idle
    assert world.scheduler.shards[0].pool.num_held == 0


def test_an_error_of_the_leader_is_its_own():
    world = World(config(prefill_chunk=8))
    leader, fork = world.add_samples("s", 20, OUTPUTS[:2])
    world.step()
    world.device.deactivate(world.scheduler.finish(leader, "error"))
    world.run()
    assert (leader.finish_reason, fork.finish_reason) == ("error", "length")


def test_a_sample_that_joins_while_the_prompt_is_computed_forks_too():
    world = World(config(prefill_chunk=8))
    first = world.add("s0", 20, OUTPUTS[0])
    world.step()
    world.add("s1", 20, OUTPUTS[1], like=first)
    world.run()
    world.check_results()
    assert world.num_computed == 20


def test_a_longer_prompt_that_begins_like_a_group_waits_for_its_pages_alone():
    world = World(config(page_size=8, prefill_chunk=16))
    group = [world.put(f"s{i}", range(1, 21), seed=i) for i in range(2)]
    longer = world.put("longer", range(1, 31))
    world.run()
    world.check_results()
    assert covered(world, [*group, longer]) == [20, 0, 14]
    assert [r.num_cached for r in (*group, longer)] == [0, 20, 16]


def test_a_prompt_that_ends_where_a_longer_one_goes_on_does_not_wait_for_it():
    """Its last page is no use to it: it needs the hidden state at its end."""
    world = World(config(prefill_chunk=512))
    longer = world.put("longer", range(1, 21))
    group = [world.put(f"s{i}", range(1, 17), seed=i) for i in range(2)]
    plan = world.step()
    assert [chunk.request for chunk in plan.prefill] == [longer, group[0]]
    assert [request for _, request in plan.starts] == [longer, *group]
    world.run()
    world.check_results()
    assert covered(world, [longer, *group]) == [20, 16, 0]


def test_what_each_sample_goes_on_to_fill_is_shared_with_what_follows_it():
    world = World(config(page_size=4))
    group = [world.put(f"s{i}", range(1, 11), seed=i, max_tokens=12) for i in (3, 4, 6)]
    world.run()
    assert len({tuple(r.output_ids) for r in group}) == 3
    for request in group:
        history = (*request.prompt_ids, *request.output_ids)
        later = world.put(f"after {request.id}", (*history, 7))
        world.run()
        assert later.num_cached == (len(history) - 1) // 4 * 4 > 16
    world.check_results()
