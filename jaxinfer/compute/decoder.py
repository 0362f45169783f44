"""The decoder as pure functions of params: embedding, a loop over layers, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxinfer.compute.attention import Attention
from jaxinfer.compute.layers import ACTIVATIONS, GatedMLP, RMSNorm, matmul
from jaxinfer.compute.rope import rope_phases
from jaxinfer.compute.types import KVCache
from jaxinfer.config import ModelConfig, require
from pallas_kernels.paged_attention import IMPLEMENTATIONS

Params = Any  # nested dicts of arrays; `layers` a tuple of them, or one of stacked arrays


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention, then the gated MLP, each added to the residual stream."""

    config: ModelConfig
    implementation: str | None = None

    @nn.compact
    def __call__(self, x_BTD: Array, phases, pages: Array, *where: Array) -> tuple[Array, Array]:
        """`(x_BTD, pages)`; `where` is what `Attention` takes after the pages."""
        c = self.config
        with jax.named_scope("attention"):
            normed = RMSNorm(c.hidden_size, c.norm_eps, name="attention_norm")(x_BTD)
            attention = Attention(c, self.implementation, name="attention")
            out, pages = attention(normed, phases, pages, *where)
            x_BTD = x_BTD + out
        with jax.named_scope("mlp"):
            normed = RMSNorm(c.hidden_size, c.norm_eps, name="mlp_norm")(x_BTD)
            mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.activation, c.mlp_bias, name="mlp")
            return x_BTD + mlp(normed), pages


@dataclass(frozen=True)
class Decoder:
    """A model without its weights: hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        config: the model.
        attention: the backend of `pallas_kernels.paged_attention`; None lets the platform choose.
    """

    config: ModelConfig
    attention: str | None = None

    def __post_init__(self):
        require(
            self.attention is None or self.attention in IMPLEMENTATIONS,
            f"attention={self.attention!r} is unknown. "
            f"Choose one of {', '.join(IMPLEMENTATIONS)}, or None.",
        )
        activation = self.config.activation
        require(
            activation in ACTIVATIONS,
            f"ModelConfig.activation={activation!r} is unknown. Known: {', '.join(ACTIVATIONS)}.",
        )

    def init(self, key: Array, dtype: str = "float32") -> Params:
        """Random params: `{"embed", "layers": (one dict a layer), "norm", "head" unless tied}`."""
        c = self.config
        embed_key, head_key, *layer_keys = jax.random.split(key, c.num_layers + 2)
        shape = (c.vocab_size, c.hidden_size)

        def table(key: Array) -> Params:
            return {"weight": jax.random.normal(key, shape, jnp.float32) * c.hidden_size**-0.5}

        params = {
            "embed": table(embed_key),
            "layers": tuple(self._init_layer(key) for key in layer_keys),
            "norm": {"weight": jnp.ones(c.hidden_size)},
        }
        if not c.tie_embeddings:
            params["head"] = table(head_key)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def _init_layer(self, key: Array) -> Params:
        c = self.config
        pages = jnp.zeros((1, c.num_kv_heads, 1, 2 * c.head_dim))
        one = jnp.ones(1, jnp.int32)
        phases = rope_phases(c.rope, c.max_position, jnp.zeros((1, 1), jnp.int32))
        x_BTD = jnp.zeros((1, 1, c.hidden_size))
        # The reference runs on every platform, and only the shapes matter here.
        layer = DecoderLayer(c, "reference")
        return layer.init(key, x_BTD, phases, pages, jnp.zeros((1, 1), jnp.int32), one, one)[
            "params"
        ]

    def __call__(
        self,
        params: Params,
        cache: KVCache,
        tokens_BT: Array,
        page_table_BM: Array,
        context_lens_B: Array,
        query_lens_B: Array,
    ) -> tuple[KVCache, Array]:
        """`(cache, x_BTD)`: the tokens' keys and values written, and their final hidden states."""
        c = self.config
        x_BTD = self._embed(params, tokens_BT)
        steps_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        positions_BT = (context_lens_B - query_lens_B)[:, None] + steps_T
        phases = rope_phases(c.rope, c.max_position, positions_BT)
        where = (page_table_BM, context_lens_B, query_lens_B)
        layer = DecoderLayer(c, self.attention)
        loop = _unrolled if isinstance(params["layers"], (tuple, list)) else _scanned
        x_BTD, pages = loop(layer, params["layers"], x_BTD, cache.pages, phases, where)
        norm = RMSNorm(c.hidden_size, c.norm_eps)
        return KVCache(pages), jnp.asarray(norm.apply({"params": params["norm"]}, x_BTD))

    def _embed(self, params: Params, tokens_BT: Array) -> Array:
        with jax.named_scope("embed"):
            # Without the barrier XLA hoists a float32 copy of the table out of the decode loop.
            table, tokens_BT = lax.optimization_barrier((params["embed"]["weight"], tokens_BT))
            return table.at[tokens_BT].get(mode="clip").astype(jnp.float32)

    def unembed(self, params: Params, x_BD: Array) -> Array:
        """`logits_BV` float32 of final hidden states."""
        with jax.named_scope("unembed"):
            table = params["embed"] if self.config.tie_embeddings else params["head"]
            return matmul(x_BD, table["weight"])


def _unrolled(layer, params, x_BTD, pages, phases, where):
    """The layers one after another, each with its own array of pages: GPU and CPU."""

    # Jitted, it is traced and lowered once for all layers; the compiler inlines it.
    @jax.jit
    def apply(params, x_BTD, pages):
        return layer.apply({"params": params}, x_BTD, phases, pages, *where)

    new_pages = []
    for layer_params, old_pages in zip(params, pages, strict=True):
        x_BTD, layer_pages = apply(layer_params, x_BTD, old_pages)
        new_pages.append(layer_pages)
    return x_BTD, tuple(new_pages)


def _scanned(layer, params, x_BTD, pages, phases, where):
    """A scan over stacked layers, the cache in the carry (as xs it would be copied): TPU."""

    def body(carry, inputs):
        x_BTD, pages = carry
        layer_params, index = inputs
        return layer.apply({"params": layer_params}, x_BTD, phases, pages, *where, index), None

    indices = jnp.arange(pages.shape[0], dtype=jnp.int32)
    (x_BTD, pages), _ = lax.scan(body, (x_BTD, pages), (params, indices))
    return x_BTD, pages


def stack_layers(params: Params) -> Params:
    """The params with their layers stacked along a new first axis, for the scanned loop."""
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
    return {**params, "layers": layers}
