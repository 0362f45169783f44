"""The decoder against another library's logits: whole, in chunks, token by token, in both layer
loops.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import CacheConfig, ModelConfig
from jaxinfer.compute import Decoder, decoder, init_cache, stack_layers
from jaxinfer.compute.decoder import is_scanned_on, stack_where_scanned
from jaxinfer.config import RopeConfig

from ..logits import PAGE, logits_in_chunks


@pytest.mark.parametrize("chunk", range(1, 41))
def test_every_chunk_size_gives_the_reference_logits(tiny_llama, chunk):
    ids = tiny_llama.refs["prompt_ids"]
    got = logits_in_chunks(tiny_llama.model, tiny_llama.params, ids, chunk, width=40)
    np.testing.assert_allclose(got, tiny_llama.refs["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("width", [1, 7])
def test_calls_as_narrow_as_their_chunks(tiny_llama, width):
    """Token by token as in decode, and an odd width: other programs, the same logits."""
    ids = tiny_llama.refs["prompt_ids"]
    got = logits_in_chunks(tiny_llama.model, tiny_llama.params, ids, width)
    np.testing.assert_allclose(got, tiny_llama.refs["logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 8, 16, 44, 45, 64])
def test_chunks_equal_a_single_pass(tiny_llama, chunk):
    ids = tiny_llama.refs["long_prompt_ids"][:45]
    whole = logits_in_chunks(tiny_llama.model, tiny_llama.params, ids, 45, width=64)
    got = logits_in_chunks(tiny_llama.model, tiny_llama.params, ids, chunk, width=64)
    np.testing.assert_allclose(got[-1], whole[-1], atol=1e-5, rtol=0)


def test_long_prompt(tiny_llama):
    ids = tiny_llama.refs["long_prompt_ids"]
    got = logits_in_chunks(tiny_llama.model, tiny_llama.params, ids, 64)
    np.testing.assert_allclose(got[-1], tiny_llama.refs["long_final_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "implementation",
    ["reference", "cpu", pytest.param("mosaic_tpu_interpreted", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("chunk", [1, 16])
def test_scanned_layers_equal_unrolled_ones(tiny_llama, implementation, chunk):
    model = Decoder(tiny_llama.model.config, implementation)
    ids = tiny_llama.refs["prompt_ids"]
    unrolled = logits_in_chunks(model, tiny_llama.params, ids, chunk)
    scanned = logits_in_chunks(model, stack_layers(tiny_llama.params), ids, chunk, stacked=True)
    np.testing.assert_allclose(scanned, unrolled, atol=2e-5, rtol=0)


def test_stacking_may_free_what_it_stacks(tiny_llama):
    params = jax.tree.map(jnp.copy, tiny_llama.params)
    stacked = stack_layers(params, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params["layers"]))
    jax.tree.map(np.testing.assert_array_equal, stacked, stack_layers(tiny_llama.params))


@pytest.mark.parametrize(
    ("kind", "scans"),
    [("TPU v5 lite", True), ("TPU v6 lite", True), ("TPU7x", False), ("NVIDIA H100", False)],
)
def test_layers_are_scanned_where_that_costs_nothing(kind, scans):
    platform = "tpu" if kind.startswith("TPU") else "gpu"
    assert is_scanned_on(SimpleNamespace(platform=platform, device_kind=kind)) == scans
    assert not is_scanned_on(jax.devices("cpu")[0])


def test_params_to_be_served_are_stacked_where_layers_are_scanned(tiny_llama, monkeypatch):
    params = jax.tree.map(jnp.copy, tiny_llama.params)
    assert stack_where_scanned(params) is params
    monkeypatch.setattr(decoder, "is_scanned_on", lambda device: device == jax.devices()[0])
    stacked = stack_where_scanned(params)
    jax.tree.map(np.testing.assert_array_equal, stacked, stack_layers(tiny_llama.params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params["layers"]))


def test_rows_of_any_length_share_a_call(tiny_llama):
    """Five prompts of different length in one prefill: each row's logits are those it has alone."""
    ids, want = tiny_llama.refs["prompt_ids"], tiny_llama.refs["logits"]
    lens = (1, 7, 16, 33, 40)
    cache = init_cache(
        tiny_llama.model.config, CacheConfig(num_pages=25, page_size=PAGE, dtype="float32")
    )
    table = jnp.arange(25, dtype=jnp.int32).reshape(5, 5)
    tokens = np.tile(ids, (5, 1)).astype(np.int32)
    lens_B = jnp.asarray(lens, jnp.int32)
    _, x_BTD = jax.jit(tiny_llama.model)(tiny_llama.params, cache, tokens, table, lens_B, lens_B)
    logits = np.asarray(tiny_llama.model.unembed(tiny_llama.params, x_BTD))
    for b, length in enumerate(lens):
        np.testing.assert_allclose(logits[b, :length], want[:length], atol=1e-4, rtol=0)


def make_config(**changes) -> ModelConfig:
    sizes = dict(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        max_position=64,
        rope={"dim": 4},
    )
    merged = sizes | changes
    return ModelConfig(**{**merged, "rope": RopeConfig(**merged["rope"])})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_a_plain_numpy_decoder(tied, bias):
    """One layer written out in float64: norms, fused projections, grouped heads, gated MLP, biases,
    head.
    """
    config = make_config(tie_embeddings=tied, qkv_bias=bias, out_bias=bias, mlp_bias=bias)
    model = Decoder(config)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32),
        jax.eval_shape(model.init, jax.random.key(0)),
    )
    ids = np.array([3, 1, 4, 1, 5, 9, 2, 6])
    got = logits_in_chunks(model, params, ids, 8)
    np.testing.assert_allclose(got, plain_logits(config, params, ids), atol=1e-4, rtol=0)


def plain_logits(config, params, ids):
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    K, G, H = config.num_kv_heads, config.group_size, config.head_dim

    def norm(x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * w["weight"]

    def rotate(x):
        freq = config.rope.theta ** (-np.arange(H // 2) / (H // 2))
        turn = np.exp(1j * np.arange(len(ids))[:, None] * freq)
        z = (x[:, : H // 2] + 1j * x[:, H // 2 :]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    def linear(x, w, name):
        w = w[name]
        return np.tensordot(x, w["weight"], (-1, -1)) + w.get("bias", 0.0)

    x = p["embed"]["weight"][ids]
    layer = p["layers"][0]
    qkv = linear(norm(x, layer["attention_norm"]), layer["attention"], "qkv")
    heads = []
    for n in range(K * G):
        k, g = divmod(n, G)
        scores = rotate(qkv[:, k, g]) @ rotate(qkv[:, k, G]).T / np.sqrt(H)
        scores[np.triu_indices(len(ids), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ qkv[:, k, G + 1])
    out = layer["attention"]["out"]
    x = x + np.concatenate(heads, axis=1) @ out["weight"].T + out.get("bias", 0.0)
    gate_up = linear(norm(x, layer["mlp_norm"]), layer["mlp"], "gate_up")
    gate, up = gate_up[:, 0], gate_up[:, 1]
    x = x + linear(gate / (1 + np.exp(-gate)) * up, layer["mlp"], "down")
    return norm(x, p["norm"]) @ p["embed" if config.tie_embeddings else "head"]["weight"].T


def test_configs_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        make_config(num_kv_heads=3)
    with pytest.raises(ValueError, match="num_layers=0 must be at least 1"):
        make_config(num_layers=0)
    with pytest.raises(ValueError, match=r"dim=8 exceeds ModelConfig.head_dim=4"):
        make_config(rope={"dim": 8})
