"""The decoder as pure functions of params: embedding, a loop over layers, final norm, head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from jaxinfer.compute.attention import Attention
from jaxinfer.compute.layers import ACTIVATIONS, MLP, matmul, residual_norm, soft_cap
from jaxinfer.compute.rope import rope_phases
from jaxinfer.compute.sharding import (
    fit_config,
    num_model_shards,
    param_shardings,
    rows_per_shard,
)
from jaxinfer.compute.tiles import map_tiles
from jaxinfer.compute.types import KVCache
from jaxinfer.config import ModelConfig, require
from pallas_kernels.paged_attention import IMPLEMENTATIONS, Pages

NO_WINDOW = 2**30

Params = Any  # nested dicts of arrays; `layers` a tuple of them, or one of stacked arrays


class DecoderLayer(nn.Module):
    """One layer: what attention and MLP make of the normed residual stream is added to it."""

    config: ModelConfig
    implementation: str | None = None
    mesh: Mesh | None = None

    @nn.compact
    def __call__(self, x_BTD: Array, *attending: Any) -> tuple[Array, Pages]:
        """`(x_BTD, pages)`; `attending` is what `Attention` takes after the hidden states."""
        c = self.config
        with jax.named_scope("attention"):
            normed = residual_norm(c, "attention_norm")(x_BTD) if c.pre_norm else x_BTD
            attention = Attention(c, self.implementation, self.mesh, name="attention")
            out, pages = attention(normed, *attending)
            if c.post_norm:
                out = residual_norm(c, "attention_post_norm")(out)
            attended = x_BTD + out * c.residual_scale
        with jax.named_scope("mlp"):
            if not c.shared_norm:
                source = x_BTD if c.parallel_residual else attended
                normed = residual_norm(c, "mlp_norm")(source) if c.pre_norm else source
            out = MLP(c, self.mesh, name="mlp")(normed)
            if c.post_norm:
                out = residual_norm(c, "mlp_post_norm")(out)
            return attended + out * c.residual_scale, pages


@dataclass(frozen=True)
class Decoder:
    """A model without its weights: hashable, so it can be a static argument of `jax.jit`.

    Attributes:
        config: the model.
        attention: the backend of `pallas_kernels.paged_attention`; None lets the platform choose.
        batch_invariant: compute every token as one row of a tile of fixed shape, see `tiles`.
        mesh: the devices that params, cache and batches are spread over, see `sharding`; None: no
            matter where they lie, XLA partitions all.
    """

    config: ModelConfig
    attention: str | None = None
    batch_invariant: bool = False
    mesh: Mesh | None = None

    def __post_init__(self):
        require(
            self.mesh is None or not self.batch_invariant,
            "batch_invariant=True holds on one device only: sums over several are taken in another "
            "order. Leave it off, or leave out the mesh.",
        )
        fitting = fit_config(self.config, num_model_shards(self.mesh))
        require(
            fitting == self.config,
            f"Each of {fitting.num_kv_heads} shards needs a kv head, and the model has "
            f"{self.config.num_kv_heads}. Load it with the mesh, which repeats them.",
        )
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
            "norm": residual_norm(c).init(key, jnp.ones(c.hidden_size))["params"],
        }
        if not c.tie_embeddings:
            params["head"] = table(head_key)
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def _init_layer(self, key: Array) -> Params:
        c = self.config
        pages = jnp.zeros((1, c.num_kv_heads, 1, 2 * c.head_dim))
        one = jnp.ones(1, jnp.int32)
        sin_ZBTR, cos_ZBTR = _all_phases(c, jnp.zeros((1, 1), jnp.int32))
        x_BTD = jnp.zeros((1, 1, c.hidden_size))
        # The reference runs on every platform, and only the shapes matter here.
        layer = DecoderLayer(c, "reference")
        where = (pages, jnp.zeros((1, 1), jnp.int32), one, one)
        return layer.init(key, x_BTD, (sin_ZBTR[0], cos_ZBTR[0]), None, *where)["params"]

    def __call__(
        self,
        params: Params,
        cache: KVCache,
        tokens_BT: Array,
        page_table_BM: Array,
        context_lens_B: Array,
        query_lens_B: Array,
    ) -> tuple[KVCache, Array]:
        """`(cache, x_BTD)`: the tokens' keys and values written, and their final hidden states.

        Of tokens from `query_lens_B` on the states mean nothing. Raises ValueError if the data
        shards of the mesh cannot share the rows out.
        """
        rows_per_shard(self.mesh, tokens_BT.shape[0])
        compute = self._tile_by_tile if self.batch_invariant else self._compute
        return compute(params, cache, tokens_BT, page_table_BM, context_lens_B, query_lens_B)

    def _tile_by_tile(
        self, params, cache, tokens_BT, page_table_BM, context_lens_B, query_lens_B
    ) -> tuple[KVCache, Array]:
        """As `_compute`, each token a row of its own that attends to what is in the pages."""
        B, T = tokens_BT.shape
        steps_T = jnp.arange(T, dtype=jnp.int32)
        context_BT = (context_lens_B - query_lens_B)[:, None] + steps_T + 1

        def compute(cache: KVCache, tokens: tuple[Array, ...], active_N: Array):
            token_N, context_N, table_NM = tokens
            lens = context_N, active_N.astype(jnp.int32)
            cache, x_N1D = self._compute(params, cache, token_N[:, None], table_NM, *lens)
            return cache, x_N1D[:, 0]

        tokens = tokens_BT.reshape(-1), context_BT.reshape(-1), jnp.repeat(page_table_BM, T, axis=0)
        x_ND = jnp.zeros((B * T, self.config.hidden_size), jnp.float32)
        active_BT = steps_T < query_lens_B[:, None]
        cache, x_ND = map_tiles(compute, cache, tokens, x_ND, active_BT.reshape(-1))
        return cache, x_ND.reshape(B, T, -1)

    def _compute(
        self, params, cache, tokens_BT, page_table_BM, context_lens_B, query_lens_B
    ) -> tuple[KVCache, Array]:
        c = self.config
        x_BTD = self._embed(params, tokens_BT)
        steps_T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        phases = _all_phases(c, (context_lens_B - query_lens_B)[:, None] + steps_T)
        where = (page_table_BM, context_lens_B, query_lens_B)
        layer = DecoderLayer(c, self.attention, self.mesh)
        loop = _scanned if are_stacked(params) else _unrolled
        x_BTD, pages = loop(layer, params["layers"], x_BTD, cache.pages, phases, where)
        norm = residual_norm(c)
        return KVCache(pages), jnp.asarray(norm.apply({"params": params["norm"]}, x_BTD))

    def _embed(self, params: Params, tokens_BT: Array) -> Array:
        with jax.named_scope("embed"):
            # Without the barrier XLA hoists a float32 copy of the table out of the decode loop.
            table, tokens_BT = lax.optimization_barrier((params["embed"]["weight"], tokens_BT))
            x_BTD = table.at[tokens_BT].get(mode="clip").astype(jnp.float32)
            return x_BTD * self.config.embedding_scale

    def unembed(self, params: Params, x_BD: Array) -> Array:
        """`logits_BV` float32 of final hidden states."""
        with jax.named_scope("unembed"):
            c = self.config
            table = params["embed"] if c.tie_embeddings else params["head"]
            return soft_cap(matmul(x_BD, table["weight"]) * c.logits_scale, c.logits_soft_cap)


def _all_phases(config: ModelConfig, positions_BT: Array) -> tuple[Array, Array]:
    """`(sin_ZBTR, cos_ZBTR)` of each of the model's Z rotary embeddings; none is no turn."""
    shape = (*positions_BT.shape, config.rope.dim // 2)
    no_turn = jnp.zeros(shape, jnp.float32), jnp.ones(shape, jnp.float32)
    phases = [
        no_turn if rope is None else rope_phases(rope, config.max_position, positions_BT)
        for rope in config.ropes
    ]
    sins, coss = zip(*phases)
    return jnp.stack(sins), jnp.stack(coss)


def _kinds(config: ModelConfig) -> tuple[np.ndarray, np.ndarray | None]:
    """`(rope_L, window_L)` int32: which of the phases each layer takes, and its window.

    What distinguishes layers is data, so one trace, or one body of a scan, serves all of them. A
    layer without a window has one that no context reaches, a model without any has None.
    """
    layers = range(config.num_layers)
    rope_L = np.array([config.ropes.index(config.rope_of(i)) for i in layers], np.int32)
    if not any(config.windows):
        return rope_L, None
    return rope_L, np.array([window or NO_WINDOW for window in config.windows], np.int32)


def _unrolled(layer, params, x_BTD, pages, phases, where):
    """The layers one after another, each with its own array of pages: GPU and CPU."""
    rope_L, window_L = _kinds(layer.config)

    # Jitted, it is traced and lowered once for all layers; the compiler inlines it.
    @jax.jit
    def apply(params, x_BTD, sin_BTR, cos_BTR, window, pages):
        return layer.apply({"params": params}, x_BTD, (sin_BTR, cos_BTR), window, pages, *where)

    new_pages = []
    for i, (layer_params, old_pages) in enumerate(zip(params, pages, strict=True)):
        sin_BTR, cos_BTR = (phase_ZBTR[rope_L[i]] for phase_ZBTR in phases)
        window = None if window_L is None else window_L[i]
        x_BTD, layer_pages = apply(layer_params, x_BTD, sin_BTR, cos_BTR, window, old_pages)
        new_pages.append(layer_pages)
    return x_BTD, tuple(new_pages)


def _scanned(layer, params, x_BTD, pages, phases, where):
    """A scan over stacked layers, the cache in the carry (as xs it would be copied): TPU."""

    def body(carry, inputs):
        x_BTD, pages = carry
        layer_params, index, (rope, window) = inputs
        turn = tuple(phase_ZBTR[rope] for phase_ZBTR in phases)
        attending = (turn, window, pages, *where, index)
        return layer.apply({"params": layer_params}, x_BTD, *attending), None

    indices = jnp.arange(pages.shape[0], dtype=jnp.int32)
    inputs = (params, indices, _kinds(layer.config))
    (x_BTD, pages), _ = lax.scan(body, (x_BTD, pages), inputs)
    return x_BTD, pages


def stack_layers(params: Params, *, donate: bool = False) -> Params:
    """The params with their layers stacked along a new first axis, for the scanned loop.

    With `donate` the leaves of `params` are freed as soon as they are stacked, so that no more than
    one leaf of all layers is there twice; not within `jit`.
    """

    def stack(*leaves: Array) -> Array:
        stacked = jnp.stack(leaves)
        if donate:
            stacked.block_until_ready()
            for leaf in leaves:
                leaf.delete()
        return stacked

    return {**params, "layers": jax.tree.map(stack, *params["layers"])}


def are_stacked(params: Params) -> bool:
    """Whether the layers of `params` are stacked, which the cache must then be too."""
    return not isinstance(params["layers"], (tuple, list))


def is_scanned_on(device: Any) -> bool:
    """Whether a scan over stacked layers is the better loop on `device`.

    It compiles in a tenth of the time, but elsewhere than on TPU each step would copy the weights
    of every layer, and on TPU7x the compiler re-lays all of them.
    """
    return device.platform == "tpu" and not device.device_kind.lower().startswith("tpu7")


def stack_where_scanned(params: Params, mesh: Mesh | None = None) -> Params:
    """`params`, given away, in the form whose loop is the better one where they lie."""
    (device, *_) = jax.tree.leaves(params)[0].devices()
    if not is_scanned_on(device):
        return params
    stacked = stack_layers(params, donate=True)
    return stacked if mesh is None else jax.device_put(stacked, param_shardings(mesh, stacked))
