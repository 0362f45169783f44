"""What a plan costs the host: little, and in proportion to the rows."""

import sys
import time

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Scheduler


def crowded(num_rows, num_waiting=0, num_prompt=64, **changes):
    """A scheduler with that many requests in its rows, and a function that reads its last plan."""
    scheduler = Scheduler(EngineConfig(max_num_seqs=num_rows, **changes))
    for i in range(num_rows + num_waiting):
        prompt = tuple(range(100 * i, 100 * i + num_prompt))
        params = SamplingParams(max_tokens=1000)
        scheduler.add(Request(id=str(i), prompt_ids=prompt, params=params, seed=0))

    def read(plan):
        for _, request in plan.starts:
            scheduler.update(request, [7])
        for _, request in plan.decode:
            scheduler.update(request, [7] * plan.num_steps)

    return scheduler, read


def generating(num_rows, **arguments):
    """The same, all of them generating."""
    scheduler, read = crowded(num_rows, **arguments)
    (plan,) = scheduler.schedule()
    while len(plan.decode) < num_rows:
        read(plan)
        (plan,) = scheduler.schedule()
    read(plan)
    return scheduler, read


def num_calls(function):
    """How many functions, of Python or of C, the call makes."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return count, result


@pytest.mark.parametrize("num_waiting", [0, 500])
def test_a_plan_that_decodes_costs_in_proportion_to_the_rows(num_waiting):
    counts = []
    for num_rows in (64, 256):
        scheduler, read = generating(num_rows, num_waiting=num_waiting)
        worst = 0
        for _ in range(8):
            count, (plan,) = num_calls(scheduler.schedule)
            assert len(plan.decode) == num_rows
            worst = max(worst, count)
            read(plan)
        counts.append(worst)
    assert counts[1] <= 4.4 * counts[0]
    assert counts[1] <= 24 * 256


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_plan_that_admits_and_prefills_costs_in_proportion_to_the_rows(policy):
    first, later = [], []
    for num_rows in (64, 256):
        scheduler, read = crowded(num_rows, num_waiting=4 * num_rows, policy=policy)
        count, (plan,) = num_calls(scheduler.schedule)
        assert len(plan.admitted) == num_rows
        first.append(count)
        read(plan)
        count, (plan,) = num_calls(scheduler.schedule)
        assert plan.prefill and not plan.admitted
        later.append(count)
    assert first[1] <= 5 * first[0]  # with the searches in the queues
    assert later[1] <= 4.4 * later[0]
    assert later[1] <= 16 * 256  # of the rows that prefill it looks at 32


@pytest.mark.parametrize("is_prefilling", [False, True])
def test_a_plan_for_256_rows_takes_about_a_millisecond(is_prefilling):
    """A bound that a slow and busy machine keeps too; a fast one needs half a millisecond."""
    scheduler, read = crowded(256, num_prompt=1024) if is_prefilling else generating(256)
    if is_prefilling:
        read(scheduler.schedule()[0])  # that admits
    times = []
    for _ in range(20):
        start = time.thread_time()
        (plan,) = scheduler.schedule()
        times.append(time.thread_time() - start)
        assert (bool(plan.prefill), scheduler.num_running) == (is_prefilling, 256)
        assert is_prefilling or len(plan.decode) == 256
        read(plan)
    assert min(times) < 4e-3
