"""Whole generations in one pure function: with a cache, without one, on every attention backend."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.compute import Decoder, generate, make_sampling_state, stack_layers

V, EOS, T = 256, 2, 40
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
LENGTHS = (40, 1, 17)


@pytest.fixture
def make_whole(tiny_llama, argmax_only):
    """A function that jits a generation; the jitted one maps sampling parameters to `[B, W]`."""
    prompt_ids = tiny_llama.refs["prompt_ids"]
    prompts = [prompt_ids[:length].tolist() for length in LENGTHS]
    tokens_BT = np.zeros((len(LENGTHS), T), np.int32)
    for row, prompt in zip(tokens_BT, prompts):
        row[: len(prompt)] = prompt
    lens_B = np.array(LENGTHS, np.int32)

    def make(model, params, **keywords):
        whole = jax.jit(functools.partial(generate, model, **keywords))

        def outputs(rows):
            sampling = make_sampling_state(rows, prompts, vocab_size=V, eos_ids=[EOS])
            return np.asarray(whole(params, tokens_BT, lens_B, sampling))

        return outputs

    return make


CASES = [
    (name, use_cache, False) for name in ("reference", "cpu", None) for use_cache in (True, False)
]
INTERPRETED = pytest.param("mosaic_tpu_interpreted", True, True, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def first_ids():
    """What the first case gave all rows, for the others to equal."""
    return {}


@pytest.mark.parametrize(
    "implementation, use_cache, stacked",
    [*CASES, (None, True, True), (None, False, True), INTERPRETED],
)
def test_greedy_ids_are_the_reference_ones(
    tiny_llama, make_whole, first_ids, implementation, use_cache, stacked
):
    """16 tokens through the cache are those of 16 full passes, whatever computes the attention."""
    model, params = Decoder(tiny_llama.model.config, implementation), tiny_llama.params
    params = stack_layers(params) if stacked else params
    outputs = make_whole(model, params, max_tokens=16, use_cache=use_cache, page_size=8)
    wanted = tiny_llama.refs["greedy_ids"].tolist()
    got = outputs([GREEDY] * 3)
    assert got[0].tolist() == wanted
    assert got.min() >= 0
    assert got.tolist() == first_ids.setdefault("ids", got.tolist())

    stopping = outputs([GREEDY.replace(stop_token_ids=[wanted[3]]), GREEDY, GREEDY])
    assert stopping[0].tolist() == wanted[:4] + [-1] * 12
    assert stopping[1:].tolist() == got[1:].tolist(), "the stop of one row stopped another"


def test_a_single_token(tiny_llama, make_whole):
    outputs = make_whole(tiny_llama.model, tiny_llama.params, max_tokens=1)
    got = outputs([GREEDY] * 3)
    assert got.shape == (3, 1)
    assert got[0, 0] == tiny_llama.refs["greedy_ids"][0]
