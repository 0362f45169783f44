"""One token per row: processed logits, temperature, filters, and one Gumbel-max draw.

A row's token is a function of its logits, its own parameters, its key and its position: other rows
decide only which code runs, never what it yields.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compute import noise
from jaxinfer.compute.cutoff import (
    Candidates,
    Cutoff,
    find_cutoff,
    is_greedy,
    open_cutoff,
    temper,
)
from jaxinfer.compute.logits import LogitsHook, process_logits
from jaxinfer.compute.types import SamplingState
from jaxinfer.compute.vocabulary import VocabularySlice, fold_vocabulary


class Distribution(NamedTuple):
    """What each row's token is drawn from: the processed logits, and which of them stay."""

    logits_BV: jax.Array
    best_B: jax.Array  # the id of the largest, the lowest of equals
    top_B: jax.Array  # the largest
    cutoff: Cutoff  # means nothing for greedy rows, whose best stays alone

    def log_weights(self, sampling: SamplingState) -> jax.Array:
        """Log-probabilities [B, V] up to a constant of each row; -inf where none is drawn."""
        ids_1V = _all_ids(self.logits_BV)
        tempered_BV = temper(self.logits_BV, self.top_B, sampling)
        return jnp.where(
            is_greedy(sampling)[:, None],
            jnp.where(ids_1V == self.best_B[:, None], 0.0, -jnp.inf),
            jnp.where(self.cutoff.keeps(self.logits_BV, ids_1V), tempered_BV, -jnp.inf),
        )


def sample(
    logits_BV: jax.Array,
    sampling: SamplingState,
    positions_B: jax.Array,
    *,
    logits_hook: LogitsHook | None = None,
) -> jax.Array:
    """The next token of each row, int32 [B].

    `positions_B` are the positions that these tokens take in their sequences: with the row's key
    they name the noise. For `logits_hook` see `process_logits`.
    """
    return draw(logits_BV, sampling, positions_B, logits_hook=logits_hook)[0]


def draw(
    logits_BV: jax.Array,
    sampling: SamplingState,
    positions_B: jax.Array,
    *,
    logits_hook: LogitsHook | None = None,
) -> tuple[jax.Array, Distribution]:
    """`(tokens_B, distribution)`: what `sample` gives, and what it was drawn from."""
    logits_BV = process_logits(logits_BV, sampling, logits_hook=logits_hook)
    best_B, top_B = _argmax(logits_BV, _all_ids(logits_BV), sampling)
    greedy_B = is_greedy(sampling)

    def take_best() -> tuple[jax.Array, Cutoff]:
        return best_B, open_cutoff(logits_BV)

    def take_drawn() -> tuple[jax.Array, Cutoff]:
        cutoff, candidates = find_cutoff(logits_BV, top_B, sampling)
        drawn_B = _draw(logits_BV, top_B, cutoff, candidates, sampling, jnp.asarray(positions_B))
        return jnp.where(greedy_B, best_B, drawn_B), cutoff

    tokens_B, cutoff = lax.cond(jnp.all(greedy_B), take_best, take_drawn)
    return tokens_B, Distribution(logits_BV, best_B, top_B, cutoff)


def distribution(
    logits_BV: jax.Array, sampling: SamplingState, *, logits_hook: LogitsHook | None = None
) -> Distribution:
    """What `draw` would draw from."""
    logits_BV = process_logits(logits_BV, sampling, logits_hook=logits_hook)
    best_B, top_B = _argmax(logits_BV, _all_ids(logits_BV), sampling)
    cutoff, _ = find_cutoff(logits_BV, top_B, sampling)
    return Distribution(logits_BV, best_B, top_B, cutoff)


