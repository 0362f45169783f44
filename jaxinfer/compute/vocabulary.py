"""What is done to arrays [B, V] along V, whole or split over a mesh: no shard ever sees the
columns of another, and no temporary is as large as the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")

SLICE = 8192


@dataclass(frozen=True)
class Vocabulary:
    """How the arrays [B, V] of a computation are split, as one shard of it sees them.

    Attributes:
        columns, rows: the mesh axes that V and B are split over; None: they are whole.

    Along `columns` all shards of a row come to the same results.
    """

    columns: str | None = None
    rows: str | None = None

    def size(self, values_BV: jax.Array) -> int:
        """V, of all shards together."""
        return values_BV.shape[1] * (1 if self.columns is None else lax.axis_size(self.columns))

    def start(self, values_BV: jax.Array) -> jax.Array | int:
        """The id of the first column."""
        if self.columns is None:
            return 0
        return lax.axis_index(self.columns).astype(jnp.int32) * values_BV.shape[1]

    def ids(self, values_BV: jax.Array) -> jax.Array:
        """The ids of the columns, int32 [1, V]."""
        return jnp.arange(values_BV.shape[1], dtype=jnp.int32)[None] + self.start(values_BV)

    def places(self, values_BV: jax.Array, ids: jax.Array) -> jax.Array:
        """Where the columns of `ids` are, for a scatter or gather that drops what is out of range:
        that width for ids that are not here, and for -1, which would wrap.
        """
        width = values_BV.shape[1]
        places = ids - self.start(values_BV)
        return jnp.where((places < 0) | (places >= width), width, places)

    def at(self, values_BV: jax.Array, ids_B: jax.Array) -> jax.Array:
        """The values [B] of ids that exist."""
        if self.columns is None:
            return jnp.take_along_axis(values_BV, ids_B[:, None], axis=1)[:, 0]
        places_B1 = self.places(values_BV, ids_B)[:, None]
        found_B1 = jnp.take_along_axis(values_BV, places_B1, axis=1, mode="clip")
        return self.sum(jnp.where(places_B1 < values_BV.shape[1], found_B1, 0))

    def max(self, values_BV: jax.Array, *, keepdims: bool = False) -> jax.Array:
        """The largest value of each row."""
        top = jnp.max(values_BV, axis=-1, keepdims=keepdims)
        return top if self.columns is None else lax.pmax(top, self.columns)

    def min(self, values_BV: jax.Array) -> jax.Array:
        """The least value of each row."""
        least = jnp.min(values_BV, axis=-1)
        return least if self.columns is None else lax.pmin(least, self.columns)

    def sum(self, values_BV: jax.Array) -> jax.Array:
        """The sum of each row."""
        return self.total(jnp.sum(values_BV, axis=-1))

    def total(self, sums_B: jax.Array) -> jax.Array:
        """The sums over all columns, of those over the columns here."""
        return sums_B if self.columns is None else lax.psum(sums_B, self.columns)

    def any(self, holds_B: jax.Array) -> jax.Array:
        """Whether it holds of any row: what all shards decide together, as their branches meet."""
        found = jnp.any(holds_B)
        return found if self.rows is None else lax.pmax(found.astype(jnp.int32), self.rows) > 0

    def top_k(self, values_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The `k` largest float32 values of each row, descending, and their ids; ties by lower id.

        Of other shards only the `k` largest come.
        """
        here_BX, ids_BX = lax.top_k(values_BV, min(k, values_BV.shape[1]))
        if self.columns is None:
            return here_BX, ids_BX
        # One collective for both. Shards come in order of ids, so of equals the lower id is first.
        bits_BX = lax.bitcast_convert_type(here_BX, jnp.int32)
        pairs_2BX = jnp.stack([bits_BX, ids_BX + self.start(values_BV)])
        bits_BX, ids_BX = lax.all_gather(pairs_2BX, self.columns, axis=2, tiled=True)
        top_BX, places_BX = lax.top_k(lax.bitcast_convert_type(bits_BX, jnp.float32), k)
        return top_BX, jnp.take_along_axis(ids_BX, places_BX, axis=1)


WHOLE = Vocabulary()


class VocabularySlice(NamedTuple):
    """Some columns of an array [B, V]: their ids, and which of them no earlier slice has held."""

    values_BX: jax.Array
    ids_1X: jax.Array
    is_new_1X: jax.Array


def fold_vocabulary(
    combine: Callable[[T, VocabularySlice], T],
    initial: T,
    values_BV: jax.Array,
    vocabulary: Vocabulary = WHOLE,
) -> T:
    """`combine` over the slices of `values_BV` in order of ids, beginning with `initial`; of the
    columns here alone.

    The last slice ends with the last column and repeats some of the one before.
    """
    vocab = values_BV.shape[1]
    width = min(SLICE, vocab)

    def step(i: jax.Array, carry: T) -> T:
        start = jnp.minimum(i * width, vocab - width)
        values_BX = lax.dynamic_slice_in_dim(values_BV, start, width, axis=1)
        columns_1X = start + jnp.arange(width, dtype=jnp.int32)[None]
        ids_1X = columns_1X + vocabulary.start(values_BV)
        return combine(carry, VocabularySlice(values_BX, ids_1X, columns_1X >= i * width))

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
