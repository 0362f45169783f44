"""The two phases as pure functions: prefill chunks of prompts, decode tokens.

All take and return pytrees, hold no state and may stand inside the caller's own `jit`, `scan` or
`shard_map`. Jit them with the cache (and state) donated and `model` static.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sampling import advance, sample
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
) -> tuple[KVCache, StepOutput]:
    """`(cache, output)`: the chunk's K/V written, and the token that follows each row's last one.

    For a row whose prompt goes on in a later chunk the token means nothing; rows of query length 0
    give -1.
    """
    cache, x_BD = prefill_hidden(model, params, cache, batch)
    logits_BV = model.unembed(params, x_BD)
    tokens_B = sample(logits_BV, sampling, batch.context_lens_B, logits_hook=logits_hook)
    tokens_B = jnp.where(batch.query_lens_B > 0, tokens_B, -1)
    return cache, StepOutput(tokens_B[:, None], logits_BV if return_logits else None)


def prefill_hidden(
    model: Decoder, params: Params, cache: KVCache, batch: PrefillBatch
) -> tuple[KVCache, Array]:
    """`(cache, x_BD)`: the chunk's K/V written; the hidden state of each row's last token.

    The part of `prefill_step` that every chunk needs; only a prompt's last one needs the rest.
    """
    with jax.named_scope("prefill"):
        cache, x_BTD = model(
            params,
            cache,
            batch.tokens_BT,
            batch.page_table_BM,
            batch.context_lens_B,
            batch.query_lens_B,
        )
        last_B = jnp.maximum(batch.query_lens_B - 1, 0)
        return cache, jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)[:, 0]


def start_decode(
    batch: PrefillBatch | DecodeState,
    sampling: SamplingState,
    tokens_B: Array,
    max_tokens_B: Array,
) -> DecodeState:
    """The state of rows whose prompts are in the cache and whose first tokens are `tokens_B`.

    A row whose first token is negative, is one of its stop ids, or was its last allowed starts
    inactive. `max_tokens_B` counts that first token.
    """
    produced_B = tokens_B >= 0
    going_on_B = produced_B & ~is_stop(tokens_B, sampling)
    return DecodeState(
        tokens_B=tokens_B,
        context_lens_B=batch.context_lens_B,
        remaining_B=jnp.where(going_on_B, max_tokens_B - 1, 0).astype(jnp.int32),
        page_table_BM=batch.page_table_BM,
        sampling=advance(sampling, tokens_B, produced_B),
    )


def only_active(sampling: SamplingState, active_B: Array) -> SamplingState:
    """The state with the other rows made greedy: the sampler does no work for them."""
    temperature_B = jnp.where(active_B, sampling.temperature_B, 0.0)
    return dataclasses.replace(sampling, temperature_B=temperature_B)


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
) -> tuple[KVCache, DecodeState, StepOutput]:
    """`(cache, state, output)`: one more token of each active row; -1 for the others."""
    with jax.named_scope("decode"):
        active_B = state.remaining_B > 0
        step_B = active_B.astype(jnp.int32)
        context_lens_B = state.context_lens_B + step_B
        tokens_B1 = jnp.maximum(state.tokens_B, 0)[:, None]
        cache, x_B1D = model(params, cache, tokens_B1, state.page_table_BM, context_lens_B, step_B)
        logits_BV = model.unembed(params, x_B1D[:, 0])
        sampling = only_active(state.sampling, active_B)
        sampled_B = sample(logits_BV, sampling, context_lens_B, logits_hook=logits_hook)
        going_on_B = active_B & ~is_stop(sampled_B, state.sampling)
        state = DecodeState(
            tokens_B=jnp.where(active_B, sampled_B, state.tokens_B),
            context_lens_B=context_lens_B,
            remaining_B=jnp.where(going_on_B, state.remaining_B - 1, 0),
            page_table_BM=state.page_table_BM,
            sampling=advance(state.sampling, sampled_B, active_B),
        )
    tokens_B = jnp.where(active_B, sampled_B, -1)
    return cache, state, StepOutput(tokens_B[:, None], logits_BV if return_logits else None)


def decode_window(
    model: Decoder,
    params: Params,
    cache: KVCache,
    state: DecodeState,
    num_steps: Array | int,
    *,
    max_steps: int = 8,
    logits_hook: LogitsHook | None = None,
) -> tuple[KVCache, DecodeState, StepOutput]:
    """`(cache, state, output)` after `num_steps` decode steps; `tokens_BW`, W = max_steps.

    `num_steps` may be traced: one executable serves every length up to `max_steps`. Each row stops
    by itself (stop id or budget); the loop ends early only when all have.
    """

    def going_on(carry):
        step, _, state, _ = carry
        return (step < num_steps) & jnp.any(state.remaining_B > 0)

    def body(carry):
        step, cache, state, tokens_BW = carry
        cache, state, output = decode_step(model, params, cache, state, logits_hook=logits_hook)
        tokens_BW = lax.dynamic_update_slice(tokens_BW, output.tokens_BW, (0, step))
        return step + 1, cache, state, tokens_BW

    tokens_BW = jnp.full((state.tokens_B.shape[0], max_steps), -1, jnp.int32)
    if isinstance(num_steps, int):
        require(
            num_steps <= max_steps,
            f"num_steps={num_steps} exceeds max_steps={max_steps}. Raise max_steps.",
        )
    num_steps = jnp.minimum(jnp.asarray(num_steps, jnp.int32), max_steps)
    carry = (jnp.int32(0), cache, state, tokens_BW)
    _, cache, state, tokens_BW = lax.while_loop(going_on, body, carry)
    return cache, state, StepOutput(tokens_BW)
