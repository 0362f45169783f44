"""Scheduling against a simulated device that stops rows by itself and answers one plan late."""

import random

import pytest

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Status

from .simulation import EOS, World, config


def test_one_request_from_prompt_to_end():
    world = World(config(prefill_chunk=8, max_window=4))
    request = world.add("a", 20, max_tokens=10)
    assert request.status is Status.WAITING
    plan = world.step()
    assert plan.admitted == (request,)
    assert (request.row, request.pages, request.status) == (0, [0], Status.PREFILL)
    assert (plan.num_steps, plan.decode, plan.mapped) == (0, (), ())
    plans = [plan, *world.run()]
    # 20 and 9 tokens: the third chunk needs a second page, of the last token none is kept.
    assert [p.mapped for p in plans] == [(), (), ((0, 1, 1),), (), (), ()]
    chunks = [(c.start, c.length, c.is_last) for p in plans for c in p.prefill]
    assert chunks == [(0, 8, False), (8, 8, False), (16, 4, True)]
    # The last chunk brings the first token; beside it one step, then whole windows of the other 8.
    assert [p.num_steps for p in plans] == [0, 0, 1, 4, 4, 0]
    assert (request.output_ids, request.finish_reason) == ([5] * 10, "length")
    assert (request.row, request.pages, request.status) == (None, [], Status.FINISHED)


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
@pytest.mark.parametrize("max_window", [1, 3, 8])
def test_output_length_is_exact(max_tokens, max_window):
    world = World(config(max_window=max_window))
    request = world.add("a", 7, max_tokens=max_tokens)
    plans = world.run()
    assert len(request.output_ids) == max_tokens
    assert request.finish_reason == "length"
    assert sum(plan.num_steps for plan in plans) == max_tokens - 1


@pytest.mark.parametrize("max_tokens", [1, 5, 20])
def test_eos_exactly_at_the_limit_is_stop(max_tokens):
    world = World(config())
    request = world.add("a", 7, [5] * (max_tokens - 1) + [EOS], max_tokens=max_tokens)
    world.run()
    assert request.output_ids == [5] * (max_tokens - 1) + [EOS]
    assert request.finish_reason == "stop"


def test_stop_sets_differ_from_request_to_request():
    world = World(config(max_num_seqs=4))
    script = [5, 3, EOS, 4]
    a = world.add("a", 3, script, max_tokens=4)
    b = world.add("b", 3, script, max_tokens=4, ignore_eos=True)
    c = world.add("c", 3, script, max_tokens=4, stop_token_ids=[3])
    d = world.add("d", 3, script, max_tokens=4, ignore_eos=True, stop_token_ids=[4])
    world.run()
    assert [r.output_ids for r in (a, b, c, d)] == [script[:3], script, script[:2], script]
    assert [r.finish_reason for r in (a, b, c, d)] == ["stop", "length", "stop", "stop"]


def test_max_model_len_ends_the_output():
    world = World(config(max_model_len=32))
    request = world.add("a", 31, max_tokens=100)
    other = world.add("b", 25, max_tokens=100)
    world.run()
    assert (len(request.output_ids), len(other.output_ids)) == (1, 7)
    assert (request.finish_reason, other.finish_reason) == ("length", "length")


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (0, 4, "empty prompt"),
        (256, 4, "255 and one output"),
        (200, 4, "needs 13 pages of 16 tokens for its 204; the pool has 8"),
        (129, 1, "needs 9 pages"),
        (1, 129, "needs 9 pages"),
    ],
)
def test_what_can_never_run_is_refused_at_once_and_the_next_finishes(
    prompt_len, max_tokens, message
):
    world = World(config(max_model_len=256, num_pages=8))
    params = SamplingParams(max_tokens=max_tokens)
    bad = Request(id="bad", prompt_ids=(9,) * prompt_len, params=params, seed=0)
    with pytest.raises(ValueError, match=message):
        world.scheduler.add(bad)
    assert world.scheduler.is_idle
    good = world.add("good", 100, max_tokens=29)  # all 8 pages: the last token needs no slot
    world.run()
    assert (len(good.output_ids), good.finish_reason) == (29, "length")


def test_an_id_under_way_or_a_request_that_is_over_is_refused():
    world = World(config(max_num_seqs=1))
    first = world.add("a", 3)
    world.add("b", 3)
    world.step()
    for request_id in ("a", "b"):
        with pytest.raises(ValueError, match="added before"):
            world.add(request_id, 3)
    world.run()
    with pytest.raises(ValueError, match="added before"):
        world.scheduler.add(first)
    assert world.scheduler.is_idle


