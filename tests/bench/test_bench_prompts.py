"""Prompts of traced requests: their lengths, and tokens that are equal where hashes are."""

import numpy as np

from jaxinfer.bench.prompts import make_prompts
from jaxinfer.bench.traces import TracedRequest, scale

V = 50_000


def test_prompts_without_hashes_differ_and_are_the_same_in_every_run():
    requests = [TracedRequest(0.0, 40, 1), TracedRequest(0.0, 40, 1), TracedRequest(0.0, 3, 1)]
    prompts = make_prompts(requests, V)
    assert [(p.shape, p.dtype) for p in prompts] == [((n,), np.int32) for n in (40, 40, 3)]
    assert not (prompts[0] == prompts[1]).any()
    for first, again, other in zip(
        prompts, make_prompts(requests, V), make_prompts(requests, V, seed=1)
    ):
        assert (first == again).all()
        assert not (first == other).any()
    assert all(p.min() >= 0 and p.max() < 7 for p in make_prompts(requests, 7))


def test_equal_hashes_give_equal_blocks_whole_or_not_wherever_they_stand():
    requests = [
        TracedRequest(0.0, 20, 1, (5, 6, 7), 8),
        TracedRequest(1.0, 22, 1, (5, 6, 9), 8),
        TracedRequest(2.0, 11, 1, (7, 5), 8),
    ]
    a, b, c = make_prompts(requests, V)
    assert (len(a), len(b), len(c)) == (20, 22, 11)
    assert (a[:16] == b[:16]).all()
    assert not (a[16:20] == b[16:20]).any()
    assert (a[16:20] == c[:4]).all()
    assert (a[:3] == c[8:]).all()
    (alone,) = make_prompts([requests[2]], V)
    assert (alone == c).all(), "a block depends on its hash alone"


def test_divided_requests_share_the_same_part_of_their_prompts():
    requests = [
        TracedRequest(0.0, 1300, 1, (1, 2, 3)),
        TracedRequest(0.0, 1500, 1, (1, 2, 4)),
    ]
    a, b = make_prompts(scale(requests, divide=16), V)
    assert (len(a), len(b)) == (82, 94)
    assert (a[:64] == b[:64]).all()
    assert not (a[64:] == b[64:82]).any()
