"""The programs that the engine compiles: write or stop a row; prefill, start and decode rows.

Each request in flight owns a row of one resident `DecodeState`; a program works on the rows that it
is given. Row indices out of range are padding.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sampling import sample
from jaxinfer.compute.steps import decode_window, only_active, prefill_hidden, start_decode
from jaxinfer.compute.types import Array, DecodeState, KVCache, PrefillBatch, pytree


@pytree
class Chunks:
    """One prefill call: chunk b is the next `query_lens_B[b]` tokens of row `rows_B[b]`."""

    tokens_BT: Array  # int32
    rows_B: Array  # int32
    query_lens_B: Array  # int32
    context_lens_B: Array  # int32


@pytree
class Starts:
    """Which chunks of a call were the last of their rows' prompts, padded to a fixed B."""

    rows_B: Array  # int32; out of range: not the last, or no chunk at all
    context_lens_B: Array  # int32
    max_tokens_B: Array  # int32, tokens that the row may produce


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
    """The rows asked for. Padding repeats the first, inactive, and so asks the sampler for nothing
    that this row does not.
    """
    num_rows = state.tokens_B.shape[0]
    is_row_B = rows_B < num_rows
    index_B = jnp.where(is_row_B, rows_B, rows_B[0])
    taken = jax.tree.map(lambda leaf: leaf.at[index_B].get(mode="clip"), state)
    return dataclasses.replace(taken, remaining_B=jnp.where(is_row_B, taken.remaining_B, 0))


def _put_rows(state: DecodeState, rows_B: Array, rows: DecodeState) -> DecodeState:
    """The state with what decoding changes written back; the parameters of a row never change."""

    def put(old: Array, new: Array) -> Array:
        return old.at[rows_B].set(new, mode="drop")

    changed = ("num_output_B", "recent_BR", "counts_BV")
    sampling = {f: put(getattr(state.sampling, f), getattr(rows.sampling, f)) for f in changed}
    return DecodeState(
        tokens_B=put(state.tokens_B, rows.tokens_B),
        context_lens_B=put(state.context_lens_B, rows.context_lens_B),
        remaining_B=put(state.remaining_B, rows.remaining_B),
        page_table_BM=state.page_table_BM,
        sampling=dataclasses.replace(state.sampling, **sampling),
    )


def prefill_rows(
    model: Decoder,
    params: Params,
    cache: KVCache,
    page_table_RM: Array,
    chunks: Chunks,
    *,
    num_starts: int,
) -> tuple[KVCache, Array]:
    """`(cache, x_BD)`: the chunks' K/V written, and the hidden state of each one's last token.

    Padded to B = num_starts, so that one `start_rows` serves calls of any shape.
    """
    # A padding row writes and sees nothing, whatever pages it is given.
    table_BM = page_table_RM.at[chunks.rows_B].get(mode="clip")
    batch = PrefillBatch(chunks.tokens_BT, chunks.query_lens_B, chunks.context_lens_B, table_BM)
    cache, x_BD = prefill_hidden(model, params, cache, batch)
    return cache, jnp.pad(x_BD, ((0, num_starts - x_BD.shape[0]), (0, 0)))


def start_rows(
    model: Decoder,
    params: Params,
    state: DecodeState,
    x_BD: Array,
    starts: Starts,
    *,
    logits_hook: LogitsHook | None = None,
) -> tuple[DecodeState, Array]:
    """`(state, tokens_B)`: the rows ready to decode, and their first tokens; -1 for padding."""
    rows = _take_rows(state, starts.rows_B)
    rows = dataclasses.replace(rows, context_lens_B=starts.context_lens_B)
    logits_BV = model.unembed(params, x_BD)
    is_row_B = starts.rows_B < state.tokens_B.shape[0]
    sampling = only_active(rows.sampling, is_row_B)
    tokens_B = sample(logits_BV, sampling, rows.context_lens_B, logits_hook=logits_hook)
    tokens_B = jnp.where(is_row_B, tokens_B, -1)
    rows = start_decode(rows, rows.sampling, tokens_B, starts.max_tokens_B)
    return _put_rows(state, starts.rows_B, rows), tokens_B


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
