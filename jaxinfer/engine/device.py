"""The programs that the engine compiles: write or stop a row; prefill, score, start, decode rows;
map pages to rows, copy pages.

Each request in flight owns a row of one resident `DecodeState`; a program works on the rows that it
is given. Row indices out of range are padding.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.scoring import score_prompt
from jaxinfer.compute.steps import decode_window, prefill_hidden, sample_next, start_decode
from jaxinfer.compute.types import (
    Array,
    DecodeState,
    KVCache,
    Logprobs,
    PrefillBatch,
    StepOutput,
    pytree,
)
from pallas_kernels import paged_attention


@pytree
class Chunks:
    """One prefill call: chunk b is the next `query_lens_B[b]` tokens of row `rows_B[b]`."""

    tokens_BT: Array  # int32
    rows_B: Array  # int32
    query_lens_B: Array  # int32
    context_lens_B: Array  # int32


@pytree
class Starts:
    """The rows that begin to decode, padded to a fixed B; several may start from one state."""

    rows_B: Array  # int32; out of range: padding
    index_B: Array  # int32, of the prompt's last hidden state in the x_ND of its prefill
    context_lens_B: Array  # int32
    max_tokens_B: Array  # int32, tokens that the row may produce


@pytree
class Scored:
    """A chunk whose following tokens are scored: positions start..start+length-1 of a prompt."""

    tokens_S: Array  # int32, the whole prompt; -1 behind it
    row: Array  # int32
    index: Array  # int32, of the chunk's first hidden state in the x_ND of its prefill
    start: Array  # int32
    length: Array  # int32


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


def map_pages(state: DecodeState, entries_C3: Array) -> DecodeState:
    """The state with (row, index, page) entries in its page tables; padding is out of range."""
    row_C, index_C, page_C = entries_C3.T
    table_RM = state.page_table_BM.at[row_C, index_C].set(page_C, mode="drop")
    return dataclasses.replace(state, page_table_BM=table_RM)


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


def copy_pages(cache: KVCache, sources_C: Array, destinations_C: Array) -> KVCache:
    """The cache with whole pages of every layer copied; a destination out of range is padding."""
    copy = functools.partial(
        paged_attention.copy_pages, sources_C=sources_C, destinations_C=destinations_C
    )
    return jax.tree.map(copy, cache)


def prefill_rows(
    model: Decoder,
    params: Params,
    cache: KVCache,
    page_table_RM: Array,
    chunks: Chunks,
    *,
    num_hidden: int,
) -> tuple[KVCache, Array]:
    """`(cache, x_ND)`: the chunks' K/V written, and the hidden states of their tokens row by row.

    Padded to N = num_hidden, so that one `start_rows` and one `score_rows` serve calls of any
    shape.
    """
    # A padding row writes and sees nothing, whatever pages it is given.
    table_BM = page_table_RM.at[chunks.rows_B].get(mode="clip")
    batch = PrefillBatch(chunks.tokens_BT, chunks.query_lens_B, chunks.context_lens_B, table_BM)
    cache, x_BTD = prefill_hidden(model, params, cache, batch)
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return cache, jnp.pad(x_ND, ((0, num_hidden - x_ND.shape[0]), (0, 0)))


def score_rows(
    model: Decoder,
    params: Params,
    state: DecodeState,
    x_ND: Array,
    scored: Scored,
    *,
    max_logprobs: int,
    logits_hook: LogitsHook | None = None,
) -> Logprobs:
    """`Logprobs` [N] of the prompt token that follows each hidden state of the chunk.

    See `score_prompt`.
    """
    row = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, scored.row, 1), state.sampling)
    return score_prompt(
        model,
        params,
        row,
        x_ND,
        scored.tokens_S,
        index=scored.index,
        start=scored.start,
        length=scored.length,
        max_logprobs=max_logprobs,
        logits_hook=logits_hook,
    )


def start_rows(
    model: Decoder,
    params: Params,
    state: DecodeState,
    x_ND: Array,
    starts: Starts,
    *,
    max_logprobs: int,
    logits_hook: LogitsHook | None = None,
) -> tuple[DecodeState, StepOutput]:
    """`(state, output)`: the rows ready to decode, and their first tokens; -1 for padding."""
    rows = _take_rows(state, starts.rows_B)
    rows = dataclasses.replace(rows, context_lens_B=starts.context_lens_B)
    output = sample_next(
        model,
        params,
        x_ND.at[starts.index_B].get(mode="clip"),
        rows.sampling,
        starts.rows_B < state.tokens_B.shape[0],
        rows.context_lens_B,
        logits_hook=logits_hook,
        max_logprobs=max_logprobs,
    )
    rows = start_decode(
        rows, rows.sampling, output.tokens_BW[:, 0], starts.max_tokens_B, mesh=model.mesh
    )
    return _put_rows(state, starts.rows_B, rows), output


def decode_rows(
    model: Decoder,
    params: Params,
    cache: KVCache,
    state: DecodeState,
    rows_B: Array,
    num_steps: Array,
    *,
    max_steps: int,
    max_logprobs: int,
    logits_hook: LogitsHook | None = None,
) -> tuple[KVCache, DecodeState, StepOutput]:
    """`(cache, state, output)`: up to `num_steps` more tokens of each of the rows."""
    rows = _take_rows(state, rows_B)
    cache, rows, output = decode_window(
        model,
        params,
        cache,
        rows,
        num_steps,
        max_steps=max_steps,
        logits_hook=logits_hook,
        max_logprobs=max_logprobs,
    )
    return cache, _put_rows(state, rows_B, rows), output
