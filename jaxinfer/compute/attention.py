"""Grouped-query attention over the paged cache."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxinfer.compute.layers import Linear, Norm
from jaxinfer.compute.rope import apply_rope
from jaxinfer.compute.sharding import page_spec, shard, spec
from jaxinfer.config import ModelConfig
from pallas_kernels.paged_attention import Pages, paged_attention


class Attention(nn.Module):
    """`out(attend(rope(q), rope(k), v))`, queries and keys normed first where the model does.

    The projections of a kv head's group are neighbours in one weight `[K, G + 2, H, D]`: its G
    queries, its key, its value. One product gives all three, and K is the axis that a mesh splits:
    each shard then attends with its heads over its pages.
    """

    config: ModelConfig
    implementation: str | None = None
    mesh: Mesh | None = None

    @nn.compact
    def __call__(
        self,
        x_BTD: Array,
        phases: tuple[Array, Array],
        window: Array | None,
        pages: Pages,
        page_table_BM: Array,
        context_lens_B: Array,
        query_lens_B: Array,
        layer: Array | None = None,
    ) -> tuple[Array, Pages]:
        """`(out_BTD, pages)`, the new keys and values written."""
        c = self.config
        B, T, D = x_BTD.shape
        K, G, H = c.num_kv_heads, c.group_size, c.head_dim
        project = Linear((K, G + 2, H, D), use_bias=c.qkv_bias, mesh=self.mesh, name="qkv")
        qkv_BTKJH = project(x_BTD)
        qk_BTKJH = apply_rope(self._norm(qkv_BTKJH[..., : G + 1, :]), phases)
        q_BTNH = qk_BTKJH[..., :G, :].reshape(B, T, K * G, H)
        new_kv_BTKL = jnp.concatenate([qk_BTKJH[..., G, :], qkv_BTKJH[..., G + 1, :]], axis=-1)

        def attend(q, new_kv, pages, table, context, query, window, layer) -> tuple[Array, Pages]:
            return paged_attention(
                q,
                new_kv,
                pages,
                table,
                context,
                query,
                scale=c.attention_scale,
                window=window,
                soft_cap=c.attention_soft_cap,
                layer=layer,
                implementation=self.implementation,
            )

        heads, in_pages = spec("rows", None, "heads"), jax.tree.map(page_spec, pages)
        each = spec("rows")
        attend = shard(
            attend,
            self.mesh,
            in_specs=(heads, heads, in_pages, each, each, each, P(), P()),
            out_specs=(heads, in_pages),
        )
        out_BTNH, pages = attend(
            q_BTNH,
            new_kv_BTKL,
            pages,
            page_table_BM,
            context_lens_B,
            query_lens_B,
            window,
            layer,
        )
        out = Linear((D, K * G * H), use_bias=c.out_bias, name="out")
        return out(out_BTNH.reshape(B, T, K * G * H)), pages

    def _norm(self, qk_BTKJH: Array) -> Array:
        """Queries and keys, normed head by head or all heads of a token together."""
        c = self.config
        if c.qk_norm is None:
            return qk_BTKJH
        K, G, H = c.num_kv_heads, c.group_size, c.head_dim
        q_shape, k_shape = ((H,), (H,)) if c.qk_norm == "head" else ((K, G, H), (K, 1, H))
        q = Norm(q_shape, c.norm_eps, offset=c.norm_offset, name="q_norm")
        k = Norm(k_shape, c.norm_eps, offset=c.norm_offset, name="k_norm")
        return jnp.concatenate([q(qk_BTKJH[..., :G, :]), k(qk_BTKJH[..., G:, :])], axis=-2)