def test_admission_stops_at_the_first_that_does_not_fit():
    world = World(config(num_pages=5))
    a = world.add("a", 30, max_tokens=10)  # 3 pages, as it generates 2 more tokens at once
    b = world.add("b", 30, max_tokens=10)  # 3 pages: not now
    c = world.add("c", 3, max_tokens=3)  # 1 page would fit, but b came first
    assert world.step().admitted == (a,)
    while a.status is not Status.FINISHED:
        assert (b.status, c.status) == (Status.WAITING, Status.WAITING)
        world.step()
    assert world.step().admitted == (b, c)
    world.run()


def test_short_prompts_share_a_call_and_decodes_go_on_beside_it():
    world = World(config(max_model_len=512, max_num_seqs=32, prefill_chunk=512))
    old = world.add("old", 10, max_tokens=100)
    world.step()
    assert world.step().num_steps == 8
    new = [world.add(f"new{i}", 56 + i, max_tokens=4) for i in range(9)]
    plan = world.step()
    assert (plan.shape, plan.num_steps) == ((8, 64), 1)
    assert [c.request for c in plan.prefill] == [new[0], *new[2:]]  # those that fill it best
    assert (plan.decode[0], len(plan.decode)) == ((0, old), 9)
    plan = world.step()
    assert ([c.request for c in plan.prefill], plan.shape) == ([new[1]], (1, 96))
    world.run()


def test_window_is_full_while_waiting_requests_have_no_room():
    world = World(config(max_num_seqs=2, max_window=8, max_model_len=128))
    world.add("a", 4, max_tokens=19)
    world.add("b", 4, max_tokens=60)
    world.add("c", 4, max_tokens=2)
    plans = [world.step() for _ in range(6)]
    # a: 1 by its prefill, then 1, 8, 8 and 1 of 8. The read of that is not held up by a window.
    assert [p.num_steps for p in plans] == [1, 8, 8, 8, 1, 1]
    assert plans[-1].admitted == (world.requests["c"],)
    world.run()


def test_window_is_no_longer_than_any_row_can_use():
    world = World(config(max_window=8))
    world.add("a", 4, max_tokens=4)
    world.add("b", 4, max_tokens=6)
    assert [plan.num_steps for plan in world.run()] == [1, 4, 0]
    assert world.scheduler.counters.idle_row_steps == 2  # of the one that ended first


def test_a_row_is_reused_only_after_its_end_was_read():
    world = World(config(max_num_seqs=1, max_window=8))
    first = world.add("a", 4, [5, EOS], max_tokens=30)
    second = world.add("b", 4, max_tokens=2)
    assert world.step().decode == ((0, first),)  # the device stops the row in this window
    plan = world.step()  # dispatched before that was read
    assert (plan.decode, plan.admitted) == (((0, first),), ())
    assert first.status is Status.FINISHED
    assert world.step().admitted == (second,)
    world.run()
    assert (first.output_ids, second.output_ids) == ([5, EOS], [5, 5])


def test_cancel_in_any_state():
    world = World(config(max_num_seqs=2, prefill_chunk=8, num_pages=8))
    scheduler = world.scheduler
    decoding = world.add("decoding", 4, max_tokens=50)
    world.step()
    world.step()
    prefilling = world.add("prefilling", 40, max_tokens=8)
    waiting = world.add("waiting", 4)
    world.step()
    states = [decoding.status, prefilling.status, waiting.status]
    assert states == [Status.DECODE, Status.PREFILL, Status.WAITING]
    assert scheduler.cancel("waiting") is None
    assert scheduler.cancel("prefilling") == 1
    assert scheduler.cancel("decoding") == 0
    assert scheduler.shards[0].pool.num_available == 8
    for request in (decoding, prefilling, waiting):
        assert (request.status, request.finish_reason) == (Status.FINISHED, "cancelled")
        assert scheduler.cancel(request.id) is None
        assert scheduler.finish(request, "error") is None
        assert request.finish_reason == "cancelled"
    num_read = len(decoding.output_ids)
    assert scheduler.update(decoding, [5]) == "cancelled"  # was under way when it was cancelled
    assert len(decoding.output_ids) == num_read
    assert scheduler.is_idle
    scheduler.check_integrity()


def test_an_error_ends_one_request_alone():
    world = World(config())
    bad, good = world.add("bad", 4), world.add("good", 4)
    world.step()
    world.device.deactivate(world.scheduler.finish(bad, "error"))
    world.run()
    assert (bad.finish_reason, good.finish_reason) == ("error", "length")


