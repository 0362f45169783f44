"""Log-probabilities of tokens, of raw logits or of what is sampled from, with the most likely ones.

A row's values are a function of its own logits and parameters: its sums have one order, whatever
the batch.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxinfer.compute.logits import LogitsHook, apply_hook, mask_padding, one_zero
from jaxinfer.compute.sampling import DISTRIBUTION, Distribution, distribution
from jaxinfer.compute.sharding import any_row, sampling_spec, shard, spec, vocabulary_of
from jaxinfer.compute.types import Logprobs, SamplingState
from jaxinfer.compute.vocabulary import (
    WHOLE,
    Vocabulary,
    VocabularySlice,
    fold_vocabulary,
    sum_pairs,
)


def token_logprobs(
    logits_BV: jax.Array,
    tokens_B: jax.Array,
    drawn_from: Distribution,
    sampling: SamplingState,
    *,
    max_logprobs: int,
    mesh: Mesh | None = None,
) -> Logprobs:
    """Those of `tokens_B` and of the C = max_logprobs most likely, [B] and [B, C].

    Zeros for rows that do not ask. `logits_BV` are the model's own, before any hook; rows that ask
    for "processed" have those of `drawn_from` instead.
    """
    logits, rows = spec("rows", "vocab"), spec("rows")
    pick = functools.partial(_pick_asked, max_logprobs=max_logprobs, vocabulary=vocabulary_of(mesh))
    in_specs = (logits, rows, DISTRIBUTION, sampling_spec(sampling))
    return shard(pick, mesh, in_specs, rows)(logits_BV, tokens_B, drawn_from, sampling)


def _pick_asked(
    logits_BV: jax.Array,
    tokens_B: jax.Array,
    drawn_from: Distribution,
    sampling: SamplingState,
    *,
    max_logprobs: int,
    vocabulary: Vocabulary,
) -> Logprobs:
    """`token_logprobs` on one shard."""
    processed_B = sampling.asks_logprobs_B & sampling.processed_logprobs_B

    def pick() -> Logprobs:
        raw_BV = raw_log_weights(logits_BV, sampling, vocabulary)
        weights_BV = lax.cond(
            vocabulary.any(processed_B),
            lambda: jnp.where(
                processed_B[:, None], drawn_from.log_weights(sampling, vocabulary), raw_BV
            ),
            lambda: raw_BV,
        )
        return pick_logprobs(weights_BV, tokens_B, vocabulary, max_logprobs=max_logprobs)

    nothing = init_logprobs(tokens_B.shape, max_logprobs)
    return lax.cond(vocabulary.any(sampling.asks_logprobs_B), pick, lambda: nothing)


def score_logits(
    logits_BV: jax.Array,
    tokens_B: jax.Array,
    sampling: SamplingState,
    *,
    max_logprobs: int,
    logits_hook: LogitsHook | None = None,
    mesh: Mesh | None = None,
) -> Logprobs:
    """Those of `tokens_B` and of the most likely, of rows that ask for "processed" of what `draw`
    would draw from.
    """
    vocabulary, logits, rows = vocabulary_of(mesh), spec("rows", "vocab"), spec("rows")
    asked = sampling_spec(sampling)

    def from_raw(logits_BV: jax.Array, sampling: SamplingState) -> jax.Array:
        return raw_log_weights(logits_BV, sampling, vocabulary)

    def from_drawn(
        logits_BV: jax.Array, hooked_BV: jax.Array, sampling: SamplingState
    ) -> jax.Array:
        drawn_from = distribution(hooked_BV, sampling, vocabulary)
        weights_BV = drawn_from.log_weights(sampling, vocabulary)
        is_processed_B1 = sampling.processed_logprobs_B[:, None]
        return jnp.where(is_processed_B1, weights_BV, from_raw(logits_BV, sampling))

    def raw() -> jax.Array:
        return shard(from_raw, mesh, (logits, asked), logits)(logits_BV, sampling)

    def processed() -> jax.Array:
        hooked_BV = apply_hook(logits_BV, sampling, logits_hook)
        draw_from = shard(from_drawn, mesh, (logits, logits, asked), logits)
        return draw_from(logits_BV, hooked_BV, sampling)

    weights_BV = lax.cond(any_row(mesh, sampling.processed_logprobs_B), processed, raw)
    pick = functools.partial(pick_logprobs, vocabulary=vocabulary, max_logprobs=max_logprobs)
    return shard(pick, mesh, (logits, rows), rows)(weights_BV, tokens_B)


def sampled_log_probs(
    logits_BV: jax.Array, sampling: SamplingState, *, logits_hook: LogitsHook | None = None
) -> jax.Array:
    """Log-probabilities [B, V] of the distribution that `sample` draws from, float32.

    -inf where a token cannot be drawn; a greedy row has 0 at its argmax and -inf elsewhere.
    """
    logits_BV = apply_hook(logits_BV, sampling, logits_hook)
    weights_BV = distribution(logits_BV, sampling).log_weights(sampling)
    top_B1, log_total_B1 = _normaliser(weights_BV, WHOLE)
    return (weights_BV - top_B1) - log_total_B1


def init_logprobs(shape: tuple[int, ...], max_logprobs: int) -> Logprobs:
    """Zeros for tokens of `shape`."""
    table = (*shape, max_logprobs)
    return Logprobs(
        chosen=jnp.zeros(shape, jnp.float32),
        top_ids=jnp.zeros(table, jnp.int32),
        top=jnp.zeros(table, jnp.float32),
    )


def raw_log_weights(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> jax.Array:
    """The model's own logits, float32, -inf in the padding of the head."""
    return mask_padding(one_zero(logits_BV.astype(jnp.float32)), sampling, vocabulary)


def pick_logprobs(
    weights_BV: jax.Array, tokens_B: jax.Array, vocabulary: Vocabulary, *, max_logprobs: int
) -> Logprobs:
    """The log-softmax of `weights_BV` at `tokens_B` and at the largest, ties by lower id.

    Beyond a vocabulary of fewer than `max_logprobs` ids stand id -1 and -inf.
    """
    top_B1, log_total_B1 = _normaliser(weights_BV, vocabulary)

    def normalised(weights_BX: jax.Array) -> jax.Array:
        return (weights_BX - top_B1) - log_total_B1  # in this order: top and total round apart

    num_top = min(max_logprobs, vocabulary.size(weights_BV))
    largest_BC, ids_BC = vocabulary.top_k(weights_BV, num_top)
    beyond = ((0, 0), (0, max_logprobs - num_top))
    return Logprobs(
        chosen=normalised(vocabulary.at(weights_BV, tokens_B)[:, None])[:, 0],
        top_ids=jnp.pad(ids_BC, beyond, constant_values=-1),
        top=jnp.pad(normalised(largest_BC), beyond, constant_values=-jnp.inf),
    )


def _normaliser(weights_BV: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array]:
    """The largest log-weight of each row, [B, 1], and the log of the sum of all relative to it."""
    top_B1 = vocabulary.max(weights_BV, keepdims=True)

    def add(total_B: jax.Array, part: VocabularySlice) -> jax.Array:
        weight_BX = jnp.exp(part.values_BX - top_B1)
        return total_B + sum_pairs(jnp.where(part.is_new_1X, weight_BX, 0.0))

    nothing_B = jnp.zeros(weights_BV.shape[0], jnp.float32)
    total_B = vocabulary.total(fold_vocabulary(add, nothing_B, weights_BV))
    # The total is at least 1. On CPU log, unlike log1p, rounds by how many rows there are.
    return top_B1, jnp.log1p(total_B - 1)[:, None]