def advance(sampling: SamplingState, tokens_B: jax.Array, active_B: jax.Array) -> SamplingState:
    """The state after the active rows produced `tokens_B`; the others' tokens are not looked at.

    The counts are scattered into: donated, they are updated in place.
    """
    counts_BV = jnp.asarray(sampling.counts_BV)
    recent_BR = jnp.asarray(sampling.recent_BR)
    rows_B = jnp.arange(counts_BV.shape[0], dtype=jnp.int32)
    ids_B = jnp.where(active_B, tokens_B, 0)
    count_B = counts_BV[rows_B, ids_B]
    largest = jnp.iinfo(counts_BV.dtype).max
    step_B = jnp.where(active_B & (count_B <= largest - 2), 2, 0).astype(counts_BV.dtype)
    shifted_BR = jnp.concatenate([recent_BR[:, 1:], ids_B[:, None].astype(jnp.int32)], axis=1)
    return dataclasses.replace(
        sampling,
        counts_BV=counts_BV.at[rows_B, ids_B].add(step_B),
        recent_BR=jnp.where(active_B[:, None], shifted_BR, recent_BR),
        num_output_B=sampling.num_output_B + active_B.astype(jnp.int32),
    )


def _all_ids(logits_BV: jax.Array) -> jax.Array:
    return jnp.arange(logits_BV.shape[1], dtype=jnp.int32)[None]


def _argmax(
    values_BX: jax.Array, ids_BX: jax.Array, sampling: SamplingState
) -> tuple[jax.Array, jax.Array]:
    """The id of each row's largest value, the lowest of equals, and that value.

    Two plain reductions, which XLA vectorises where it does not an argmax fused with its input. NaN
    equals no maximum and gives the last id of the tokenizer.
    """
    top_B = jnp.max(values_BX, axis=-1)
    last_B1 = jnp.asarray(sampling.num_ids_B)[:, None] - 1
    equal_BX = values_BX == top_B[:, None]
    return jnp.min(jnp.where(equal_BX, ids_BX, last_B1), axis=-1), top_B


def _draw(
    logits_BV: jax.Array,
    top_B: jax.Array,
    cutoff: Cutoff,
    candidates: Candidates,
    sampling: SamplingState,
    positions_B: jax.Array,
) -> jax.Array:
    """A token of each row's kept set: among the candidates where they hold it, else over V."""
    last_id_B = jnp.asarray(sampling.num_ids_B) - 1

    def noisy(logits_BX: jax.Array, ids_BX: jax.Array) -> jax.Array:
        kept_BX = cutoff.keeps(logits_BX, ids_BX)
        tempered_BX = jnp.where(kept_BX, temper(logits_BX, top_B, sampling), -jnp.inf)
        return tempered_BX + noise.gumbel(sampling.key_B2, positions_B, ids_BX, noise.SAMPLE)

    def draw_few() -> jax.Array:
        noisy_BX = noisy(candidates.logits_BX, candidates.ids_BX)
        return _argmax(noisy_BX, candidates.ids_BX, sampling)[0]

    def draw_many() -> jax.Array:
        def better(best: tuple[jax.Array, jax.Array], slice_: VocabularySlice):
            noisy_BX = noisy(slice_.values_BX, slice_.ids_1X)
            id_B, top_B = _argmax(noisy_BX, slice_.ids_1X, sampling)
            # Slices come in order of ids, so of equals the lower id is there already.
            is_better_B = top_B > best[1]
            return jnp.where(is_better_B, id_B, best[0]), jnp.where(is_better_B, top_B, best[1])

        nothing = (last_id_B, jnp.full_like(top_B, -jnp.inf))
        return fold_vocabulary(better, nothing, logits_BV)[0]

    nobody_B = jnp.zeros_like(positions_B, jnp.int32)
    few_B = lax.cond(jnp.any(candidates.enough_B), draw_few, lambda: nobody_B)
    has_many = jnp.any(~candidates.enough_B & ~is_greedy(sampling))
    many_B = lax.cond(has_many, draw_many, lambda: nobody_B)
    return jnp.where(candidates.enough_B, few_B, many_B)
