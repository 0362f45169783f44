"""Log-probabilities of prompt tokens from hidden states, against plain float64 sums."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.compute import Decoder, make_sampling_state
from jaxinfer.compute.cutoff import TOP_P_SLACK
from jaxinfer.compute.scoring import score_prompt
from jaxinfer.sampling_params import SamplingParams

from . import sampling_oracle as oracle
from .test_logprobs import log_softmax, ranked

V, N, S, C = 256, 40, 48, 5
PROMPT = np.random.default_rng(0).integers(3, 40, 45).tolist()  # with many repetitions


@pytest.fixture(scope="module")
def hidden(tiny_llama):
    """(x_ND, their logits [N, V]) of random states."""
    x_ND = 2 * jax.random.normal(jax.random.key(1), (N, tiny_llama.model.config.hidden_size))
    return x_ND, np.asarray(tiny_llama.model.unembed(tiny_llama.params, x_ND))


@pytest.fixture(scope="module")
def score(tiny_llama, hidden):
    """A function from parameters and a chunk to numpy's `Logprobs` [N], compiled once."""
    step = jax.jit(functools.partial(score_prompt, tiny_llama.model, max_logprobs=C))
    tokens_S = np.full(S, -1, np.int32)
    tokens_S[: len(PROMPT)] = PROMPT

    def call(params, *, index, start, length, outputs=()):
        state = make_sampling_state(
            [params], [PROMPT], vocab_size=V, num_valid_ids=250, eos_ids=[2], outputs=[outputs]
        )
        where = jax.tree.map(np.int32, dict(index=index, start=start, length=length))
        return jax.device_get(step(tiny_llama.params, state, hidden[0], tokens_S, **where))

    return call


CHUNKS = [
    dict(index=0, start=0, length=40),
    dict(index=0, start=0, length=1),
    dict(index=3, start=10, length=17),
    dict(index=20, start=24, length=20),
    dict(index=39, start=5, length=1),
    dict(index=8, start=28, length=16),
]


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda c: "-".join(map(str, c.values())))
def test_raw_is_the_log_softmax_at_the_token_that_follows(score, hidden, chunk):
    """Of valid ids: 250 of 256 columns. The parameters of the request do not matter."""
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={7: 9.0}, bad_words=[[8]])
    found = score(params, **chunk)
    want = log_softmax(hidden[1][:, :250])
    for step in range(chunk["length"]):
        at, token = chunk["index"] + step, PROMPT[chunk["start"] + step + 1]
        np.testing.assert_allclose(found.chosen[at], want[at, token], atol=1e-5)
        assert found.top_ids[at].tolist() == ranked(want[at])[:C]
        np.testing.assert_allclose(found.top[at], want[at, found.top_ids[at]], atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9},
        {"min_p": 0.02, "logit_bias": {3: 2.0}, "stop_token_ids": [9, 5], "min_tokens": 2},
        {"repetition_penalty": 1.6, "presence_penalty": 2.0, "frequency_penalty": 1.0},
        {"bad_words": [[6], [7, 8]], "allowed_token_ids": range(2, 30)},
    ],
    ids="+".join,
)
def test_processed_is_what_the_sampler_would_have_drawn_from(score, hidden, fields):
    """As if the prompt ended before the token, whatever the request has produced by now."""
    params = SamplingParams(seed=0, logprobs_mode="processed", **fields)
    index, start, length = 2, 7, 33
    found = score(params, index=index, start=start, length=length, outputs=[6, 7, 5])
    for at in range(index, index + length):
        position = start + at - index + 1
        before = PROMPT[:position]
        processed = oracle.process(hidden[1][at, :250], params, before, [], eos_ids=[2])
        probs = oracle.distribution(processed, params, slack=float(TOP_P_SLACK))
        np.testing.assert_allclose(np.exp(found.chosen[at]), probs[PROMPT[position]], atol=1e-5)
        np.testing.assert_allclose(np.exp(found.top[at]), np.sort(probs)[::-1][:C], atol=1e-5)
        assert (found.chosen[at] == -np.inf) == (probs[PROMPT[position]] == 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_logits_of_a_chunk_never_exist(tiny_llama, dtype):
    """512 states of a vocabulary of 50000: their logits would be 102 MB."""
    config = dataclasses.replace(tiny_llama.model.config, vocab_size=50000)
    model = Decoder(config)
    params = jax.eval_shape(functools.partial(model.init, dtype=dtype), jax.random.key(0))
    state = make_sampling_state([SamplingParams()], [[1]], vocab_size=50000)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    step = jax.jit(functools.partial(score_prompt, model, max_logprobs=20))
    x_ND = jax.ShapeDtypeStruct((512, config.hidden_size), jnp.float32)
    tokens_S = jax.ShapeDtypeStruct((2048,), jnp.int32)
    where = dict(index=scalar, start=scalar, length=scalar)
    compiled = step.lower(params, state, x_ND, tokens_S, **where).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * 50000 * 4 / 4
