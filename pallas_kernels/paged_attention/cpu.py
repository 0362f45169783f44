"""Paged attention for XLA:CPU: a tile of queries at a time, online softmax over groups of pages.

What makes it quick there: work follows the lengths of the tile's sequences, not the widest of all;
dots are bfloat16 x bfloat16 -> float32 over at least `MIN_ROWS` rows, because fewer take a slow
path that also rounds differently. A sequence's result never depends on the others, and groups of
pages begin at fixed positions, so it does not depend on how a prompt was cut into chunks either.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.layout import Pages, read_pages, values_of

MIN_ROWS = 3
KEYS_PER_GROUP = 128
# A tile is either some sequences with few queries each, or many queries of one sequence.
SEQUENCES_PER_TILE = 4
QUERIES_PER_TILE = 128
FEW_QUERIES = 8
MASKED = -1e30


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
    G = N // K
    A = min(B, SEQUENCES_PER_TILE) if T <= FEW_QUERIES else 1
    Q = min(T, QUERIES_PER_TILE)
    short_B, short_T = -B % A, -T % Q
    I, J = (B + short_B) // A, (T + short_T) // Q  # noqa: E741  (tiles along rows and queries)

    q = jnp.pad(q_BTNH, ((0, short_B), (0, short_T), (0, 0), (0, 0)))
    q = q.reshape(I, A, J, Q, K, G, H).transpose(0, 2, 1, 4, 5, 3, 6)
    q_JAKRH = q.reshape(I * J, A, K, G * Q, H)

    pages_per_group = max(1, min(KEYS_PER_GROUP // page_size, page_table_BM.shape[1]))
    short_M = -page_table_BM.shape[1] % pages_per_group
    table_BM = jnp.pad(page_table_BM, ((0, short_B), (0, short_M)))

    starts_J = jnp.arange(J, dtype=jnp.int32) * Q
    first_BJ = (context_lens_B - query_lens_B)[:, None] + starts_J
    count_BJ = jnp.clip(query_lens_B[:, None] - starts_J, 0, Q)

    def tiled(array_BJ: Array) -> Array:
        array_BJ = jnp.pad(array_BJ, ((0, short_B), (0, 0)))
        return array_BJ.reshape(I, A, J).transpose(0, 2, 1).reshape(I * J, A)

    sinks_KR = None
    if sinks_N is not None:
        sinks_KR = jnp.repeat(sinks_N.astype(jnp.float32).reshape(K, G), Q, axis=1)

    def one_tile(tile):
        q_AKRH, table_AM, first_A, count_A = tile

        def read_group(group: Array) -> Array:
            start = group * pages_per_group
            ids = lax.dynamic_slice_in_dim(table_AM, start, pages_per_group, axis=1)
            kv = read_pages(pages, ids, head_dim=H, layer=layer)
            return kv.transpose(0, 2, 1, 3, 4).reshape(A, K, pages_per_group * page_size, -1)

        return _attend_tile(
            q_AKRH,
            first_A,
            count_A,
            read_group,
            num_queries=Q,
            keys_per_group=pages_per_group * page_size,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks_KR=sinks_KR,
            value_lanes=slice(H, 2 * H) if value_dim is None else slice(value_dim),
        )

    tables = jnp.repeat(table_BM.reshape(I, A, -1), J, axis=0)
    out = lax.map(one_tile, (q_JAKRH, tables, tiled(first_BJ), tiled(count_BJ)))
    out = out.reshape(I, J, A, K, G, Q, -1).transpose(0, 2, 1, 5, 3, 4, 6)
    return out.reshape(I * A, J * Q, N, -1)[:B, :T]


def _attend_tile(
    q_AKRH,
    first_A,
    count_A,
    read_group,
    *,
    num_queries,
    keys_per_group,
    scale,
    window,
    soft_cap,
    sinks_KR,
    value_lanes,
):
    """Attention of one tile: sequence a's `count_A[a]` queries from position `first_A[a]` on.

    Runs over as many groups of keys as the longest sequence of the tile sees.
    """
    A, K, R, H = q_AKRH.shape
    rows = max(R, MIN_ROWS)
    q_CRH = jnp.pad(q_AKRH, ((0, 0), (0, 0), (0, rows - R), (0, 0))).reshape(A * K, rows, H)
    query_R = jnp.arange(rows, dtype=jnp.int32) % num_queries
    positions_AR = first_A[:, None] + query_R
    alive_AR = query_R < count_A[:, None]
    num_keys_A = first_A + count_A
    first_seen_A = jnp.zeros_like(first_A)
    if window is not None:
        first_seen_A = jnp.maximum(first_A - window + 1, 0)

    def add_group(group: Array, carry):
        top_AKR, total_AKR, sum_CRH = carry
        keys_S = group * keys_per_group + jnp.arange(keys_per_group, dtype=jnp.int32)
        kv_AKSL = read_group(group)
        # What no query sees may be anything, NaN too, and 0 * NaN is NaN.
        needed_AS = (keys_S < num_keys_A[:, None]) & (keys_S >= first_seen_A[:, None])
        kv_AKSL = jnp.where(needed_AS[:, None, :, None], kv_AKSL, jnp.zeros((), kv_AKSL.dtype))
        kv_CSL = kv_AKSL.reshape(A * K, keys_per_group, -1)
        k_CSH, v_CSH = kv_CSL[..., :H], kv_CSL[..., value_lanes]
        scores = _batched_dot(q_CRH.astype(k_CSH.dtype), k_CSH, contract=2) * scale
        scores_AKRS = scores.reshape(A, K, rows, keys_per_group)
        if soft_cap is not None:
            scores_AKRS = soft_cap * jnp.tanh(scores_AKRS / soft_cap)
        seen_ARS = (keys_S <= positions_AR[..., None]) & alive_AR[..., None]
        if window is not None:
            seen_ARS &= keys_S > positions_AR[..., None] - window
        seen_A1RS = seen_ARS[:, None]
        scores_AKRS = jnp.where(seen_A1RS, scores_AKRS, MASKED)
        new_top_AKR = jnp.maximum(top_AKR, scores_AKRS.max(-1))
        weights_AKRS = jnp.where(seen_A1RS, jnp.exp(scores_AKRS - new_top_AKR[..., None]), 0.0)
        shrink_AKR = jnp.exp(top_AKR - new_top_AKR)
        total_AKR = total_AKR * shrink_AKR + weights_AKRS.sum(-1)
        weights_CRS = weights_AKRS.reshape(A * K, rows, keys_per_group).astype(v_CSH.dtype)
        part_CRH = _batched_dot(weights_CRS, v_CSH, contract=1)
        return new_top_AKR, total_AKR, sum_CRH * shrink_AKR.reshape(A * K, rows, 1) + part_CRH

    if sinks_KR is None:
        top_AKR, total_AKR = jnp.full((A, K, rows), MASKED), jnp.zeros((A, K, rows))
    else:
        top_KR = jnp.pad(sinks_KR, ((0, 0), (0, rows - R)))
        top_AKR, total_AKR = jnp.broadcast_to(top_KR, (A, K, rows)), jnp.ones((A, K, rows))
    begin = jnp.min(jnp.where(count_A > 0, first_seen_A // keys_per_group, 2**30))
    end = jnp.max(jnp.where(count_A > 0, -(-num_keys_A // keys_per_group), 0))
    V = value_lanes.stop - (value_lanes.start or 0)
    empty = (top_AKR, total_AKR, jnp.zeros((A * K, rows, V), jnp.float32))
    _, total_AKR, sum_CRH = lax.fori_loop(jnp.minimum(begin, end), end, add_group, empty)
    total_AKR1 = total_AKR[..., None]
    out_AKRH = sum_CRH.reshape(A, K, rows, V) / jnp.where(total_AKR1 == 0, 1.0, total_AKR1)
    return out_AKRH[:, :, :R]


def _batched_dot(a_CRX: Array, b: Array, *, contract: int) -> Array:
    """Per sequence and kv head, `a` times `b` over `a`'s last axis and `b`'s axis `contract`."""
    dims = (((2,), (contract,)), ((0,), (0,)))
    return lax.dot_general(a_CRX, b, dims, preferred_element_type=jnp.float32)
