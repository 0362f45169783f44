"""A window of W: a query sees W keys, itself included, however its prompt is computed."""

import jax
import numpy as np
import pytest

from jaxinfer.compute import Decoder, stack_layers
from jaxinfer.config import LayerKind, ModelConfig, RopeConfig

from ..logits import PAGE, logits_in_chunks

T, V = 12, 32


def make(implementation, num_layers, *windows):
    """A model whose layers have these windows in turn, and random params."""
    config = ModelConfig(
        vocab_size=V,
        hidden_size=16,
        intermediate_size=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rope=RopeConfig(dim=4),
        pattern=tuple(LayerKind(window=window) for window in windows),
    )
    model = Decoder(config, implementation)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)


def influence(model, params, chunk, stacked):
    """`[query, key]`: the most that another token at the key changes a logit of the query."""
    ids = np.random.default_rng(1).integers(0, V, T)
    logits = [
        logits_in_chunks(model, params, changed, chunk, stacked=stacked)
        for changed in (ids, *((ids + np.eye(T, dtype=int)[key]) % V for key in range(T)))
    ]
    return np.stack([abs(other - logits[0]).max(axis=-1) for other in logits[1:]], axis=1)


@pytest.mark.parametrize("chunk", [T, 3, 1], ids=["prefill", "chunks", "decode"])
@pytest.mark.parametrize(("implementation", "stacked"), [("cpu", False), ("reference", True)])
def test_a_query_sees_as_many_keys_as_the_window_is_long(implementation, stacked, chunk):
    """Exactly, also where the window begins inside a page."""
    W = 4
    assert T > PAGE > W
    model, params = make(implementation, 1, W)
    params = stack_layers(params) if stacked else params
    changed = influence(model, params, chunk, stacked)
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= 0) & (distance < W)
    assert changed[seen].min() > 1e-4
    assert changed[~seen].max() == 0


@pytest.mark.parametrize("stacked", [False, True])
def test_each_layer_has_its_own_window(stacked):
    """Two layers of 3 and 2 reach 3 keys back."""
    model, params = make("cpu", 2, 3, 2)
    params = stack_layers(params) if stacked else params
    changed = influence(model, params, T, stacked)
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= 0) & (distance <= 3)
    assert changed[seen].min() > 1e-6
    assert changed[~seen].max() == 0
