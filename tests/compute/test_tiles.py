"""Rows tile by tile: what is computed of them, and that no program changes their bits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import CacheConfig, SamplingParams, load
from jaxinfer.compute import init_cache, make_sampling_state
from jaxinfer.compute.steps import sample_next
from jaxinfer.compute.tiles import TILE, map_tiles

from ..conftest import TINY

PAGE, WIDTH = 8, 8  # a page table of 64 tokens


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("every", [1, 3, 100])
def test_active_rows_are_computed_in_order(rows, every):
    active_N = np.arange(rows) % every == every // 2

    def compute(carry, values, active):
        assert values.shape == (TILE, 2) and active.shape == (TILE,)
        tiles, seen = carry
        rank = jnp.cumsum(active) - 1 + seen
        return (tiles + 1, seen + jnp.sum(active)), (values * 10, rank)

    values = np.arange(2 * rows).reshape(rows, 2).astype(np.float32)
    outputs = np.full((rows, 2), -1.0, np.float32), np.full(rows, -1)
    run = jax.jit(functools.partial(map_tiles, compute))
    carry, (products, ranks) = run((0, 0), values, outputs, active_N)
    count = int(active_N.sum())
    assert [int(each) for each in carry] == [-(-count // TILE), count]
    np.testing.assert_array_equal(products, np.where(active_N[:, None], values * 10, -1))
    np.testing.assert_array_equal(ranks[active_N], np.arange(count))
    assert (np.asarray(ranks)[~active_N] == -1).all()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gpt_neox", "qwen3")]


@pytest.fixture(scope="module", params=["gemma2", *SLOW])
def family(request):
    """A decoder and its params, in each of two dtypes."""
    return {dtype: load(TINY / request.param, dtype=dtype) for dtype in ("float32", "bfloat16")}


def computed(model, params, ids, chunks, *, rows=1, at=0):
    """`(x_TD, bytes of keys and values)` of `ids` in row `at`, in chunks of those widths."""
    dtype = str(params["embed"]["weight"].dtype)
    cache = init_cache(
        model.config, CacheConfig(num_pages=rows * WIDTH, page_size=PAGE, dtype=dtype)
    )
    table_BM = np.arange(rows * WIDTH, dtype=np.int32).reshape(rows, WIDTH)
    tokens_BT = np.random.default_rng(0).integers(3, 250, (rows, len(ids))).astype(np.int32)
    tokens_BT[at] = ids
    found, start = [], 0
    for width in chunks:
        part_BT = np.zeros((rows, width), np.int32)
        count = min(width, len(ids) - start)
        part_BT[:, :count] = tokens_BT[:, start : start + count]
        # The other rows are shorter.
        lens_B = np.array([count if b == at else (count + 1) // 2 for b in range(rows)], np.int32)
        call = part_BT, table_BM, start + lens_B, lens_B
        cache, x_BTD = jitted(model)(params, cache, *call)
        found.append(np.asarray(x_BTD)[at, :count])
        start += count
    assert start == len(ids)
    pages = [np.asarray(layer)[table_BM[at]] for layer in cache.pages]
    held = np.stack(pages).transpose(0, 1, 3, 2, 4).reshape(len(pages), WIDTH * PAGE, -1)
    return np.concatenate(found), held[:, : len(ids)].tobytes()


# The chunks that a prompt of 45 tokens is computed in, and beside which other rows.
PLACES = [
    ([17] * 3, dict(rows=5, at=4)),
    ([1] * 45, dict(rows=5, at=2)),
    ([64], dict(rows=5, at=4)),
    ([17, 64], {}),
    ([1] * 45, {}),
]


@functools.cache
def jitted(model):
    return jax.jit(model, donate_argnums=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("places", [PLACES[:2], pytest.param(PLACES[2:], marks=pytest.mark.slow)])
def test_no_shape_changes_a_bit(family, dtype, places):
    """Whole, in chunks, token by token, beside others: the same hidden states, keys and values."""
    plain, params = family[dtype]
    model = dataclasses.replace(plain, batch_invariant=True)
    ids = np.random.default_rng(1).integers(3, 250, 45).astype(np.int32)
    x_TD, held = computed(model, params, ids, [45])
    atol = 1e-4 if dtype == "float32" else 0.1
    np.testing.assert_allclose(x_TD, computed(plain, params, ids, [45])[0], atol=atol)
    for chunks, place in places:
        other_x_TD, other_held = computed(model, params, ids, chunks, **place)
        assert other_x_TD.tobytes() == x_TD.tobytes(), (chunks, place)
        assert other_held == held, (chunks, place)


@pytest.mark.parametrize(
    "dtype, width",
    # The dtype ends at the logits, which are float32.
    [
        ("float32", 1),
        pytest.param("float32", 4, marks=pytest.mark.slow),
        pytest.param("bfloat16", 1, marks=pytest.mark.slow),
    ],
)
def test_a_row_samples_the_same_in_any_batch(tiny_llama, dtype, width):
    """In one of 21 rows and in one of `width`."""
    model = dataclasses.replace(tiny_llama.model, batch_invariant=True)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny_llama.params)
    rows = 21
    kinds = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(top_p=0.9, seed=1, logprobs=3),
        SamplingParams(top_k=9, seed=2, logprobs=3, logprobs_mode="processed"),
        SamplingParams(min_p=0.1, temperature=2.0, seed=3, logprobs=3),
    ]
    state = make_sampling_state(
        [kinds[b % 4] for b in range(rows)], [[5, b] for b in range(rows)], vocab_size=256
    )
    x_BD = np.random.default_rng(2).normal(size=(rows, 64)).astype(np.float32)
    positions_B = np.arange(2, 2 + rows, dtype=np.int32)
    active_B = np.arange(rows) % 7 != 3
    sample = jax.jit(
        lambda *batch: sample_next(model, params, *batch, return_logits=True, max_logprobs=3)
    )

    def of(picked):
        batch = jax.tree.map(lambda leaf: leaf[picked], (x_BD, state, active_B, positions_B))
        return jax.device_get(sample(*batch))

    whole = of(slice(None))
    assert (whole.tokens_BW[active_B] >= 0).all() and (whole.tokens_BW[~active_B] == -1).all()
    for b in np.flatnonzero(active_B)[[3, 4, 5, 6, 9, -1]]:
        other = of(slice(b - width + 1, b + 1))
        for got, want in zip(jax.tree.leaves(other), jax.tree.leaves(whole)):
            assert got[-1].tobytes() == want[b].tobytes()
