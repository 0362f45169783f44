"""Pages that are shared, lost or taken away: each request is what it is in an engine of its own."""

from __future__ import annotations

import pytest

from jaxinfer import SamplingParams

from .serving import CONFIG, assert_same_logprobs, note_chunks, prompt_of, result, run

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=5)
DRAWN = GREEDY.replace(temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def assert_as_cold(make_engine):
    """A function that asserts that requests are what they are alone where nothing is shared."""
    quiet = make_engine(host={"prefix_cache": False})

    def check(requests):
        for request in requests:
            (solo,) = run(quiet, [(request.prompt_ids, request.params)])
            assert result(request) == result(solo)
            assert_same_logprobs(request, solo)

    return check


def one_after_the_other(engine, prompts, params):
    return [run(engine, [(prompt, params)])[0] for prompt in prompts]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_an_evicted_page_is_not_found_under_its_old_name(make_engine, assert_as_cold, params):
    """4 pages: those of A give way to B, then A comes again."""
    engine = make_engine(host={"num_pages": 4})
    a, b = prompt_of(20, 1), prompt_of(20, 2)
    requests = one_after_the_other(engine, [a, b, a], params)
    assert_as_cold(requests)
    assert [request.num_cached for request in requests] == [0, 0, 0]
    # Three full pages of each had names; the fourth, in which it ended, had none.
    assert engine.metrics()["evicted_pages"] == 6


def test_a_hash_that_tells_nothing_apart_changes_nothing(make_engine, assert_as_cold):
    engine = make_engine()
    engine.scheduler.shards[0].pool.cache._hash_page = lambda parent_key, token_ids: 0
    ids = prompt_of(24)
    prompts = [ids, ids, ids[:16] + prompt_of(8), ids[:8] * 3, ids[8:16] + ids]
    requests = one_after_the_other(engine, prompts, DRAWN)
    assert_as_cold(requests)
    assert [request.num_cached for request in requests] == [0, 16, 16, 8, 0]


@pytest.mark.parametrize("length", [8, 16, 32])
def test_a_prompt_that_is_cached_whole_computes_its_last_page_again(
    make_engine, assert_as_cold, length
):
    requests = one_after_the_other(make_engine(), [prompt_of(length)] * 2, GREEDY)
    assert_as_cold(requests)
    assert [request.num_cached for request in requests] == [0, length - CONFIG.page_size]


def test_what_is_left_after_a_hit_is_one_chunk(make_engine, assert_as_cold):
    """Chunks of 8 tokens, and 40 of 45 cached."""
    engine = make_engine(host={"max_num_seqs": 4, "token_budget": 8})
    lengths = note_chunks(engine)
    requests = one_after_the_other(engine, [prompt_of(45)] * 2, GREEDY)
    assert_as_cold(requests)
    assert lengths == [8, 8, 8, 8, 8, 5, 5]
    assert [request.num_cached for request in requests] == [0, 40]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_pages", [7, 8, 12])
def test_three_that_preempt_each_other_give_what_a_big_pool_gives(make_engine, num_pages, params):
    params = params.replace(max_tokens=40, prompt_logprobs=2)
    jobs = [(prompt_of(9 + i, i), params) for i in range(3)]
    small, big = make_engine(host={"num_pages": num_pages}), make_engine()
    for request, same in zip(run(small, jobs), run(big, jobs), strict=True):
        assert result(request) == result(same)
        assert (len(request.output_ids), len(request.logprobs)) == (40, 40)
        assert len(request.prompt_logprobs) == len(request.prompt_ids)
        assert_same_logprobs(request, same)
    lost, kept = small.metrics(), big.metrics()
    assert (lost["preempted"] > 0, kept["preempted"]) == (True, 0)
    # What comes back finds its own pages, if any: that is no hit of the cache.
    assert (lost["cached_tokens"], kept["cached_tokens"]) == (0, 0)
    assert lost["prompt_tokens"] == kept["prompt_tokens"] == 30
