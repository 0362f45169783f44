"""What the engine counts is what happened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import Engine
from jaxinfer.engine.compiles import CACHE_HIT, CompileCounter
from jaxinfer.engine.metrics import SECONDS, Histogram

from .serving import CONFIG, GREEDY, prompt_of, run

EXACT = GREEDY.replace(max_tokens=6, ignore_eos=True)


def test_a_histogram_counts_each_value_once_under_its_bound():
    values = np.exp(np.random.default_rng(0).normal(-3, 2, 1000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    found = histogram.snapshot()
    assert found["count"] == 1000
    assert found["sum"] == pytest.approx(values.sum())
    for bound in SECONDS:
        assert found["buckets"][bound] == (values <= bound).sum()
    assert found["buckets"][float("inf")] == 1000
    for q in (50, 90, 99):
        exact = np.quantile(values, q / 100, method="inverted_cdf")
        assert found[f"p{q}"] == min(bound for bound in SECONDS if bound >= exact)
    assert Histogram().snapshot()["p50"] is None


def test_tokens_requests_and_pages_are_counted(make_engine):
    engine = make_engine()
    run(engine, [(prompt_of(40), EXACT), (prompt_of(17), EXACT)])
    run(engine, [(prompt_of(40), EXACT)])
    found = engine.metrics()
    assert (found["added"], dict(found["finished"])) == (3, {"length": 3})
    assert found["output_tokens"] == 18
    assert found["prompt_tokens"] == 97
    # The second time all full pages but the last, of which one token must be computed.
    assert found["cached_tokens"] == 32
    assert found["prefill_tokens"] == 97 - 32
    assert (found["num_running"], found["num_waiting"], found["pages_held"]) == (0, 0, 0)
    assert found["pages_cached"] + found["pages_free"] == CONFIG.num_pages == found["pages_total"]
    for name in ("queue_s", "ttft_s", "e2e_s", "tpot_s"):
        assert found[name]["count"] == 3
    assert 0 < found["itl_s"]["count"] <= 15
    assert found["ttft_s"]["sum"] <= found["e2e_s"]["sum"]
    assert found["compiles_after_warmup"] == 0


def test_compilations_of_the_watching_thread_are_counted():
    counter = CompileCounter()
    double = jax.jit(lambda x: x * 2)
    with counter.watching():
        double(jnp.ones(3)).block_until_ready()
        first = counter.count
        double(jnp.ones(3)).block_until_ready()
    assert first >= 1
    assert counter.count == first
    double(jnp.ones(5)).block_until_ready()
    assert counter.count == first, "nobody watched"


def test_programs_that_the_cache_had_are_counted_apart():
    counts, x = [], jnp.ones(3)
    counter, hits = CompileCounter(), CompileCounter(CACHE_HIT)
    for _ in range(2):

        def only_here(x):
            return x * 3.25 - 7

        with counter.watching(), hits.watching():
            jax.jit(only_here)(x).block_until_ready()
        counts.append((counter.count, hits.count))
    assert counts == [(1, 0), (2, 1)]


def test_programs_are_counted(make_engine, programs):
    found = make_engine().metrics()
    assert found["programs"] == programs[1][-1][1]  # all that were compiled ahead, and no more
    assert 0 <= found["cached_programs"] <= found["programs"]
    assert found["compile_s"] == 0.0, "this engine had them from another"


def test_a_compilation_after_warm_up_is_counted_and_strictly_raises(make_engine, monkeypatch):
    engine = make_engine()
    decode = engine._executor.decode

    def decode_and_compile(rows_B, num_steps):
        jax.jit(lambda x: x + num_steps)(jnp.ones(7)).block_until_ready()
        return decode(rows_B, num_steps)

    monkeypatch.setattr(engine._executor, "decode", decode_and_compile)
    run(engine, [(prompt_of(5), EXACT)])
    assert engine.metrics()["compiles_after_warmup"] >= 1
    engine._is_strict = True
    engine.add_request(prompt_of(5), EXACT)
    with pytest.raises(RuntimeError, match="strict_compile=True allows none"):
        while engine.has_work:
            engine.step()


def test_strict_needs_to_be_compiled_ahead(wide):
    with pytest.raises(ValueError, match="Use compile_ahead=True too"):
        Engine(wide.model, wide.params, CONFIG, strict_compile=True)
