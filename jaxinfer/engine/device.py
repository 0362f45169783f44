"""The three programs that the engine compiles: write a row, prefill rows, decode rows.

Each request in flight owns a row of one resident `DecodeState`; a program works on the rows that it is given.
Row indices out of range are padding.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.steps import LogitsHook, decode_window, prefill_step, start_decode
from jaxinfer.compute.types import DecodeState, KVCache, PrefillBatch, pytree


@pytree
class PrefillRows:
    """One prefill call: chunk b belongs to row `rows_B[b]`, which starts to decode if `is_last_B[b]`."""

    tokens_BT: Any  # int32
    rows_B: Any  # int32
    query_lens_B: Any  # int32
    context_lens_B: Any  # int32
    is_last_B: Any  # bool
    max_tokens_B: Any  # int32, tokens that the request may still produce


def pack_row(row: DecodeState) -> np.ndarray:
    """The one-row numpy state as int32 words, so that a joining request costs one transfer."""
    return np.concatenate([_to_words(np.asarray(leaf)) for leaf in jax.tree.leaves(row)])


def _to_words(leaf: np.ndarray) -> np.ndarray:
    if leaf.dtype == np.bool_:
        leaf = leaf.astype(np.int32)
    flat = np.ascontiguousarray(leaf).reshape(-1)
    return np.pad(flat, (0, -flat.nbytes % 4 // flat.itemsize)).view(np.int32)


def _unpack_row(words: Array, like: DecodeState) -> DecodeState:
    """The inverse of `pack_row` for one row of the state `like`, on the device."""
    leaves, tree = jax.tree.flatten(like)
    row, start = [], 0
    for leaf in leaves:
        shape, size = leaf.shape[1:], int(np.prod(leaf.shape[1:]))
        per_word = 4 // leaf.dtype.itemsize if leaf.dtype != jnp.bool_ else 1
        count = -(-size // per_word)
        part = words[start : start + count]
        if leaf.dtype == jnp.bool_:
            part = part != 0
        elif leaf.dtype != jnp.int32:
            part = lax.bitcast_convert_type(part, leaf.dtype)
        row.append(part.reshape(-1)[:size].reshape(shape))
        start += count
    return tree.unflatten(row)


def write_row(state: DecodeState, row: Array, words: Array) -> DecodeState:
    """The state with row `row` replaced by what `pack_row` packed."""
    new_row = _unpack_row(words, state)
    return jax.tree.map(lambda leaf, value: leaf.at[row].set(value), state, new_row)


def stop_row(state: DecodeState, row: Array) -> DecodeState:
    """The state with row `row` inactive: it computes and writes nothing more."""
    return dataclasses.replace(state, remaining_B=state.remaining_B.at[row].set(0))


def _take_rows(state: DecodeState, rows_B: Array) -> DecodeState:
    """The rows asked for. Padding repeats the first one, inactive: it must not make the sampler work."""
    num_rows = state.tokens_B.shape[0]
    is_row_B = rows_B < num_rows
    index_B = jnp.where(is_row_B, rows_B, rows_B[0])
    taken = jax.tree.map(lambda leaf: leaf.at[index_B].get(mode="clip"), state)
    return dataclasses.replace(taken, remaining_B=jnp.where(is_row_B, taken.remaining_B, 0))


def _put_rows(state: DecodeState, rows_B: Array, rows: DecodeState) -> DecodeState:
    return jax.tree.map(lambda leaf, new: leaf.at[rows_B].set(new, mode="drop"), state, rows)


def prefill_rows(
    model: Decoder,
    params: Params,
    cache: KVCache,
    state: DecodeState,
    chunk: PrefillRows,
    *,
    logits_hook: LogitsHook | None = None,
) -> tuple[KVCache, DecodeState, Array]:
    """`(cache, state, tokens_B)`: the chunks computed; rows whose last one this was are ready to decode.

    `tokens_B` holds their first tokens, -1 for the others.
    """
    rows = _take_rows(state, chunk.rows_B)
    batch = PrefillBatch(
        chunk.tokens_BT, chunk.query_lens_B, chunk.context_lens_B, rows.page_table_BM
    )
    cache, output = prefill_step(
        model, params, cache, batch, rows.sampling, logits_hook=logits_hook
    )
    tokens_B = jnp.where(chunk.is_last_B, output.tokens_BW[:, 0], -1)
    started = start_decode(batch, rows.sampling, tokens_B, chunk.max_tokens_B)
    return cache, _put_rows(state, chunk.rows_B, started), tokens_B


def decode_rows(
    model: Decoder,
    params: Params,
    cache: KVCache,
    state: DecodeState,
    rows_B: Array,
    num_steps: Array,
    *,
    max_steps: int,
    logits_hook: LogitsHook | None = None,
) -> tuple[KVCache, DecodeState, Array]:
    """`(cache, state, tokens_BW)`: up to `num_steps` more tokens of each of the rows."""
    rows = _take_rows(state, rows_B)
    cache, rows, output = decode_window(
        model, params, cache, rows, num_steps, max_steps=max_steps, logits_hook=logits_hook
    )
    return cache, _put_rows(state, rows_B, rows), output.tokens_BW
