"""The ladder of prefill shapes, the choice among them, and how much padding they leave."""

import random
from collections import deque

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Scheduler, pick, prefill_shapes

LADDER = ((1, 512), (1, 384), (1, 192), (1, 96), (1, 32), (2, 32), (4, 32), (8, 64))


@pytest.mark.parametrize(
    ("limits", "shapes"),
    [
        ((512, 32, 2047), LADDER),
        ((512, 3, 2047), (*LADDER[:6], (3, 64), (3, 32))),
        ((512, 1, 2047), (*LADDER[:4], (1, 64), (1, 32))),
        (
            (2048, 32, 8191),
            ((1, 2048), (1, 1536), (1, 768), (1, 384), (1, 128), (2, 128), (4, 128), (8, 256)),
        ),
        ((512, 32, 63), ((1, 63), (1, 32), (2, 32), (4, 32), (8, 63))),
        ((64, 32, 2047), ((1, 64), (1, 48), (1, 24), (2, 16), (4, 16))),
        ((45, 4, 2047), ((1, 45), (1, 33), (1, 16), (2, 16))),
        ((7, 4, 2047), ((1, 7),)),
        ((1, 32, 2047), ((1, 1),)),
        ((512, 4, 1), ((1, 1), (2, 1), (4, 1))),
    ],
)
def test_ladder(limits, shapes):
    assert prefill_shapes(*limits) == shapes


def test_every_ladder_keeps_its_limits():
    for chunk in range(1, 140):
        for rows in (1, 2, 3, 8, 32):
            for longest in (1, 5, 16, 63, 1000):
                shapes = prefill_shapes(chunk, rows, longest)
                assert shapes[0] == (1, min(chunk, longest))
                assert len(set(shapes)) == len(shapes) <= 8
                for shape in shapes:
                    assert 1 <= shape[0] <= rows
                    assert 1 <= shape[1] <= longest
                    assert shape[0] * shape[1] <= chunk


@pytest.mark.parametrize(
    ("lengths", "shape", "taken"),
    [
        ([512], (1, 512), [(0, 512)]),
        ([5000], (1, 512), [(0, 512)]),
        ([513, 3], (1, 512), [(0, 512)]),
        ([385], (1, 384), [(0, 384)]),  # and 1 more in a call that others share
        ([430], (1, 384), [(0, 384)]),
        ([450], (1, 384), [(0, 384)]),
        ([490], (1, 512), [(0, 490)]),
        ([200], (1, 192), [(0, 192)]),
        ([96], (1, 96), [(0, 96)]),
        ([33], (1, 32), [(0, 32)]),
        ([1], (1, 32), [(0, 1)]),
        ([20, 20], (2, 32), [(0, 20), (1, 20)]),
        ([20, 40, 20], (2, 32), [(0, 20), (1, 32)]),
        ([20, 30, 9, 40, 20], (4, 32), [(0, 20), (1, 30), (3, 32), (4, 20)]),
        ([60] * 9, (8, 64), [(i, 60) for i in range(8)]),
        ([60, 3, *[60] * 7], (8, 64), [(i, 60) for i in (0, 2, 3, 4, 5, 6, 7, 8)]),
        ([9, *[64] * 9], (8, 64), [(0, 9), *((i, 64) for i in range(1, 8))]),
    ],
)
def test_pick(lengths, shape, taken):
    assert pick(LADDER, lengths, 512) == (shape, tuple(taken))


@pytest.mark.parametrize(
    ("limit", "shape", "taken"),
    [
        (511, (1, 384), [(0, 384)]),
        (200, (1, 192), [(0, 192)]),
        (95, (2, 32), [(0, 32), (1, 32)]),
        (40, (1, 32), [(0, 32)]),
        (31, (1, 32), [(0, 31)]),  # padded beyond the limit, as no shape is that small
        (1, (1, 32), [(0, 1)]),
    ],
)
def test_a_call_keeps_to_the_limit(limit, shape, taken):
    assert pick(LADDER, [600, 500, 400], limit) == (shape, tuple(taken))


