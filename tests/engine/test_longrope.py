"""LongRoPE's factors follow from max_model_len, once: never from the length of a request."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer import Engine, EngineConfig, SamplingParams, load
from jaxinfer.compute import generate, make_sampling_state

from ..conftest import TINY
from .serving import run

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded():
    return load(TINY / "phi3_longrope", dtype="float32")


def plain(model, params, ids, max_position):
    """What the pure generation gives with the factors for `max_position`."""
    config = dataclasses.replace(model.config, max_position=max_position)
    model = dataclasses.replace(model, config=config)
    state = make_sampling_state([GREEDY], [ids], vocab_size=256)
    whole = jax.jit(generate, static_argnums=0, static_argnames=("max_tokens", "page_size"))
    tokens = whole(model, params, np.array([ids]), [len(ids)], state, max_tokens=8, page_size=8)
    return tokens[0].tolist()


def test_the_engine_takes_the_factors_of_its_longest_request(loaded, argmax_only):
    """The model was first trained for 32 tokens."""
    model, params = loaded
    ids = np.random.default_rng(1).integers(3, 256, 20).tolist()
    got = []
    for max_model_len in (32, 64):
        config = EngineConfig(
            max_model_len=max_model_len, max_num_seqs=1, page_size=8, prefill_chunk=16, max_window=2
        )
        (request,) = run(Engine(model, params, config), [(ids, GREEDY)])
        got.append(request.output_ids)
    assert got == [plain(model, params, ids, length) for length in (32, 64)]
    assert got[0] != got[1]
