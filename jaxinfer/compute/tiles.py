"""Rows computed a tile at a time, so that the bits of a row do not depend on what else there is.

A compiler chooses how it multiplies, sums and rounds by the shapes of a program. Here the shapes of
all arithmetic are those of one tile, whatever the program: a prompt whole or in chunks, one row
that decodes or thirty.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh

from jaxinfer.compute.sharding import most

# Of vector registers of 16 float32 a whole number, so that no row is a remainder computed apart.
TILE = 16

C = TypeVar("C")
R = TypeVar("R")
O = TypeVar("O")  # noqa: E741


def map_tiles(
    compute: Callable[[C, R, Array], tuple[C, O]],
    carry: C,
    rows: R,
    outputs: O,
    active_N: Array,
    mesh: Mesh | None = None,
) -> tuple[C, O]:
    """`(carry, outputs)` with the outputs of the active rows computed, those of others as given.

    `compute(carry, rows, active) -> (carry, outputs)` is given `TILE` rows at a time, the active
    ones in their order and then padding. It must compute each row alone, but may let rows see what
    earlier ones, or those of the same tile, have left in the carry. Leaves of `rows` and `outputs`
    are `[N, ...]`. Work follows the number of active rows, on a mesh those of the busiest shard.
    """
    N = active_N.shape[0]
    order_N = jnp.argsort(~active_N, stable=True)
    num_active = jnp.sum(active_N, dtype=jnp.int32)

    def tile(i: Array, state: tuple[C, O]) -> tuple[C, O]:
        carry, outputs = state
        at_R = i * TILE + jnp.arange(TILE, dtype=jnp.int32)
        is_active_R = at_R < num_active
        # Out of range, padding reads the last row and writes none.
        index_R = jnp.where(is_active_R, order_N.at[at_R].get(mode="clip"), N)
        some = jax.tree.map(lambda leaf: jnp.asarray(leaf).at[index_R].get(mode="clip"), rows)
        # Of a single row XLA would see that the padding repeats it, and compute it once for all.
        carry, made = compute(carry, *lax.optimization_barrier((some, is_active_R)))
        outputs = jax.tree.map(
            lambda leaf, new: leaf.at[index_R].set(new, mode="drop"), outputs, made
        )
        return carry, outputs

    # The number of tiles is traced, so that the loop is one in every program.
    num_tiles = most(mesh, -(-num_active // TILE))
    return lax.fori_loop(0, num_tiles, tile, (carry, outputs))
