"""Logits over a mesh equal those of one device, and devices exchange no more than they must."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxinfer import CacheConfig, ModelConfig, ParallelConfig, load
from jaxinfer.compute import Decoder, init_cache, stack_layers
from jaxinfer.compute import sharding as sh
from jaxinfer.config import RopeConfig
from jaxinfer.models import NAMED_SHAPES
from scripts.bench_sharded import LARGE, make_step

from ..conftest import TINY, TINY_NAMES
from .conftest import family, fitting_heads, random_params, spread

PAGE, WIDTH = 8, 4
LENS = np.array([19, 7, 32, 1, 12, 25, 8, 30], np.int32)
TOKENS = np.random.default_rng(0).integers(3, 200, (8, 32)).astype(np.int32)


def config_of(num_heads=24, num_kv_heads=8, num_layers=3):
    return ModelConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        rope=RopeConfig(dim=8),
    )


def forward(model, params, cache, tokens_BT, table_BM, context_B, query_B):
    cache, x_BTD = model(params, cache, tokens_BT, table_BM, context_B, query_B)
    return cache, model.unembed(params, x_BTD)


def logits(model, params, stacked=False):
    """[B, T, V] of the prompts in two chunks, each row on pages that are numbered in its shard."""
    num_data = 1 if model.mesh is None else model.mesh.shape["data"]
    pages = CacheConfig(num_pages=8 * WIDTH // num_data, page_size=PAGE, dtype="float32")
    cache = init_cache(model.config, pages, stacked=stacked, mesh=model.mesh)
    order = np.random.default_rng(1).permutation(8 * WIDTH // num_data).reshape(-1, WIDTH)
    table_BM = np.tile(order, (num_data, 1)).astype(np.int32)
    step = jax.jit(functools.partial(forward, model), donate_argnums=1)
    first_B = np.minimum(LENS, 16)
    cache, first_BTV = step(params, cache, TOKENS[:, :16], table_BM, first_B, first_B)
    _, rest_BTV = step(params, cache, TOKENS[:, 16:], table_BM, LENS, LENS - first_B)
    found = np.concatenate([first_BTV, rest_BTV], axis=1)
    return np.where(np.arange(32)[:, None] < LENS[:, None, None], found, 0.0)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 8])
def test_any_number_of_kv_heads_is_split_repeated_or_refused(num_kv_heads):
    config = config_of(num_kv_heads=num_kv_heads, num_layers=1)
    params = random_params(config)
    if num_kv_heads == 3:
        with pytest.raises(ValueError, match="model=4 neither divides .* num_kv_heads=3 nor"):
            spread(config, params, model=4)
        return
    model, placed = spread(config, params, model=4)
    assert model.config.num_kv_heads == max(num_kv_heads, 4)
    qkv = placed["layers"][0]["attention"]["qkv"]["weight"]
    assert qkv.addressable_shards[0].data.shape[0] == qkv.shape[0] // 4
    np.testing.assert_allclose(logits(model, placed), logits(Decoder(config), params), atol=1e-4)


@pytest.mark.parametrize(
    ("field", "size"), [("num_heads", 12), ("intermediate_size", 44), ("vocab_size", 97)]
)
def test_a_size_that_cannot_be_split_is_named(field, size):
    config = dataclasses.replace(config_of(num_kv_heads=4), **{field: size})
    with pytest.raises(ValueError, match=f"model=8 does not divide the model's {field}={size}"):
        sh.fit_config(config, 8)


def test_more_devices_than_there_are_is_refused():
    with pytest.raises(ValueError, match="takes 16 devices, and there are 8"):
        sh.make_mesh(ParallelConfig(data=4, model=4))
    with pytest.raises(ValueError, match="parallel='data=2' is no ParallelConfig"):
        load(TINY / "llama", parallel="data=2")


def test_meshes_that_no_decoder_can_use_are_named():
    config = config_of(num_kv_heads=4)
    wrong = [
        (jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,)), "'x': .*needs data and model"),
        (jax.make_mesh((2, 4), sh.AXES, axis_types=(AxisType.Explicit,) * 2), "both AxisType.Auto"),
    ]
    for mesh, words in wrong:
        with pytest.raises(ValueError, match=words):
            Decoder(config, mesh=mesh)
        with pytest.raises(ValueError, match=words):
            load(TINY / "llama", mesh=mesh)


def test_rows_that_shards_cannot_share_out_are_refused():
    model, params = family("llama", 2, 1)
    row = np.ones(7, np.int32)
    with pytest.raises(ValueError, match="The batch has 7 rows, and the mesh has 2 data shards"):
        forward(model, params, None, np.ones((7, 1), np.int32), row[:, None], row, row)


def test_a_map_keeps_each_axis_that_is_named():
    """Also two for one dimension; a map over `data` leaves the other whole."""
    mesh = sh.make_mesh(ParallelConfig(data=2, model=4))
    both = P(("data", "model"))
    total = sh.over_data(lambda x: x.sum(keepdims=True), mesh, (both,), P("data"))
    np.testing.assert_array_equal(jax.jit(total)(np.arange(8.0)), [6, 22])
    each = sh.shard(lambda x: x.sum(keepdims=True), mesh, (both,), both)
    np.testing.assert_array_equal(jax.jit(each)(np.arange(8.0)), np.arange(8))


def test_another_mesh_in_the_context_is_named():
    model, params = family("llama", 2, 2)
    other = jax.make_mesh((4, 2), sh.AXES, axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(other), pytest.raises(ValueError, match="context mesh"):
        logits(model, params)


LAYOUTS = [(1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (2, 2), (4, 2)]
QUICK = [("llama", 4, 2), ("gemma3", 2, 2), ("olmo2", 1, 4)]


@pytest.mark.parametrize(
    ("name", "data", "model"),
    [
        pytest.param(n, d, m, marks=() if (n, d, m) in QUICK else pytest.mark.slow)
        for n in TINY_NAMES
        for d, m in LAYOUTS
    ],
)
def test_families_have_the_logits_of_one_device(name, data, model):
    num_heads = fitting_heads(name, model)
    alone = family(name, num_heads=num_heads)
    together = family(name, data, model, num_heads=num_heads)
    np.testing.assert_allclose(logits(*together), logits(*alone), atol=1e-4)


def test_stacked_layers_too():
    config = config_of()
    params = random_params(config)
    model, placed = spread(config, params, 2, 4)
    stacked = stack_layers(placed)
    stacked = jax.device_put(stacked, sh.param_shardings(model.mesh, stacked))
    found = logits(model, stacked, stacked=True)
    np.testing.assert_allclose(found, logits(Decoder(config), params), atol=1e-4)


LLAMA = dataclasses.replace(NAMED_SHAPES["llama-3-8b"], num_layers=2)


@pytest.mark.parametrize(
    ("config", "data", "model"),
    [
        (config_of(), 2, 4),
        (LLAMA, 1, 8),
        pytest.param(config_of(), 1, 8, marks=pytest.mark.slow),
        pytest.param(LLAMA, 4, 2, marks=pytest.mark.slow),
    ],
)
def test_a_step_sums_twice_a_layer_and_once_for_the_embedding(config, data, model):
    """And exchanges nothing of the cache, which is updated in place, and copies nothing large."""
    step = make_step(config, ParallelConfig(data=data, model=model), jax.devices(), stacked=False)
    program = step.compile()
    exchanges = program.exchanges()
    assert {one.operation for one in exchanges} == {"all-reduce"}
    assert len(exchanges) == 2 * config.num_layers + 1
    assert {one.num_bytes for one in exchanges} == {32 * config.hidden_size * 4}
    assert step.is_in_place(program)
    assert not program.moved(min(LARGE, step.cache_bytes // config.num_layers))


def test_gradients_are_those_of_one_device():
    config = config_of(num_heads=8, num_layers=2)
    params = random_params(config)
    alone = Decoder(config, attention="reference")
    together, placed = spread(config, params, 2, 4)
    together = dataclasses.replace(together, attention="reference")

    def loss(model, params):
        num_pages = 8 * WIDTH // (1 if model.mesh is None else 2)
        pages = CacheConfig(num_pages=num_pages, page_size=PAGE, dtype="float32")
        cache = init_cache(config, pages, mesh=model.mesh)
        table_BM = jnp.arange(8 * WIDTH).reshape(8, WIDTH) % num_pages
        _, logits_BTV = forward(model, params, cache, TOKENS % 96, table_BM, LENS, LENS)
        return jnp.sum(jnp.where(jnp.arange(32)[:, None] < LENS[:, None, None], logits_BTV, 0) ** 2)

    wanted = jax.jit(jax.grad(functools.partial(loss, alone)))(params)
    found = jax.jit(jax.grad(functools.partial(loss, together)))(placed)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted)):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
