"""New weights in the same engine: at once, in place; nothing of the old ones is shared."""

import jax
import jax.numpy as jnp
import pytest

from .serving import GREEDY, drain, prompt_of, result, results, run


@pytest.fixture(scope="module")
def other(wide):
    """Params of the same shapes that give other outputs."""
    return jax.tree.map(lambda leaf: leaf * jnp.asarray(1.25, leaf.dtype), wide.params) | {
        "head": {"weight": wide.params["head"]["weight"][::-1]}
    }


def test_what_comes_after_equals_a_fresh_engine_with_the_new_weights(make_engine, wide, other):
    jobs = [(prompt_of(n), GREEDY) for n in (40, 17, 64)]
    engine = make_engine()
    before = results(run(engine, jobs))
    engine.update_params(other)
    requests = run(engine, jobs)
    assert results(requests) == results(run(make_engine(params=other), jobs)) != before
    assert [request.num_cached for request in requests] == [0, 0, 0]
    engine.update_params(wide.params)
    requests = run(engine, jobs)
    assert results(requests) == before
    assert [request.num_cached for request in requests] == [0, 0, 0]


def test_nothing_is_copied_or_compiled(make_engine, other):
    engine = make_engine()
    run(engine, [(prompt_of(20), GREEDY)])
    engine.update_params(other)
    held = jax.tree.leaves(engine._executor._params)
    assert all(a is b for a, b in zip(held, jax.tree.leaves(other), strict=True))
    run(engine, [(prompt_of(20), GREEDY)])
    assert engine.metrics()["compiles_after_warmup"] == 0


def test_requests_under_way_go_on_and_share_with_nobody(make_engine, other):
    engine = make_engine()
    prompt = prompt_of(40)
    request = engine.add_request(prompt, GREEDY.replace(max_tokens=30, ignore_eos=True))
    while len(request.output_ids) < 5:
        engine.step()
    first = list(request.output_ids)
    engine.update_params(other)
    late = engine.add_request(prompt, GREEDY)
    drain(engine)
    assert request.output_ids[: len(first)] == first
    assert (len(request.output_ids), request.finish_reason) == (30, "length")
    assert late.num_cached == 0
    assert result(late) == results(run(make_engine(params=other), [(prompt, GREEDY)]))[0]
    assert engine.scheduler.shards[0].pool.num_held == 0


def test_params_that_do_not_fit_are_refused_and_change_nothing(make_engine, wide):
    engine = make_engine()
    (before,) = run(engine, [(prompt_of(9), GREEDY)])
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), wide.params)
    with pytest.raises(ValueError, match=r"\['embed'\]\['weight'\].*bfloat16.*Keep shape, dtype"):
        engine.update_params(half)
    with pytest.raises(ValueError, match="Keep its structure"):
        engine.update_params({"embed": wide.params["embed"]})
    (after,) = run(engine, [(prompt_of(9), GREEDY)])
    assert result(after) == result(before)
    assert after.num_cached == 8, "the beginning is still shared"
