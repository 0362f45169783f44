"""One token per row: processed logits, temperature, filters, and one Gumbel-max draw.

A row's token is a function of its logits, its own parameters, its key and its position: other rows
decide only which code runs, never what it yields. Given a mesh, each shard samples from its own
columns of the logits, and shards tell each other no more than some of the best.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from jaxinfer.compute import noise
from jaxinfer.compute.cutoff import (
    Candidates,
    Cutoff,
    find_cutoff,
    is_greedy,
    open_cutoff,
    temper,
)
from jaxinfer.compute.logits import LogitsHook, apply_hook, process_logits
from jaxinfer.compute.sharding import sampling_spec, shard, spec, vocabulary_of
from jaxinfer.compute.types import SamplingState
from jaxinfer.compute.vocabulary import WHOLE, Vocabulary, VocabularySlice, fold_vocabulary


class Distribution(NamedTuple):
    """What each row's token is drawn from: the processed logits, and which of them stay."""

    logits_BV: jax.Array
    best_B: jax.Array  # the id of the largest, the lowest of equals
    top_B: jax.Array  # the largest
    cutoff: Cutoff  # means nothing for greedy rows, whose best stays alone

    def log_weights(self, sampling: SamplingState, vocabulary: Vocabulary = WHOLE) -> jax.Array:
        """Log-probabilities [B, V] up to a constant of each row; -inf where none is drawn."""
        ids_1V = vocabulary.ids(self.logits_BV)
        tempered_BV = temper(self.logits_BV, self.top_B, sampling)
        return jnp.where(
            is_greedy(sampling)[:, None],
            jnp.where(ids_1V == self.best_B[:, None], 0.0, -jnp.inf),
            jnp.where(self.cutoff.keeps(self.logits_BV, ids_1V), tempered_BV, -jnp.inf),
        )


_LOGITS: Any = spec("rows", "vocab")
_ROWS: Any = spec("rows")
# Where a distribution lies.
DISTRIBUTION = Distribution(_LOGITS, _ROWS, _ROWS, Cutoff(_ROWS, _ROWS))