def test_tokens_that_nothing_asked_for_are_an_error_of_ours():
    world = World(config())
    request = world.add("a", 4, max_tokens=20)
    scheduler = world.scheduler
    scheduler.schedule()  # a first token and one step
    assert list(request.under_way) == [1, 1]
    scheduler.schedule()  # a window
    with pytest.raises(AssertionError, match=r"\(5, 5\) are more than 1"):
        scheduler.update(request, [5, 5])
    scheduler.update(request, [5])
    with pytest.raises(AssertionError, match="go on after a stop"):
        scheduler.update(request, [EOS, 5])
    with pytest.raises(AssertionError, match="no plan asked for"):
        scheduler.update(request, [5])


def test_every_result_is_counted_even_when_it_brings_nothing():
    world = World(config(max_window=4))
    request = world.add("a", 4, [5, EOS], max_tokens=30)
    scheduler = world.scheduler
    for _ in range(3):
        scheduler.schedule()
    assert list(request.under_way) == [1, 1, 4, 4]
    assert scheduler.update(request, [5]) is None
    assert scheduler.update(request, [EOS]) == "stop"
    assert scheduler.update(request, []) == "stop"
    assert scheduler.counters.idle_row_steps == 4
    assert list(request.under_way) == [4]


def test_times_are_what_the_caller_says():
    world = World(config(max_window=2))
    request = world.add("a", 4, now=1.0, max_tokens=4)
    for now in (2.0, 3.0, 4.0, 5.0):
        world.step(now)
    times = request.times
    assert (times.arrival, times.first_scheduled) == (1.0, 2.0)
    assert (times.first_token, times.last_token) == (3.0, 4.0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_500_requests_leave_every_page_free(page_size):
    rng = random.Random(page_size)
    world = World(config(page_size=page_size, num_pages=160 // page_size, max_num_seqs=6))
    for i in range(500):
        world.add(str(i), rng.randint(1, 63), max_tokens=rng.randint(1, 30))
    world.run()
    pool = world.scheduler.shards[0].pool
    assert sorted([*pool._free, *pool._cached]) == list(range(160 // page_size))
    world.check_results()
    counters = world.scheduler.counters
    assert counters.finished == {"length": 500}
    assert counters.prompt_tokens == sum(len(r.prompt_ids) for r in world.requests.values())
    # All prompts differ; one preempted may also compute its newest token in prefill.
    new = counters.prefill_tokens - counters.recomputed_tokens - counters.prompt_tokens
    assert 0 <= new <= counters.preempted
    assert (counters.preempted > 0, counters.cached_tokens) == (True, 0)


@pytest.mark.parametrize("prefill_chunk", [1, 2, 7, 16, 45, 64, 512])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
@pytest.mark.parametrize("max_model_len", [2, 16, 48, 200])
def test_any_configuration_runs_prompts_of_any_length(prefill_chunk, max_num_seqs, max_model_len):
    page_size = 2 if max_model_len < 16 else 8
    world = World(
        config(
            prefill_chunk=prefill_chunk,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            page_size=page_size,
            token_budget=max_num_seqs + 1 if prefill_chunk == 45 else None,
        )
    )
    longest = max_model_len - 1
    for i, length in enumerate(sorted({1, max(longest // 2, 1), longest})):
        world.add(f"{i}", length, max_tokens=3)
    world.run()
    world.check_results()
    for request in world.requests.values():
        assert world.device.covered[request.id] == len(request.prompt_ids)


def test_counters_of_a_few_requests():
    world = World(config(max_model_len=512, max_num_seqs=4, prefill_chunk=64, max_window=4))
    a = world.add("a", 100, max_tokens=6)
    world.add("b", 3, [5, EOS], max_tokens=9)
    world.add("c", 3)
    world.cancel("c")
    plans = world.run()
    counters = world.scheduler.counters
    assert (counters.added, counters.finished) == (3, {"length": 1, "stop": 1, "cancelled": 1})
    assert (counters.prompt_tokens, counters.prefill_tokens) == (103, 103)
    area = sum(plan.shape[0] * plan.shape[1] for plan in plans if plan.shape)
    assert counters.padded_tokens == area - 103
    steps = sum(plan.num_steps * len(plan.decode) for plan in plans)
    assert counters.idle_row_steps == steps - 5 - 1  # first tokens come without a step
    assert (counters.preempted, counters.recomputed_tokens, counters.cached_tokens) == (0, 0, 0)
    assert a.num_cached == 0
