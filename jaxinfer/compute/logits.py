"""The ordered transforms that turn raw logits into those that are sampled from.

The order is that of `TRANSFORMS`; temperature and the filters follow in `sampling`. A transform
runs only when a row of the batch asks for it, and never changes a row that does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compute.types import SamplingState
from jaxinfer.compute.vocabulary import WHOLE, Vocabulary

LogitsHook = Callable[[jax.Array, SamplingState], jax.Array]


def apply_hook(
    logits_BV: jax.Array, sampling: SamplingState, logits_hook: LogitsHook | None
) -> jax.Array:
    """Float32 logits [B, V] after the hook, which sees all columns wherever they lie.

    `logits_hook(logits_BV, sampling) -> logits_BV` is pure and sees the raw float32 logits before
    everything else; it must leave every row a finite logit.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    return (
        logits_BV if logits_hook is None else logits_hook(logits_BV, sampling).astype(jnp.float32)
    )


def process_logits(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary = WHOLE
) -> jax.Array:
    """Float32 logits [B, V] after every transform; what may not be sampled is -inf."""
    logits_BV = one_zero(logits_BV.astype(jnp.float32))
    for asks, transform in TRANSFORMS:
        logits_BV = lax.cond(
            vocabulary.any(asks(logits_BV, sampling, vocabulary)),
            functools.partial(transform, vocabulary=vocabulary),
            lambda logits_BV, sampling: logits_BV,
            logits_BV,
            sampling,
        )
    return logits_BV


def one_zero(logits_BV: jax.Array) -> jax.Array:
    """Logits without -0.0: it ties with 0.0 in every comparison, and so must their bits.

    Each transform is given such logits and returns such, as what follows all of them would be one
    more array.
    """
    return jnp.where(logits_BV == 0, jnp.zeros_like(logits_BV), logits_BV)


def mask_padding(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary = WHOLE
) -> jax.Array:
    """Logits with -inf in the columns that no token id of the tokenizer reaches."""
    ids_1V = vocabulary.ids(logits_BV)
    return jnp.where(ids_1V < sampling.num_ids_B[:, None], logits_BV, -jnp.inf)


def _add_bias(logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary) -> jax.Array:
    """No id stands twice in a row, so a sum need not be scattered: TPUs copy the logits for one."""
    rows_B1, ids_BC = _addresses(logits_BV, sampling.bias_ids_BC, vocabulary)
    biased_BC = logits_BV.at[rows_B1, ids_BC].get(mode="clip") + sampling.bias_BC
    return logits_BV.at[rows_B1, ids_BC].set(biased_BC, mode="drop")


def _keep_allowed(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> jax.Array:
    rows, width = logits_BV.shape
    # The words that hold the bits of these columns, which may begin within one.
    start = vocabulary.start(logits_BV)
    num_words = min(-(-width // 32) + 1, sampling.allowed_BU.shape[1])
    first = jnp.minimum(start // 32, sampling.allowed_BU.shape[1] - num_words)
    words_BU = lax.dynamic_slice_in_dim(sampling.allowed_BU, first, num_words, axis=1)
    bit_32 = jnp.arange(32, dtype=jnp.uint32)
    bits_BX = ((words_BU[:, :, None] >> bit_32) & jnp.uint32(1)).reshape(rows, -1)
    allowed_BV = lax.dynamic_slice_in_dim(bits_BX, start - first * 32, width, axis=1) == 1
    free_B1 = ~sampling.has_allowed_B[:, None]
    return jnp.where(allowed_BV | free_B1, logits_BV, -jnp.inf)


def _forbid_bad_words(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> jax.Array:
    """-inf for the last id of each bad word whose other ids are the newest of the output."""
    head_BCR = sampling.bad_words_BCR[:, :, :-1]
    newest_B1R = sampling.recent_BR[:, None, 1:]
    completes_BC = jnp.all((head_BCR == -1) | (head_BCR == newest_B1R), axis=-1)
    return _forbid(
        logits_BV, jnp.where(completes_BC, sampling.bad_words_BCR[:, :, -1], -1), vocabulary
    )


def _penalise(logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary) -> jax.Array:
    """Repetition over prompt and output, then presence and frequency over the output alone."""
    seen_BV = sampling.counts_BV > 0
    times_BV = (sampling.counts_BV >> 1).astype(jnp.float32)
    factor_B1 = sampling.repetition_penalty_B[:, None]
    scaled_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
    logits_BV = jnp.where(seen_BV, scaled_BV, logits_BV)
    presence_BV = jnp.where(times_BV > 0, sampling.presence_penalty_B[:, None], 0.0)
    penalty_BV = presence_BV + times_BV * sampling.frequency_penalty_B[:, None]
    return one_zero(logits_BV - penalty_BV)


def _hold_stop_ids(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> jax.Array:
    """-inf for the stop ids of the rows that have not produced `min_tokens` yet."""
    early_B1 = (sampling.num_output_B < sampling.min_tokens_B)[:, None]
    return _forbid(logits_BV, jnp.where(early_B1, sampling.stop_ids_BC, -1), vocabulary)


def _forbid(logits_BV: jax.Array, ids_BC: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Logits with -inf at `ids_BC` (-1: none); a row that this would leave empty stays as it is."""
    rows_B1, ids_BC = _addresses(logits_BV, ids_BC, vocabulary)
    before_BC = logits_BV.at[rows_B1, ids_BC].get(mode="clip")
    masked_BV = logits_BV.at[rows_B1, ids_BC].set(-jnp.inf, mode="drop")
    left_B1 = vocabulary.max(masked_BV, keepdims=True) > -jnp.inf
    after_BC = jnp.where(left_B1, -jnp.inf, before_BC)
    return masked_BV.at[rows_B1, ids_BC].set(after_BC, mode="drop")


def _addresses(
    logits_BV: jax.Array, ids_BC: jax.Array, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """Row and column indices for a scatter that drops what is out of range: -1, for one."""
    rows_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    return rows_B1, vocabulary.places(logits_BV, ids_BC)


# (which rows ask for it, what it does), in the order in which they apply.
TRANSFORMS = (
    (lambda logits_BV, s, v: s.num_ids_B < v.size(logits_BV), mask_padding),
    (lambda logits_BV, s, v: s.bias_ids_BC >= 0, _add_bias),
    (lambda logits_BV, s, v: s.has_allowed_B, _keep_allowed),
    (lambda logits_BV, s, v: s.bad_words_BCR[:, :, -1] >= 0, _forbid_bad_words),
    (
        lambda logits_BV, s, v: (
            (s.repetition_penalty_B != 1)
            | (s.presence_penalty_B != 0)
            | (s.frequency_penalty_B != 0)
        ),
        _penalise,
    ),
    (lambda logits_BV, s, v: s.num_output_B < s.min_tokens_B, _hold_stop_ids),
)
