"""The two phases as pure functions: prefill chunks of prompts, decode tokens.

All take and return pytrees, hold no state and may stand inside the caller's own `jit`, `scan` or
`shard_map`. Jit them with the cache (and state) donated and `model` static.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.logprobs import init_logprobs, token_logprobs
from jaxinfer.compute.sampling import advance, draw
from jaxinfer.compute.sharding import any_row
from jaxinfer.compute.tiles import map_tiles
from jaxinfer.compute.types import (
    DecodeState,
    KVCache,
    PrefillBatch,
    SamplingState,
    StepOutput,
)
from jaxinfer.config import require


def prefill_step(
    model: Decoder,
    params: Params,
    cache: KVCache,
    batch: PrefillBatch,
    sampling: SamplingState,
    *,
    logits_hook: LogitsHook | None = None,
    return_logits: bool = False,
    max_logprobs: int | None = None,
) -> tuple[KVCache, StepOutput]:
    """`(cache, output)`: the chunk's K/V written, and the token that follows each row's last one.

    For a row whose prompt goes on in a later chunk the token means nothing; rows of query length 0
    give -1. With `max_logprobs` the rows that ask have log-probabilities, with as many of the most
    likely tokens; None: nobody has.
    """
    cache, x_BTD = prefill_hidden(model, params, cache, batch)
    last_B = jnp.maximum(batch.query_lens_B - 1, 0)
    x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]
    output = sample_next(
        model,
        params,
        x_BD,
        sampling,
        batch.query_lens_B > 0,
        batch.context_lens_B,
        logits_hook=logits_hook,
        return_logits=return_logits,
        max_logprobs=max_logprobs,
    )
    return cache, output


def prefill_hidden(
    model: Decoder, params: Params, cache: KVCache, batch: PrefillBatch
) -> tuple[KVCache, Array]:
    """`(cache, x_BTD)`: the chunk's K/V written; the final hidden state of each token.

    The part of `prefill_step` that every chunk needs; only a prompt's last one needs the rest.
    """
    with jax.named_scope("prefill"):
        return model(
            params,
            cache,
            batch.tokens_BT,
            batch.page_table_BM,
            batch.context_lens_B,
            batch.query_lens_B,
        )


def start_decode(
    batch: PrefillBatch | DecodeState,
    sampling: SamplingState,
    tokens_B: Array,
    max_tokens_B: Array,
    *,
    mesh: Mesh | None = None,
) -> DecodeState:
    """The state of rows whose prompts are in the cache and whose first tokens are `tokens_B`.

    A row whose first token is negative, is one of its stop ids, or was its last allowed starts
    inactive. `max_tokens_B` counts that first token. `mesh`: that of the model, if it has one.
    """
    produced_B = tokens_B >= 0
    going_on_B = produced_B & ~is_stop(tokens_B, sampling)
    return DecodeState(
        tokens_B=tokens_B,
        context_lens_B=batch.context_lens_B,
        remaining_B=jnp.where(going_on_B, max_tokens_B - 1, 0).astype(jnp.int32),
        page_table_BM=batch.page_table_BM,
        sampling=advance(sampling, tokens_B, produced_B, mesh=mesh),
    )


def sample_next(
    model: Decoder,
    params: Params,
    x_BD: Array,
    sampling: SamplingState,
    active_B: Array,
    positions_B: Array,
    *,
    logits_hook: LogitsHook | None = None,
    return_logits: bool = False,
    max_logprobs: int | None = None,
) -> StepOutput:
    """The token that follows final hidden state `x_BD` of each active row, as `sample` draws it, W
    = 1; -1 for the others.

    With `max_logprobs` as in `prefill_step`. Logits of rows that are not active mean nothing.
    """

    def compute(x_BD: Array, sampling: SamplingState, positions_B: Array, active_B: Array):
        logits_BV = model.unembed(params, x_BD)
        # Rows made greedy that ask for nothing make no work for the sampler.
        sampling = dataclasses.replace(
            sampling,
            temperature_B=jnp.where(active_B, sampling.temperature_B, 0.0),
            asks_logprobs_B=sampling.asks_logprobs_B & active_B,
        )
        tokens_B, drawn_from = draw(
            logits_BV, sampling, positions_B, logits_hook=logits_hook, mesh=model.mesh
        )
        logprobs = None
        if max_logprobs is not None:
            logprobs = token_logprobs(
                logits_BV,
                tokens_B,
                drawn_from,
                sampling,
                max_logprobs=max_logprobs,
                mesh=model.mesh,
            )
            logprobs = jax.tree.map(lambda leaf: leaf[:, None], logprobs)
        tokens_B1 = jnp.where(active_B, tokens_B, -1)[:, None]
        return StepOutput(tokens_B1, logits_BV if return_logits else None, logprobs)

    if not model.batch_invariant:
        return compute(x_BD, sampling, positions_B, active_B)
    rows = x_BD, sampling, positions_B
    shape = (x_BD.shape[0], 1)
    nothing = StepOutput(
        jnp.full(shape, -1, jnp.int32),
        jnp.zeros((shape[0], model.config.vocab_size)) if return_logits else None,
        None if max_logprobs is None else init_logprobs(shape, max_logprobs),
    )
    _, output = map_tiles(
        lambda _, rows, active_B: (None, compute(*rows, active_B)), None, rows, nothing, active_B
    )
    return output


def is_stop(tokens_B: Array, sampling: SamplingState) -> Array:
    """Whether each row's token is one of its stop ids."""
    return jnp.any(tokens_B[:, None] == sampling.stop_ids_BC, axis=-1) & (tokens_B >= 0)


