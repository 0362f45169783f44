"""The same draw for any number of shards, without any of them seeing all logits."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.bench.compiled import read_program
from jaxinfer.compute import make_sampling_state
from jaxinfer.compute.logprobs import token_logprobs
from jaxinfer.compute.sampling import advance, draw
from jaxinfer.compute.sharding import sampling_spec, shardings, spec

from .conftest import mesh_of

V, NUM_IDS = 2048, 2040
ROWS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=[3, 2000]),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=3.0, top_p=0.95),
    SamplingParams(temperature=2.0, top_k=300, top_p=0.9),
    SamplingParams(temperature=1.5, min_p=0.05),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=1.0, logit_bias={7: 9.0, 1500: 8.5}, frequency_penalty=0.2),
    SamplingParams(temperature=1.0, allowed_token_ids=[5, 31, 32, 255, 256, 1023, 2039]),
    SamplingParams(temperature=0.0, bad_words=[[9], [1, 700]]),
    SamplingParams(temperature=1.0, top_p=0.5, logprobs_mode="processed"),
]


@pytest.fixture(scope="module")
def batch():
    """Logits with many ties, the largest in every shard, and rows that ask for everything."""
    rng = np.random.default_rng(3)
    logits_BV = np.round(rng.normal(0, 2, (len(ROWS), V)) * 2).astype(np.float32) / 2
    rows = [row.replace(seed=i, logprobs=5) for i, row in enumerate(ROWS)]
    sampling = make_sampling_state(
        rows,
        [[5, 9, 1500]] * len(rows),
        vocab_size=V,
        num_valid_ids=NUM_IDS,
        eos_ids=[2],
        outputs=[[8, 1]] * len(rows),
    )
    return logits_BV, sampling


def step(logits_BV, sampling, positions_B, *, mesh):
    tokens_B, drawn_from = draw(logits_BV, sampling, positions_B, mesh=mesh)
    found = token_logprobs(logits_BV, tokens_B, drawn_from, sampling, max_logprobs=5, mesh=mesh)
    counts_BV = advance(sampling, tokens_B, tokens_B >= 0, mesh=mesh).counts_BV
    return tokens_B, found, counts_BV


@pytest.fixture(scope="module")
def alone(batch):
    """What one device draws at 8 positions."""
    one = jax.jit(functools.partial(step, mesh=None))
    return [one(*batch, np.full(len(ROWS), at, np.int32)) for at in range(8)]


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (1, 8),
        *(pytest.param(*layout, marks=pytest.mark.slow) for layout in ((1, 2), (1, 4), (4, 2))),
    ],
)
def test_any_number_of_shards_draws_the_same(batch, alone, data, model):
    mesh = mesh_of(data, model)
    logits_BV, sampling = batch
    rows, columns = spec("rows"), spec("rows", "vocab")
    program = jax.jit(
        functools.partial(step, mesh=mesh),
        in_shardings=shardings(mesh, (columns, sampling_spec(sampling), rows)),
        out_shardings=shardings(mesh, (rows, rows, columns)),
    )
    at_0 = np.zeros(len(ROWS), np.int32)
    compiled = program.lower(logits_BV, sampling, at_0).compile()
    for at, (tokens_B, found, counts_BV) in enumerate(alone):
        got_B, got, got_BV = compiled(logits_BV, sampling, np.full_like(at_0, at))
        np.testing.assert_array_equal(got_B, tokens_B)
        np.testing.assert_array_equal(got_BV, counts_BV)
        np.testing.assert_array_equal(got.top_ids, found.top_ids)
        np.testing.assert_allclose(got.top, found.top, rtol=1e-5)
        np.testing.assert_allclose(got.chosen, found.chosen, rtol=1e-5)
    exchanges = read_program(compiled).exchanges()
    gathered = [one.num_bytes for one in exchanges if one.operation != "all-reduce"]
    num_rows = len(ROWS) // data
    # Of each shard the value and the id of 128 candidates.
    assert gathered
    assert max(gathered) <= 2 * 4 * num_rows * 128 * model
    summed = [one for one in exchanges if one.operation == "all-reduce"]
    assert all(math.prod(shape) <= num_rows for one in summed for _, shape in one.arrays)


def test_the_draws_are_of_every_kind(alone):
    tokens = np.array([tokens_B for tokens_B, *_ in alone])
    assert len(set(tokens[:, 0])) == 1, "greedy"
    assert all(len(set(tokens[:, row])) > 3 for row in (2, 4, 5, 6)), "drawn anew at each position"
    assert set(tokens[:, 9]) <= {5, 31, 32, 255, 256, 1023, 2039}
    assert tokens.max() < NUM_IDS
