"""Paged attention for XLA:CPU: one tile of one row at a time, online softmax over groups of its own
pages.

What makes it quick there: work follows each row's length, not the widest; dots are bfloat16 x
bfloat16 -> float32 over at least `MIN_ROWS` rows, because fewer take a slow path that also rounds
differently. A row's result never depends on the other rows, and groups of pages begin at fixed
positions, so it does not depend on how a prompt was cut into chunks either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.paged_attention.layout import from_storage, read_pages

MIN_ROWS = 4
KEYS_PER_GROUP = 256
QUERIES_PER_TILE = 128
# Up to so many query rows, multiplying all [key | value] lanes is cheaper than slicing them.
MAX_UNSLICED_ROWS = 64
MASKED = -1e30


def attend(
    q_BTNH: Array,
    pages: Array,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    scale: float,
    window: Array | None,
    soft_cap: float | None,
    sinks_N: Array | None,
    layer: Array | None,
) -> Array:
    """Attention over the pages of each row, `[B, T, N, H]` in float32; zero for padding."""
    B, T, N, H = q_BTNH.shape
    K, page_size = pages.shape[-3], pages.shape[-2]
    G = N // K
    tile = min(T, QUERIES_PER_TILE)
    num_tiles = -(-T // tile)

    q = jnp.pad(q_BTNH, ((0, 0), (0, num_tiles * tile - T), (0, 0), (0, 0)))
    q = q.reshape(B, num_tiles, tile, K, G, H).transpose(0, 1, 3, 4, 2, 5)
    q = q.reshape(B * num_tiles, K, G * tile, H)

    pages_per_group = max(1, min(KEYS_PER_GROUP // page_size, page_table_BM.shape[1]))
    short = -page_table_BM.shape[1] % pages_per_group
    table_BM = jnp.pad(page_table_BM, ((0, 0), (0, short)), constant_values=pages.shape[-4])
    starts_BI = jnp.arange(num_tiles, dtype=jnp.int32) * tile
    first_BI = (context_lens_B - query_lens_B)[:, None] + starts_BI
    count_BI = jnp.clip(query_lens_B[:, None] - starts_BI, 0, tile)
    sinks_KR = (
        None if sinks_N is None else jnp.repeat(sinks_N.astype(jnp.float32).reshape(K, G), tile, 1)
    )

    def one_tile(args):
        q_KRH, table_M, first, count = args
        return _attend_tile(
            q_KRH,
            first,
            count,
            lambda group: read_pages(
                pages,
                lax.dynamic_slice(table_M, (group * pages_per_group,), (pages_per_group,)),
                layer=layer,
            ),
            keys_per_group=pages_per_group * page_size,
            tile=tile,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks_KR=sinks_KR,
        )

    tables = jnp.repeat(table_BM, num_tiles, axis=0)
    out = lax.map(one_tile, (q, tables, first_BI.reshape(-1), count_BI.reshape(-1)))
    out = out.reshape(B, num_tiles, K, G, tile, H).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(B, num_tiles * tile, N, H)[:, :T]


def _attend_tile(
    q_KRH, first, count, read_group, *, keys_per_group, tile, scale, window, soft_cap, sinks_KR
):
    """Attention of `count` queries from position `first` on, over as many groups as they see."""
    K, R, H = q_KRH.shape
    rows = max(R, MIN_ROWS)
    sliced = rows > MAX_UNSLICED_ROWS
    lanes = H if sliced else jax.eval_shape(read_group, 0).shape[-1]
    q_KRL = jnp.pad(q_KRH, ((0, 0), (0, rows - R), (0, lanes - H)))
    query_R = jnp.arange(rows, dtype=jnp.int32) % tile
    positions_R, alive_R = first + query_R, query_R < count
    num_keys = first + count

    def add_group(group, carry):
        top_KR, total_KR, sum_KRL = carry
        kv = from_storage(read_group(group))
        kv_KSL = kv.transpose(1, 0, 2, 3).reshape(K, keys_per_group, -1)
        keys_S = group * keys_per_group + jnp.arange(keys_per_group, dtype=jnp.int32)
        # A slot that was never written may hold NaN, and 0 * NaN is NaN.
        kv_KSL = jnp.where((keys_S < num_keys)[:, None], kv_KSL, jnp.zeros((), kv.dtype))
        k_KSL, v_KSL = (kv_KSL[..., :H], kv_KSL[..., H : 2 * H]) if sliced else (kv_KSL, kv_KSL)
        scores_KRS = _batched_dot(q_KRL.astype(kv.dtype), k_KSL, contract=2) * scale
        if soft_cap is not None:
            scores_KRS = soft_cap * jnp.tanh(scores_KRS / soft_cap)
        seen_RS = (keys_S <= positions_R[:, None]) & alive_R[:, None]
        if window is not None:
            seen_RS &= keys_S > positions_R[:, None] - window
        scores_KRS = jnp.where(seen_RS, scores_KRS, MASKED)
        new_top_KR = jnp.maximum(top_KR, scores_KRS.max(-1))
        weights_KRS = jnp.where(seen_RS, jnp.exp(scores_KRS - new_top_KR[..., None]), 0.0)
        shrink_KR = jnp.exp(top_KR - new_top_KR)
        total_KR = total_KR * shrink_KR + weights_KRS.sum(-1)
        part_KRL = _batched_dot(weights_KRS.astype(kv.dtype), v_KSL, contract=1)
        return new_top_KR, total_KR, sum_KRL * shrink_KR[..., None] + part_KRL

    if sinks_KR is None:
        top_KR, total_KR = jnp.full((K, rows), MASKED, jnp.float32), jnp.zeros((K, rows))
    else:
        top_KR, total_KR = jnp.pad(sinks_KR, ((0, 0), (0, rows - R))), jnp.ones((K, rows))
    begin = 0 if window is None else jnp.maximum(first - window + 1, 0) // keys_per_group
    end = jnp.where(count > 0, (num_keys + keys_per_group - 1) // keys_per_group, 0)
    empty = (top_KR, total_KR, jnp.zeros((K, rows, lanes), jnp.float32))
    _, total_KR, sum_KRL = lax.fori_loop(begin, end, add_group, empty)
    out_KRH = (sum_KRL if sliced else sum_KRL[..., H : 2 * H])[:, :R]
    total_KR1 = total_KR[:, :R, None]
    return out_KRH / jnp.where(total_KR1 == 0, 1.0, total_KR1)


def _batched_dot(a_KRC: Array, b: Array, *, contract: int) -> Array:
    """Per kv head, `a` times `b` over `a`'s last axis and `b`'s axis `contract`, in float32."""
    dims = (((2,), (contract,)), ((0,), (0,)))
    return lax.dot_general(a_KRC, b, dims, preferred_element_type=jnp.float32)
