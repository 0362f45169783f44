"""The whole engine over a mesh gives what one device gives."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxinfer import Engine, EngineConfig, ParallelConfig, SamplingParams, load
from jaxinfer.compute import sharding as sh

from ..conftest import TINY
from .conftest import family, fitting_heads, tiny

# So few pages that requests give way to each other, also where two shards share the work.
CONFIG = EngineConfig(
    max_model_len=64,
    max_num_seqs=2,
    page_size=8,
    num_pages=8,
    prefill_chunk=16,
    max_window=4,
    max_logprobs=3,
)
GAP = 1e-3


def jobs(num_ids=256):
    """Prompts of which some begin alike, with parameters of every kind."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, num_ids, 18).tolist()
    found = []
    for i in range(14):
        prompt = rng.integers(3, num_ids, rng.integers(1, 20)).tolist()
        params = SamplingParams(
            temperature=0.0 if i % 3 == 0 else 0.8,
            top_p=0.9 if i % 3 == 1 else 1.0,
            top_k=20 if i % 4 == 0 else 0,
            presence_penalty=0.5 if i == 5 else 0.0,
            seed=i,
            max_tokens=30 if i == 3 else int(rng.integers(2, 30)),
            logprobs=2,
            prompt_logprobs=1 if i == 4 else None,
            n=2 if i == 6 else 1,
        )
        found.append(((common if i % 2 else []) + prompt, params))
    return found


def serve(engine):
    """The requests of all jobs, one of them cancelled on its way."""
    num_ids = engine.num_valid_ids
    requests = [r for prompt, params in jobs(num_ids) for r in engine.add_samples(prompt, params)]
    while engine.has_work:
        engine.step()
        engine.check_integrity()
        if requests[3].output_ids:
            engine.cancel(requests[3].id)
    return requests


@pytest.fixture(scope="module")
def alone():
    """A function from a family to (engine on one device, what its requests gave)."""

    @functools.cache
    def get(name, num_heads=None):
        engine = Engine(*family(name, num_heads=num_heads), CONFIG)
        return engine, serve(engine)

    return get


def assert_alike(requests, expected):
    """The same tokens up to the first near tie of two logits, and their log-probabilities."""
    for i, (got, want) in enumerate(zip(requests, expected, strict=True)):
        if i == 3:
            assert got.finish_reason == "cancelled"
            both = zip(got.output_ids, want.output_ids)
            assert got.output_ids and all(a == b for a, b in both)
            continue
        for a, b in zip(got.logprobs, want.logprobs):
            top = list(b.top.values())
            if got.params.temperature == 0 and top[0] - top[1] < GAP:
                break
            assert a.token_id == b.token_id, (i, a, b)
            assert abs(a.logprob - b.logprob) <= 1e-4
        else:
            assert (got.output_ids, got.finish_reason) == (want.output_ids, want.finish_reason)
        for a, b in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
            assert abs(a.logprob - b.logprob) <= 1e-4


def test_two_shards_of_requests_over_two_of_the_model(alone):
    """All is compiled ahead, and nothing after; new weights are served at once."""
    before, expected = alone("llama")
    assert before.metrics()["preempted"] > 0
    model, params = tiny("llama", 2, 2)
    engine = Engine(model, params, CONFIG, compile_ahead=True, strict_compile=True)
    requests = serve(engine)
    assert_alike(requests, expected)
    found = engine.metrics()
    assert found["compiles_after_warmup"] == 0
    assert found["cached_tokens"] > 0
    assert found["pages_total"] == found["pages_free"] + found["pages_cached"] == 2 * 8
    assert {request.shard for request in requests} == {0, 1}

    flat = jax.tree.map(np.zeros_like, params["head"])
    with pytest.raises(ValueError, match="Keep shape, dtype and sharding"):
        engine.update_params(params | {"head": flat})
    engine.update_params(params | {"head": jax.device_put(flat, params["head"]["weight"].sharding)})
    (request,) = engine.add_samples([5, 6], SamplingParams(temperature=0.0, max_tokens=3))
    while engine.has_work:
        engine.step()
    assert request.output_ids == [0, 0, 0]
    assert engine.metrics()["compiles_after_warmup"] == 0


@pytest.mark.usefixtures("argmax_only")
def test_params_are_brought_to_the_mesh_once_whatever_mesh_the_caller_has_set():
    """Nothing goes from device to device afterwards, and what was donated is not served."""
    _, params = tiny("llama")
    model, placed = tiny("llama", 2, 2)
    other = jax.make_mesh((4,), ("x",), devices=jax.devices()[4:])
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    outputs = []
    with jax.set_mesh(other):
        engines = [Engine(model, params, CONFIG), Engine(model, placed, CONFIG)]
        for engine in engines:
            (request,) = engine.add_samples([5, 6], greedy)
            with jax.transfer_guard_device_to_device("disallow"):
                while engine.has_work:
                    engine.step()
            outputs.append(request.output_ids)
    assert outputs[0] == outputs[1] and len(outputs[0]) == 3
    own = jax.tree.map(lambda leaf: leaf.copy(), placed)
    engines[1].update_params(own)
    jax.tree.map(lambda leaf: leaf.delete(), own)
    (request,) = engines[1].add_samples([5, 6], greedy)
    with pytest.raises(RuntimeError, match="donated to another program. Give it the new ones"):
        engines[1].step()
    engines[1].update_params(placed)
    while engines[1].has_work:
        engines[1].step()
    assert request.output_ids == outputs[0]

    with pytest.raises(ValueError, match="lie on 4 devices, and the model has no mesh"):
        Engine(tiny("llama")[0], placed, CONFIG)
    permuted = sh.mesh_over(ParallelConfig(data=2, model=2), jax.devices()[3::-1])
    moved = jax.device_put(placed, sh.param_shardings(permuted, placed))
    with pytest.raises(ValueError, match=r"on devices \[3, 2, 1, 0\].* on devices \[0, 1, 2, 3\]"):
        engines[1].update_params(moved)


LAYOUTS = [(1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (4, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_every_layout_and_family(alone, name, data, model):
    num_heads = fitting_heads(name, model)
    engine = Engine(*family(name, data, model, num_heads=num_heads), CONFIG)
    requests = serve(engine)
    before, expected = alone(name, num_heads)
    assert_alike(requests, expected)
    assert {request.shard for request in requests} == set(range(data))
    found = engine.metrics()
    assert found["cached_tokens"] > 0
    assert found["preempted"] > 0
    if data == 1:
        assert found["preempted"] == before.metrics()["preempted"]


def test_batch_invariance_is_refused_over_devices():
    config = EngineConfig(max_model_len=64, page_size=8, batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True holds on one device only"):
        Engine(*tiny("llama", 1, 2), config)


@pytest.mark.slow
def test_smollm2_is_split_by_its_three_kv_heads():
    files = sorted((TINY.parents[2] / "checkpoints" / "smollm2-135m").glob("*.gguf"))
    if not files:
        pytest.skip("needs the checkpoint")
    for wrong in (2, 4, 8):
        with pytest.raises(ValueError, match="does not divide the model's num_heads=9"):
            load(files[0], parallel=ParallelConfig(model=wrong))
    expected = serve(Engine(*load(files[0], dtype="float32"), CONFIG))
    for data in (1, 2):
        parallel = ParallelConfig(data=data, model=3)
        engine = Engine(*load(files[0], dtype="float32", parallel=parallel), CONFIG)
        assert_alike(serve(engine), expected)
        assert engine.metrics()["preempted"] > 0
        assert engine.metrics()["cached_tokens"] > 0
