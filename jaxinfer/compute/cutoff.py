"""Where top-k, top-p and min-p cut: each keeps a prefix of the tokens by (logit, lower id).

No sort. The largest logits decide most rows; the others search their threshold bit by bit.
Temperature does not change the order, so cuts are on logits and only the weights are tempered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.compute.types import SamplingState
from jaxinfer.compute.vocabulary import (
    WHOLE,
    Vocabulary,
    VocabularySlice,
    fold_vocabulary,
    sum_pairs,
)

NUM_CANDIDATES = 128

# Below this temperature any gap between two float32 logits is certain: the draw is the argmax.
GREEDY_BELOW = np.float32(1e-30)

# A prefix reaches top_p when its mass is within this of it, so that rounding adds no token.
TOP_P_SLACK = np.float32(1e-6)

_MINUS_INF_KEY = np.int32(-(2**31) + 0x7FFFFF)


class Cutoff(NamedTuple):
    """The last token kept: greater logits, and equal ones of no higher id, are kept too."""

    logit_B: jax.Array
    id_B: jax.Array

    def keeps(self, logits_BX: jax.Array, ids_BX: jax.Array) -> jax.Array:
        """Which of tokens `ids_BX` with `logits_BX` are kept, bool [B, X]."""
        logit_B1, id_B1 = self.logit_B[:, None], self.id_B[:, None]
        return (logits_BX > logit_B1) | ((logits_BX == logit_B1) & (ids_BX <= id_B1))

    def where(self, condition_B: jax.Array, other: Cutoff) -> Cutoff:
        """This cutoff where `condition_B` holds, `other` elsewhere."""
        return Cutoff(*(jnp.where(condition_B, a, b) for a, b in zip(self, other)))

    def tighten(self, other: Cutoff) -> Cutoff:
        """The cutoff that keeps what both keep."""
        tie_B = self.logit_B == other.logit_B
        id_B = jnp.where(tie_B, jnp.minimum(self.id_B, other.id_B), self.id_B)
        return Cutoff(self.logit_B, id_B).where(self.logit_B >= other.logit_B, other)


class Candidates(NamedTuple):
    """Each row's largest logits, descending, ties by lower id; `enough_B`: no other is kept."""

    logits_BX: jax.Array
    ids_BX: jax.Array
    enough_B: jax.Array


def is_greedy(sampling: SamplingState) -> jax.Array:
    """Which rows take the argmax, bool [B]."""
    return sampling.temperature_B < GREEDY_BELOW


def temper(logits_BX: jax.Array, top_B: jax.Array, sampling: SamplingState) -> jax.Array:
    """(logit - largest) / temperature, [B, X]; greedy rows as if at temperature 1."""
    temperature_B = jnp.where(is_greedy(sampling), np.float32(1), sampling.temperature_B)
    return (logits_BX - top_B[:, None]) / temperature_B[:, None]


def find_cutoff(
    logits_BV: jax.Array,
    top_B: jax.Array,
    sampling: SamplingState,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Cutoff, Candidates]:
    """What the filters of each row keep; `top_B` are the largest logits. Greedy rows keep all."""
    rows, vocab = logits_BV.shape[0], vocabulary.size(logits_BV)
    num_candidates = min(NUM_CANDIDATES, vocab)
    filters_B = ~is_greedy(sampling) & (
        (sampling.top_k_B < vocab) | (sampling.top_p_B < 1) | (sampling.min_p_B > 0)
    )

    def keep_all() -> tuple[Cutoff, Candidates]:
        none = Candidates(
            jnp.zeros((rows, num_candidates), jnp.float32),
            jnp.zeros((rows, num_candidates), jnp.int32),
            jnp.zeros(rows, bool),
        )
        return open_cutoff(logits_BV, vocabulary), none

    def cut() -> tuple[Cutoff, Candidates]:
        cutoff, candidates = _cut_candidates(logits_BV, top_B, sampling, vocabulary)
        enough_B = candidates.enough_B & filters_B
        rest = _cut_rows(filters_B & ~enough_B, logits_BV, top_B, sampling, vocabulary)
        return cutoff.where(enough_B, rest), candidates._replace(enough_B=enough_B)

    return lax.cond(vocabulary.any(filters_B), cut, keep_all)