def decode_step(
    model: Decoder,
    params: Params,
    cache: KVCache,
    state: DecodeState,
    *,
    logits_hook: LogitsHook | None = None,
    return_logits: bool = False,
    max_logprobs: int | None = None,
) -> tuple[KVCache, DecodeState, StepOutput]:
    """`(cache, state, output)`: one more token of each active row; -1 for the others.

    With `max_logprobs` as in `prefill_step`.
    """
    with jax.named_scope("decode"):
        active_B = state.remaining_B > 0
        step_B = active_B.astype(jnp.int32)
        context_lens_B = state.context_lens_B + step_B
        tokens_B1 = jnp.maximum(state.tokens_B, 0)[:, None]
        cache, x_B1D = model(params, cache, tokens_B1, state.page_table_BM, context_lens_B, step_B)
        output = sample_next(
            model,
            params,
            x_B1D[:, 0],
            state.sampling,
            active_B,
            context_lens_B,
            logits_hook=logits_hook,
            return_logits=return_logits,
            max_logprobs=max_logprobs,
        )
        sampled_B = output.tokens_BW[:, 0]
        going_on_B = active_B & ~is_stop(sampled_B, state.sampling)
        state = DecodeState(
            tokens_B=jnp.where(active_B, sampled_B, state.tokens_B),
            context_lens_B=context_lens_B,
            remaining_B=jnp.where(going_on_B, state.remaining_B - 1, 0),
            page_table_BM=state.page_table_BM,
            sampling=advance(state.sampling, sampled_B, active_B, mesh=model.mesh),
        )
    return cache, state, output


def decode_window(
    model: Decoder,
    params: Params,
    cache: KVCache,
    state: DecodeState,
    num_steps: Array | int,
    *,
    max_steps: int = 8,
    logits_hook: LogitsHook | None = None,
    max_logprobs: int | None = None,
) -> tuple[KVCache, DecodeState, StepOutput]:
    """`(cache, state, output)` after `num_steps` decode steps; `tokens_BW`, W = max_steps.

    `num_steps` may be traced: one executable serves every length up to `max_steps`. Each row stops
    by itself (stop id or budget); the loop ends early only when all have. With `max_logprobs` as in
    `prefill_step`.
    """

    def going_on(carry):
        step, _, state, _ = carry
        return any_row(model.mesh, (step < num_steps) & (state.remaining_B > 0))

    def body(carry):
        step, cache, state, window = carry
        cache, state, output = decode_step(
            model, params, cache, state, logits_hook=logits_hook, max_logprobs=max_logprobs
        )
        window = jax.tree.map(
            lambda all_BW, one_B1: lax.dynamic_update_slice_in_dim(all_BW, one_B1, step, axis=1),
            window,
            output,
        )
        return step + 1, cache, state, window

    shape = (state.tokens_B.shape[0], max_steps)
    window = StepOutput(
        jnp.full(shape, -1, jnp.int32),
        logprobs=None if max_logprobs is None else init_logprobs(shape, max_logprobs),
    )
    if isinstance(num_steps, int):
        require(
            num_steps <= max_steps,
            f"num_steps={num_steps} exceeds max_steps={max_steps}. Raise max_steps.",
        )
    num_steps = jnp.minimum(jnp.asarray(num_steps, jnp.int32), max_steps)
    carry = (jnp.int32(0), cache, state, window)
    _, cache, state, window = lax.while_loop(going_on, body, carry)
    return cache, state, window