@pytest.mark.parametrize("seed", range(3))
def test_pick_always_advances_the_first_within_all_limits(seed):
    rng = random.Random(seed)
    for _ in range(300):
        shapes = prefill_shapes(rng.randint(1, 600), rng.randint(1, 32), rng.randint(1, 700))
        lengths = [rng.randint(1, rng.choice([8, 70, 900])) for _ in range(rng.randint(1, 20))]
        limit = rng.randint(1, 600)
        (rows, tokens), taken = pick(shapes, lengths, limit)
        assert (rows, tokens) in shapes
        indices = [index for index, _ in taken]
        assert indices[0] == 0
        assert indices == sorted(set(indices))
        assert len(indices) <= rows
        assert all(1 <= count <= min(lengths[i], tokens) for i, count in taken)
        assert sum(count for _, count in taken) <= limit
        if rows * tokens <= limit:
            assert all(count == min(lengths[i], tokens) for i, count in taken)


def conversations(seed, count=64):
    """(prompt, output) lengths like those of a public trace of a chat service, cut to 512 and 128:
    a fifth is cut, a tenth of the prompts is short, the rest is around 200 or 390.
    """
    rng = random.Random(seed)
    return [
        (
            min(
                max(20, round(rng.choice([90, 200, 200, 390, 390, 390, 390, 900, 900]) * scale)),
                512,
            ),
            min(round(rng.lognormvariate(4.5, 0.8)) + 10, 128),
        )
        for scale in (rng.gauss(1, 0.06) for _ in range(count))
    ]


def served(jobs, at_once, **changes):
    """`(counters, shapes)` after a scheduler has served the jobs, so many at once."""
    scheduler = Scheduler(EngineConfig(max_num_seqs=at_once, **changes))
    waiting, under_way, shapes = deque(enumerate(jobs)), deque(), []

    def add():
        number, (num_prompt, max_tokens) = waiting.popleft()
        scheduler.add(
            Request(
                id=str(number),
                prompt_ids=(number,) * num_prompt,
                params=SamplingParams(max_tokens=max_tokens),
                seed=0,
            )
        )

    for _ in range(at_once):
        add()
    while not scheduler.is_idle:
        (plan,) = scheduler.schedule()
        if plan.shape is not None:
            shapes.append(plan.shape)
        steps = [(r, 1) for _, r in plan.starts] + [(r, plan.num_steps) for _, r in plan.decode]
        under_way.append(steps)
        while len(under_way) > (0 if plan.is_empty else 1):
            for request, count in under_way.popleft():
                new_ids = [7] * min(count, request.max_total_len - request.num_known)
                if request.finish_reason is None and scheduler.update(request, new_ids) and waiting:
                    add()
    return scheduler.counters, shapes


@pytest.mark.parametrize("seed", range(4))
def test_little_of_what_is_computed_for_conversations_is_padding(seed):
    jobs = conversations(seed)
    counters, shapes = served(jobs, at_once=16)
    assert counters.prefill_tokens == sum(num_prompt for num_prompt, _ in jobs)
    waste = counters.padded_tokens / (counters.padded_tokens + counters.prefill_tokens)
    assert waste <= 0.09
    assert len(shapes) <= 100  # for 64 prompts
    assert len(set(shapes)) <= 8


def test_many_short_prompts_share_calls():
    jobs = [(10 + 7 * i % 50, 20) for i in range(128)]
    counters, shapes = served(jobs, at_once=32)
    assert counters.finished == {"length": 128}
    assert len(shapes) <= 32


def test_long_prompts_are_hardly_cut():
    jobs = [(1100 + 37 * i, 20) for i in range(20)]
    counters, shapes = served(jobs, at_once=8)
    whole = sum(num_prompt // 512 for num_prompt, _ in jobs)
    assert shapes.count((1, 512)) >= 0.9 * whole
    assert len(shapes) <= whole + 2 * len(jobs)
    assert counters.padded_tokens <= 0.06 * counters.prefill_tokens
