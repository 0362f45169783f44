"""The order of the work: which items have any, and which blocks of pages each of them sees.

An item is a row's block of queries; its steps are its blocks of pages. All here is scalar.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.mosaic_tpu.call import Call

Ref = Any
Scalar = Any  # a traced int32 or bool


@dataclass(frozen=True)
class Item:
    """Where an item's queries stand, and the pages and blocks of pages that they see.

    Its queries stand at `start .. stop - 1`, and see keys from `low` on.
    """

    row: Scalar
    start: Scalar
    stop: Scalar
    low: Scalar
    first_page: Scalar
    end_page: Scalar
    first_block: Scalar
    end_block: Scalar

    def or_else(self, other: Item, condition: Scalar) -> Item:
        """This item, or `other` where `condition` holds."""
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return Item(*[jnp.where(condition, theirs, mine) for mine, theirs in pairs])


@dataclass(frozen=True)
class Schedule:
    """The items of a call, in the order of the grid."""

    call: Call
    contexts: Ref
    query_lens: Ref
    window: Ref
    items_per_row: Scalar
    num_items: Scalar

    def has_queries(self, index: Scalar) -> Scalar:
        """Whether there is anything to do for item `index`."""
        row = lax.div(index, self.items_per_row)
        return lax.rem(index, self.items_per_row) * self.call.queries < self.query_lens[row]

    def next_item(self, index: Scalar) -> Scalar:
        """The first item from `index` on that has queries; `num_items` if none has."""

        def idle(index):
            inside = jnp.minimum(index, self.num_items - 1)
            return (index < self.num_items) & ~self.has_queries(inside)

        return lax.while_loop(idle, lambda index: index + 1, index)

    def item(self, index: Scalar) -> Item:
        """Item `index`, which has queries; beyond the last one, the last."""
        c, index = self.call, jnp.minimum(index, self.num_items - 1)
        row = lax.div(index, self.items_per_row)
        context = self.contexts[row]
        first = context - self.query_lens[row]
        start = first + lax.rem(index, self.items_per_row) * c.queries
        stop = jnp.minimum(start + c.queries, context)
        low = jnp.int32(0)
        if c.windowed:
            low = jnp.maximum(start - self.window[0] + 1, 0)
        first_page, end_page = lax.div(low, c.page_size), pl.cdiv(stop, c.page_size)
        first_block = lax.div(first_page, c.pages_per_block)
        end_block = pl.cdiv(end_page, c.pages_per_block)
        return Item(row, start, stop, low, first_page, end_page, first_block, end_block)

    def pages_read(self, item: Item, block: Scalar) -> tuple[Scalar, Scalar]:
        """`(low, high)`: the pages of a block that the item sees."""
        begin = block * self.call.pages_per_block
        high = jnp.minimum(item.end_page, begin + self.call.pages_per_block)
        return jnp.maximum(item.first_page, begin), high

    def pages_written(self, item: Item, block: Scalar) -> tuple[Scalar, Scalar]:
        """`(low, high)`: the pages of a block that take new tokens of the item."""
        low, high = self.pages_read(item, block)
        return jnp.maximum(lax.div(item.start, self.call.page_size), low), high
