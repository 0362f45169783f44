"""A whole generation in one pure function, without an engine: an example and a test oracle."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from jaxinfer.compute.cache import init_cache
from jaxinfer.compute.decoder import Decoder, Params, are_stacked
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sampling import advance, sample
from jaxinfer.compute.sharding import rows_per_shard
from jaxinfer.compute.steps import decode_window, is_stop, prefill_step, start_decode
from jaxinfer.compute.types import PrefillBatch, SamplingState
from jaxinfer.config import CacheConfig


def generate(
    model: Decoder,
    params: Params,
    tokens_BT: Array,
    prompt_lens_B: Array,
    sampling: SamplingState,
    *,
    max_tokens: int,
    use_cache: bool = True,
    page_size: int = 32,
    kv_dtype: str | None = None,
    logits_hook: LogitsHook | None = None,
) -> Array:
    """`tokens_BW` int32, W = max_tokens: what follows each prompt up to its stop id; then -1.

    May be jitted whole with `model`, `max_tokens`, `use_cache` and the other keywords static.
    Prompts are right-padded to T. With `use_cache=False` each step computes all tokens anew, which
    is what a KV cache saves: work per token grows with the length instead of staying constant. Both
    give the same tokens.

    Args:
        kv_dtype: dtype of the cached keys and values; None: that of the embedding.
    """
    dtype = kv_dtype or str(params["embed"]["weight"].dtype)
    B, T = tokens_BT.shape
    pages_per_seq = -(-(T + max_tokens) // page_size)
    num_pages = rows_per_shard(model.mesh, B) * pages_per_seq  # each shard counts from 0
    table_BM = jnp.arange(B * pages_per_seq, dtype=jnp.int32).reshape(B, pages_per_seq) % num_pages
    cache = init_cache(
        model.config,
        CacheConfig(num_pages=num_pages, page_size=page_size, dtype=dtype),
        stacked=are_stacked(params),
        mesh=model.mesh,
    )
    prompt_lens_B = jnp.asarray(prompt_lens_B, jnp.int32)
    batch = PrefillBatch(tokens_BT, prompt_lens_B, prompt_lens_B, table_BM)
    if not use_cache:
        return _recompute(model, params, cache, batch, sampling, max_tokens, logits_hook)
    cache, first = prefill_step(model, params, cache, batch, sampling, logits_hook=logits_hook)
    state = start_decode(
        batch, sampling, first.tokens_BW[:, 0], jnp.full(B, max_tokens, jnp.int32), mesh=model.mesh
    )
    _, _, rest = decode_window(
        model,
        params,
        cache,
        state,
        max_tokens - 1,
        max_steps=max(max_tokens - 1, 1),
        logits_hook=logits_hook,
    )
    return jnp.concatenate([first.tokens_BW, rest.tokens_BW], axis=1)[:, :max_tokens]


def _recompute(model, params, cache, batch, sampling, max_tokens, logits_hook) -> Array:
    """Generation that runs the whole sequence through the model for every token."""
    B = batch.tokens_BT.shape[0]
    rows = jnp.arange(B)

    def body(step, carry):
        cache, tokens_BT, lens_B, alive_B, sampling, out_BW = carry
        cache, x_BTD = model(params, cache, tokens_BT, batch.page_table_BM, lens_B, lens_B)
        logits_BV = model.unembed(params, x_BTD[rows, lens_B - 1])
        tokens_B = sample(logits_BV, sampling, lens_B, logits_hook=logits_hook, mesh=model.mesh)
        out_BW = out_BW.at[:, step].set(jnp.where(alive_B, tokens_B, -1))
        tokens_BT = tokens_BT.at[rows, lens_B].set(tokens_B)
        sampling_next = advance(sampling, tokens_B, alive_B, mesh=model.mesh)
        lens_B = lens_B + alive_B
        return (
            cache,
            tokens_BT,
            lens_B,
            alive_B & ~is_stop(tokens_B, sampling),
            sampling_next,
            out_BW,
        )

    carry = (
        cache,
        jnp.pad(batch.tokens_BT, ((0, 0), (0, max_tokens))),
        batch.context_lens_B,
        jnp.ones(B, bool),
        sampling,
        jnp.full((B, max_tokens), -1, jnp.int32),
    )
    return lax.fori_loop(0, max_tokens, body, carry)[-1]
