"""Reductions over the vocabulary slice by slice: no temporary as large as the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")

SLICE = 8192


class VocabularySlice(NamedTuple):
    """Some columns of an array [B, V]: their ids, and which of them no earlier slice has held."""

    values_BX: jax.Array
    ids_1X: jax.Array
    is_new_1X: jax.Array


def fold_vocabulary(
    combine: Callable[[T, VocabularySlice], T], initial: T, values_BV: jax.Array
) -> T:
    """`combine` over the slices of `values_BV` in order of ids, beginning with `initial`.

    The last slice ends with the last column and repeats some of the one before.
    """
    vocab = values_BV.shape[1]
    width = min(SLICE, vocab)

    def step(i: jax.Array, carry: T) -> T:
        start = jnp.minimum(i * width, vocab - width)
        values_BX = lax.dynamic_slice_in_dim(values_BV, start, width, axis=1)
        ids_1X = start + jnp.arange(width, dtype=jnp.int32)[None]
        return combine(carry, VocabularySlice(values_BX, ids_1X, ids_1X >= i * width))

    return lax.fori_loop(0, -(-vocab // width), step, initial)


def sum_pairs(values_BX: jax.Array) -> jax.Array:
    """Sums [B] over X by halving.

    These are elementwise additions, so their order is that of no backend, batch size or number of
    threads, and their rounding grows with log X alone.
    """
    width = 1 << (values_BX.shape[1] - 1).bit_length()
    while width > 1:
        width //= 2
        low_BX, high_BX = values_BX[:, :width], values_BX[:, width:]
        short = width - high_BX.shape[1]
        values_BX = low_BX + (jnp.pad(high_BX, ((0, 0), (0, short))) if short else high_BX)
    return values_BX[:, 0]