def sample(
    logits_BV: jax.Array,
    sampling: SamplingState,
    positions_B: jax.Array,
    *,
    logits_hook: LogitsHook | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """The next token of each row, int32 [B].

    `positions_B` are the positions that these tokens take in their sequences: with the row's key
    they name the noise. For `logits_hook` see `apply_hook`. `mesh`: what the rows and columns of
    the logits are split over.
    """
    return draw(logits_BV, sampling, positions_B, logits_hook=logits_hook, mesh=mesh)[0]


def draw(
    logits_BV: jax.Array,
    sampling: SamplingState,
    positions_B: jax.Array,
    *,
    logits_hook: LogitsHook | None = None,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, Distribution]:
    """`(tokens_B, distribution)`: what `sample` gives, and what it was drawn from."""
    sharded = shard(
        functools.partial(_sample, vocabulary=vocabulary_of(mesh)),
        mesh,
        in_specs=(_LOGITS, sampling_spec(sampling), _ROWS),
        out_specs=(_ROWS, DISTRIBUTION),
    )
    logits_BV = apply_hook(logits_BV, sampling, logits_hook)
    return sharded(logits_BV, sampling, jnp.asarray(positions_B))


def _sample(
    logits_BV: jax.Array,
    sampling: SamplingState,
    positions_B: jax.Array,
    *,
    vocabulary: Vocabulary,
) -> tuple[jax.Array, Distribution]:
    """`draw` of the logits after the hook, on one shard."""
    logits_BV = process_logits(logits_BV, sampling, vocabulary)
    best_B, top_B = _argmax(logits_BV, sampling, vocabulary)
    greedy_B = is_greedy(sampling)

    def take_best() -> tuple[jax.Array, Cutoff]:
        return best_B, open_cutoff(logits_BV, vocabulary)

    def take_drawn() -> tuple[jax.Array, Cutoff]:
        cutoff, candidates = find_cutoff(logits_BV, top_B, sampling, vocabulary)
        drawn_B = _draw(logits_BV, top_B, cutoff, candidates, sampling, positions_B, vocabulary)
        return jnp.where(greedy_B, best_B, drawn_B), cutoff

    tokens_B, cutoff = lax.cond(vocabulary.any(~greedy_B), take_drawn, take_best)
    return tokens_B, Distribution(logits_BV, best_B, top_B, cutoff)


def distribution(
    logits_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary = WHOLE
) -> Distribution:
    """What `draw` would draw from, of logits after the hook, on one shard."""
    logits_BV = process_logits(logits_BV, sampling, vocabulary)
    best_B, top_B = _argmax(logits_BV, sampling, vocabulary)
    cutoff, _ = find_cutoff(logits_BV, top_B, sampling, vocabulary)
    return Distribution(logits_BV, best_B, top_B, cutoff)


def advance(
    sampling: SamplingState, tokens_B: jax.Array, active_B: jax.Array, *, mesh: Mesh | None = None
) -> SamplingState:
    """The state after the active rows produced `tokens_B`; the others' tokens are not looked at.

    The counts are scattered into: donated, they are updated in place.
    """
    recent_BR = jnp.asarray(sampling.recent_BR)
    ids_B = jnp.where(active_B, tokens_B, 0)
    count = shard(
        functools.partial(_count, vocabulary=vocabulary_of(mesh)),
        mesh,
        in_specs=(_LOGITS, _ROWS, _ROWS),
        out_specs=_LOGITS,
    )
    shifted_BR = jnp.concatenate([recent_BR[:, 1:], ids_B[:, None].astype(jnp.int32)], axis=1)
    return dataclasses.replace(
        sampling,
        counts_BV=count(jnp.asarray(sampling.counts_BV), ids_B, active_B),
        recent_BR=jnp.where(active_B[:, None], shifted_BR, recent_BR),
        num_output_B=sampling.num_output_B + active_B.astype(jnp.int32),
    )


def _count(
    counts_BV: jax.Array, ids_B: jax.Array, active_B: jax.Array, *, vocabulary: Vocabulary
) -> jax.Array:
    """The counts with one more of each active row's id, on one shard."""
    rows_B = jnp.arange(counts_BV.shape[0], dtype=jnp.int32)
    places_B = vocabulary.places(counts_BV, ids_B)
    count_B = counts_BV.at[rows_B, places_B].get(mode="clip")
    largest = jnp.iinfo(counts_BV.dtype).max
    step_B = jnp.where(active_B & (count_B <= largest - 2), 2, 0).astype(counts_BV.dtype)
    return counts_BV.at[rows_B, places_B].add(step_B, mode="drop")


def _argmax(
    values_BV: jax.Array, sampling: SamplingState, vocabulary: Vocabulary
) -> tuple[jax.Array, jax.Array]:
    """The id of each row's largest value, the lowest of equals, and that value."""
    top_B = vocabulary.max(values_BV)
    id_B = _first(values_BV, top_B, vocabulary.ids(values_BV), sampling)
    return _least(id_B, vocabulary), top_B


def _first(
    values_BX: jax.Array, top_B: jax.Array, ids_BX: jax.Array, sampling: SamplingState
) -> jax.Array:
    """The lowest of the ids whose value is `top_B`.

    After a maximum a second plain reduction: XLA vectorises those where it does not an argmax fused
    with its input. NaN equals no maximum and gives the last id of the tokenizer.
    """
    last_B1 = jnp.asarray(sampling.num_ids_B)[:, None] - 1
    return jnp.min(jnp.where(values_BX == top_B[:, None], ids_BX, last_B1), axis=-1)


def _least(ids_B: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """The lowest of the ids that all shards have found."""
    return ids_B if vocabulary.columns is None else lax.pmin(ids_B, vocabulary.columns)


def _draw(
    logits_BV: jax.Array,
    top_B: jax.Array,
    cutoff: Cutoff,
    candidates: Candidates,
    sampling: SamplingState,
    positions_B: jax.Array,
    vocabulary: Vocabulary,
) -> jax.Array:
    """A token of each row's kept set: among the candidates where they hold it, else over V."""
    last_id_B = jnp.asarray(sampling.num_ids_B) - 1

    def noisy(logits_BX: jax.Array, ids_BX: jax.Array) -> jax.Array:
        kept_BX = cutoff.keeps(logits_BX, ids_BX)
        tempered_BX = jnp.where(kept_BX, temper(logits_BX, top_B, sampling), -jnp.inf)
        return tempered_BX + noise.gumbel(sampling.key_B2, positions_B, ids_BX, noise.SAMPLE)

    def draw_few() -> jax.Array:
        noisy_BX = noisy(candidates.logits_BX, candidates.ids_BX)
        return _first(noisy_BX, jnp.max(noisy_BX, axis=-1), candidates.ids_BX, sampling)

    def draw_many() -> jax.Array:
        def better(best: tuple[jax.Array, jax.Array], slice_: VocabularySlice):
            noisy_BX = noisy(slice_.values_BX, slice_.ids_1X)
            top_B = jnp.max(noisy_BX, axis=-1)
            id_B = _first(noisy_BX, top_B, slice_.ids_1X, sampling)
            # Slices come in order of ids, so of equals the lower id is there already.
            is_better_B = top_B > best[1]
            return jnp.where(is_better_B, id_B, best[0]), jnp.where(is_better_B, top_B, best[1])

        nothing = (last_id_B, jnp.full_like(top_B, -jnp.inf))
        id_B, largest_B = fold_vocabulary(better, nothing, logits_BV, vocabulary)
        is_best_B = largest_B == vocabulary.max(largest_B[:, None])
        return _least(jnp.where(is_best_B, id_B, last_id_B), vocabulary)

    nobody_B = jnp.zeros_like(positions_B, jnp.int32)
    few_B = lax.cond(vocabulary.any(candidates.enough_B), draw_few, lambda: nobody_B)
    has_many = vocabulary.any(~candidates.enough_B & ~is_greedy(sampling))
    many_B = lax.cond(has_many, draw_many, lambda: nobody_B)
    return jnp.where(candidates.enough_B, few_B, many_B)
