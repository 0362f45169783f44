"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxinfer.compute.layers import Linear
from jaxinfer.compute.rope import apply_rope
from jaxinfer.config import ModelConfig
from pallas_kernels.paged_attention import paged_attention


class Attention(nn.Module):
    """`out(attend(rope(q), rope(k), v))`.

    The projections of a kv head's group are neighbours in one weight `[K, G + 2, H, D]`: its G
    queries, its key, its value. One product gives all three, and K is the axis that tensor
    parallelism splits.
    """

    config: ModelConfig
    implementation: str | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        phases: tuple[Array, Array],
        pages: Array,
        page_table_BM: Array,
        context_lens_B: Array,
        query_lens_B: Array,
        layer: Array | None = None,
    ) -> tuple[Array, Array]:
        """`(out_BTD, pages)`, the new keys and values written."""
        c = self.config
        B, T, D = x_BTD.shape
        K, G, H = c.num_kv_heads, c.group_size, c.head_dim
        qkv_BTKJH = Linear((K, G + 2, H, D), use_bias=c.attention_bias, name="qkv")(x_BTD)
        qk_BTKJH = apply_rope(qkv_BTKJH[..., : G + 1, :], phases)
        q_BTNH = qk_BTKJH[..., :G, :].reshape(B, T, K * G, H)
        new_kv_BTKL = jnp.concatenate([qk_BTKJH[..., G, :], qkv_BTKJH[..., G + 1, :]], axis=-1)
        out_BTNH, pages = paged_attention(
            q_BTNH,
            new_kv_BTKL,
            pages,
            page_table_BM,
            context_lens_B,
            query_lens_B,
            layer=layer,
            implementation=self.implementation,
        )
        out_BTD = Linear((D, K * G, H), contract=2, use_bias=c.attention_bias, name="out")(out_BTNH)
        return out_BTD, pages
