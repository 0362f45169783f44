"""The specification: paged attention in plain jnp and float32, every score of every row at once."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention.layout import Pages, read_pages, values_of


def attend(
    q_BTNH: Array,
    pages: Pages,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    scale: float,
    window: Array | None,
    soft_cap: float | None,
    sinks_N: Array | None,
    layer: Array | None,
    value_dim: int | None,
) -> Array:
    """Attention over the pages of each row, `out_BTNH` in float32; zero for padding."""
    B, T, N, H = q_BTNH.shape
    K, page_size = values_of(pages).shape[-3:-1]
    kv = read_pages(pages, page_table_BM, head_dim=H, layer=layer).astype(jnp.float32)
    S = page_table_BM.shape[1] * page_size
    kv_BKSL = kv.transpose(0, 2, 1, 3, 4).reshape(B, K, S, -1)

    positions_BT = (context_lens_B - query_lens_B)[:, None] + jnp.arange(T)
    keys_S = jnp.arange(S)
    needed_BS = keys_S < context_lens_B[:, None]
    if window is not None:
        needed_BS &= keys_S > positions_BT[:, :1] - window
    # What no query sees may be anything, NaN too, and 0 * NaN is NaN.
    kv_BKSL = jnp.where(needed_BS[:, None, :, None], kv_BKSL, 0.0)
    k_BKSH = kv_BKSL[..., :H]
    v_BKSH = kv_BKSL[..., H : 2 * H] if value_dim is None else kv_BKSL[..., :value_dim]

    seen_BTS = keys_S <= positions_BT[..., None]
    if window is not None:
        seen_BTS &= keys_S > positions_BT[..., None] - window
    seen_BTS &= (jnp.arange(T) < query_lens_B[:, None])[..., None]

    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bksh->bkgts", q_BTKGH, k_BKSH) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = seen_BTS[:, None, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    top = jnp.maximum(scores.max(-1, keepdims=True), jnp.finfo(jnp.float32).min)
    sinks = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(1, K, N // K, 1, 1)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    weights = weights / jnp.where(total == 0, 1.0, total)
    out = jnp.einsum("bkgts,bksh->btkgh", weights, v_BKSH)
    return out.reshape(B, T, N, -1)
