"""Models of which every layer sees a window: pages behind it go back while a request runs."""

import pytest

from jaxinfer.sched import Status

from .simulation import World, config


def tokens(count, first=1):
    return tuple(range(first, first + count))


def held(request):
    return [page for page in request.pages if page is not None]


def test_pages_behind_the_window_go_back_and_leave_a_gap():
    world = World(config(page_size=4, max_window=1, prefill_chunk=8), window=6)
    request = world.put("a", tokens(20), max_tokens=20, ignore_eos=True)
    before = [0]
    while request.status is not Status.FINISHED:
        world.step()
        if request.status is Status.FINISHED:
            break
        # A query at position n sees n - 5 on; the plan began with `before` tokens computed.
        seen = max(before[-1] - 5, 0) // 4
        assert request.pages[:seen] == [None] * seen
        assert None not in request.pages[seen:]
        before.append(request.num_computed)
    assert before[:4] == [0, 8, 16, 21]
    world.run()
    world.check_results()


@pytest.mark.parametrize("window", [1, 3, 4, 5, 8, 17, 100])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_rows_find_all_that_their_window_covers(page_size, window):
    """The device reads back as far as the window, as late as it may, and no page is missing."""
    world = World(config(page_size=page_size, prefill_chunk=7, max_window=5), window=window)
    for i in range(6):
        world.put(str(i), tokens(11 + 7 * i, 100 * i), max_tokens=17, ignore_eos=True)
    world.run()
    world.check_results()


def test_a_prompt_longer_than_the_pool_runs_through_it():
    fields = dict(max_model_len=512, page_size=8, num_pages=8, prefill_chunk=16, max_window=4)
    world = World(config(**fields), window=20)
    request = world.put("a", tokens(400), max_tokens=60, ignore_eos=True)
    most = 0
    while not world.scheduler.is_idle:
        world.step()
        most = max(most, len(held(request)))
    world.check_results()
    assert most <= 6  # 20 - 1 + 17 tokens at any place
    with pytest.raises(ValueError, match="needs 50 pages of 8 tokens for its 401; the pool has 8"):
        World(config(**fields)).put("a", tokens(400), max_tokens=1)
    with pytest.raises(ValueError, match="needs 6 pages of 8 tokens for its 401; the pool has 5"):
        World(config(**(fields | {"num_pages": 5})), window=20).put("a", tokens(400), max_tokens=1)


def test_the_smallest_pool_that_takes_a_request_also_finishes_it():
    for window in (1, 7, 8, 9, 20):
        for prefill_chunk in (1, 5, 16):
            fields = dict(page_size=8, prefill_chunk=prefill_chunk, max_model_len=128, max_window=3)
            for num_pages in range(1, 9):
                world = World(config(num_pages=num_pages, **fields), window=window)
                try:
                    world.put("a", tokens(90), max_tokens=30, ignore_eos=True)
                except ValueError:
                    continue
                world.put("b", tokens(90), max_tokens=30, ignore_eos=True)  # finds what is cached
                world.run()
                world.check_results()
                break
            else:
                raise AssertionError("no pool is large enough")


def test_a_hit_holds_only_the_pages_that_are_seen():
    world = World(config(page_size=4, num_pages=16, prefill_chunk=64), window=6)
    first = world.put("a", tokens(40), max_tokens=2)
    world.run()
    second = world.put("b", (*tokens(40), 99), max_tokens=2)
    plan = world.step()
    assert plan.admitted == (second,)
    assert second.num_cached == 40
    assert second.pages[:8] == [None] * 8
    assert len(held(second)) == 3  # positions 35 to 39, and its own
    world.run()
    world.check_results()
    assert first.num_cached == 0


def test_three_preempt_each_other_within_their_windows():
    def run(num_pages):
        fields = dict(page_size=4, max_num_seqs=3, max_window=3, prefill_chunk=8)
        world = World(config(num_pages=num_pages, **fields), window=9)
        for i in range(3):
            world.put(str(i), tokens(9 + i, 100 * i), max_tokens=40, ignore_eos=True)
        world.run()
        world.check_results()
        return world.scheduler.counters.preempted, [r.output_ids for r in world.requests.values()]

    (some, small), (none, big) = run(10), run(60)
    assert some > 0 == none
    assert small == big