def open_cutoff(logits_BV: jax.Array, vocabulary: Vocabulary = WHOLE) -> Cutoff:
    """The cutoff of each row that keeps every token."""
    rows, vocab = logits_BV.shape[0], vocabulary.size(logits_BV)
    return Cutoff(jnp.full(rows, -jnp.inf, jnp.float32), jnp.full(rows, vocab - 1, jnp.int32))


def _cut_candidates(
    logits_BV: jax.Array, top_B: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> tuple[Cutoff, Candidates]:
    """The cutoff within the largest logits, and whether they were enough to know it."""
    vocab = vocabulary.size(logits_BV)
    logits_BX, ids_BX = vocabulary.top_k(logits_BV, min(NUM_CANDIDATES, vocab))
    rank_X = jnp.arange(logits_BX.shape[1], dtype=jnp.int32)
    in_top_k_BX = rank_X < sampling.top_k_B[:, None]
    weight_BX = jnp.where(in_top_k_BX, jnp.exp(temper(logits_BX, top_B, sampling)), 0.0)

    all_within_B = sampling.top_k_B <= logits_BX.shape[1]
    is_nucleus_B, all_kept_B = sampling.top_p_B < 1, sampling.top_k_B == vocab
    total_B = lax.cond(
        vocabulary.any(is_nucleus_B & all_kept_B & ~all_within_B),
        lambda: _normaliser(logits_BV, top_B, sampling, vocabulary),
        lambda: jnp.zeros_like(top_B),
    )
    total_B = jnp.where(all_within_B, sum_pairs(weight_BX), total_B)

    before_BX = jnp.cumsum(weight_BX, axis=-1) - weight_BX
    target_B = (sampling.top_p_B - TOP_P_SLACK) * total_B
    keep_BX = in_top_k_BX & (weight_BX >= sampling.min_p_B[:, None])
    keep_BX &= (before_BX < target_B[:, None]) | ~is_nucleus_B[:, None] | (rank_X == 0)
    last_B1 = jnp.sum(keep_BX, axis=-1, keepdims=True, dtype=jnp.int32) - 1

    knows_total_B = all_within_B | all_kept_B | ~is_nucleus_B
    enough_B = all_within_B | (~keep_BX[:, -1] & knows_total_B)
    cutoff = Cutoff(
        jnp.take_along_axis(logits_BX, last_B1, axis=1)[:, 0],
        jnp.take_along_axis(ids_BX, last_B1, axis=1)[:, 0],
    )
    return cutoff, Candidates(logits_BX, ids_BX, enough_B)


def _normaliser(
    logits_BV: jax.Array, top_B: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> jax.Array:
    """The sum [B] of the tempered weights of all tokens."""

    def add(total_B: jax.Array, part: VocabularySlice) -> jax.Array:
        weight_BX = jnp.exp(temper(part.values_BX, top_B, sampling))
        return total_B + sum_pairs(jnp.where(part.is_new_1X, weight_BX, 0.0))

    return vocabulary.total(fold_vocabulary(add, jnp.zeros_like(top_B), logits_BV))


def _cut_rows(
    rows_B: jax.Array,
    logits_BV: jax.Array,
    top_B: jax.Array,
    sampling: SamplingState,
    vocabulary: Vocabulary,
) -> Cutoff:
    """The exact cutoff of the rows in `rows_B`; the others keep all.

    One by one, so that a row's cost is its own and its sums round the same in any batch; all
    together where each sum is one of all shards, and so costs the same for many rows.
    """
    everything = open_cutoff(logits_BV, vocabulary)
    if vocabulary.columns is not None:

        def cut_all() -> Cutoff:
            return _cut_exactly(logits_BV, top_B, sampling, vocabulary).where(rows_B, everything)

        return lax.cond(vocabulary.any(rows_B), cut_all, lambda: everything)

    def cut_row(row: jax.Array, cutoff: Cutoff) -> Cutoff:
        def one(array: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, row, 1)

        def search() -> Cutoff:
            given = one(logits_BV), one(top_B), jax.tree.map(one, sampling)
            found = _cut_exactly(*given, vocabulary)
            return Cutoff(*(all_B.at[row].set(new[0]) for all_B, new in zip(cutoff, found)))

        return lax.cond(rows_B[row], search, lambda: cutoff)

    return lax.fori_loop(0, logits_BV.shape[0], cut_row, everything)


def _cut_exactly(
    logits_BV: jax.Array, top_B: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> Cutoff:
    """The cutoff of any filter, however many tokens it keeps."""
    ids_1V = vocabulary.ids(logits_BV)
    weight_BV = jnp.exp(temper(logits_BV, top_B, sampling))
    is_nucleus_B = sampling.top_p_B < 1

    def cut_top_k() -> Cutoff:
        most_B = sampling.top_k_B.astype(jnp.float32)
        return _reach(logits_BV, jnp.ones_like(weight_BV), most_B, vocabulary)

    def cut_top_p() -> Cutoff:
        within_BV = jnp.where(cutoff.keeps(logits_BV, ids_1V), weight_BV, 0.0)
        target_B = (sampling.top_p_B - TOP_P_SLACK) * vocabulary.sum(within_BV)
        target_B = jnp.maximum(target_B, np.float32(1e-30))
        return _reach(logits_BV, within_BV, target_B, vocabulary)

    everything = open_cutoff(logits_BV, vocabulary)
    is_cut = vocabulary.any(sampling.top_k_B < vocabulary.size(logits_BV))
    cutoff = lax.cond(is_cut, cut_top_k, lambda: everything)
    nucleus = lax.cond(vocabulary.any(is_nucleus_B), cut_top_p, lambda: everything)
    cutoff = cutoff.tighten(nucleus.where(is_nucleus_B, everything))
    likely_BV = weight_BV >= sampling.min_p_B[:, None]
    least_B = vocabulary.min(jnp.where(likely_BV, logits_BV, jnp.inf))
    return cutoff.tighten(everything._replace(logit_B=least_B))


def _reach(
    logits_BV: jax.Array, weight_BV: jax.Array, target_B: jax.Array, vocabulary: Vocabulary
) -> Cutoff:
    """The shortest prefix whose weights sum to `target_B`; equal logits have equal weight, or 0.

    Bisection over the integers that order as the float32 logits do: 32 sums, no sort.
    """
    vocab = vocabulary.size(logits_BV)
    key_BV = _flip_negative(lax.bitcast_convert_type(logits_BV, jnp.int32))

    def mass(selected_BV: jax.Array) -> jax.Array:
        return vocabulary.sum(jnp.where(selected_BV, weight_BV, 0.0))

    def reaches(key_B: jax.Array) -> jax.Array:
        return mass(key_BV >= key_B[:, None]) >= target_B

    key_B = jnp.maximum(_largest(reaches, target_B, 32), _MINUS_INF_KEY)
    tie_BV = (key_BV == key_B[:, None]) & (weight_BV > 0)
    weight_B = vocabulary.max(jnp.where(tie_BV, weight_BV, 0.0))
    missing_B = target_B - mass(key_BV > key_B[:, None])
    needed_B = jnp.ceil(missing_B / jnp.where(weight_B > 0, weight_B, 1.0)).astype(jnp.int32)
    needed_B = jnp.maximum(needed_B, 1)

    def is_early(id_B: jax.Array) -> jax.Array:
        earlier_BV = tie_BV & (vocabulary.ids(logits_BV) < id_B[:, None])
        return vocabulary.sum(earlier_BV.astype(jnp.int32)) < needed_B

    # Among equals the lower ids come first: the last kept has fewer than needed_B before it.
    id_B = jnp.minimum(_largest(is_early, target_B, vocab.bit_length()), vocab - 1)
    return Cutoff(lax.bitcast_convert_type(_flip_negative(key_B), jnp.float32), id_B)


def _largest(
    holds: Callable[[jax.Array], jax.Array], like_B: jax.Array, num_bits: int
) -> jax.Array:
    """The largest integers int32 [B] that satisfy `holds`, which is true up to some integer.

    They are sought bit by bit: over all int32 with 32 bits, over 0 .. 2**num_bits - 1 with fewer.
    """
    least = -(2**31) if num_bits == 32 else 0

    def set_bit(i: jax.Array, found_B: jax.Array) -> jax.Array:
        probe_B = found_B + (jnp.int32(1) << (num_bits - 1 - i))  # -2**31 wraps to 0
        return jnp.where(holds(probe_B), probe_B, found_B)

    return lax.fori_loop(0, num_bits, set_bit, jnp.full(like_B.shape, least, jnp.int32))


def _flip_negative(bits: jax.Array) -> jax.Array:
    """Int32 images that order as the floats with these bits do; its own inverse."""
    return bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))
