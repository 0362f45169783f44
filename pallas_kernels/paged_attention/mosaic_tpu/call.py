"""What is static in one call of the kernel, and the buffers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import LANES, scale_lanes

# Of vector memory, for the compiler's own.
SPARE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Call:
    """What is static in one call of the kernel.

    Attributes:
        key_lanes: lanes 0:key_lanes of a page meet the queries, which are zero beyond the head dim.
        value_lanes: `(start, stop)` of the lanes that the weights meet.
        queries: query tokens of an item; group: query heads of a kv head.
        dtype: of the pages; dot_dtype: of the operands of both products.
    """

    num_pages: int
    num_heads: int
    page_size: int
    lanes: int
    table_width: int
    pages_per_block: int
    key_lanes: int
    value_lanes: tuple[int, int]
    queries: int
    group: int
    dtype: jnp.dtype
    dot_dtype: jnp.dtype
    soft_cap: float | None
    windowed: bool
    stacked: bool
    writes: bool
    sinks: bool
    scaled: bool

    @property
    def keys(self) -> int:
        """Slots of a block of pages."""
        return self.pages_per_block * self.page_size

    @property
    def rows(self) -> int:
        """Of a kv head's products: one for each query token and head of its group."""
        return self.queries * self.group

    @property
    def pages_written(self) -> int:
        """How many pages of one block an item can write at most."""
        return min(self.pages_per_block, (self.queries - 1) // self.page_size + 2)

    @property
    def scale_lanes(self) -> int:
        """Of a page's scales."""
        return scale_lanes(self.page_size)

    @property
    def value_width(self) -> int:
        """Lanes of the result."""
        return self.value_lanes[1] - self.value_lanes[0]

    @property
    def vmem_bytes(self) -> int:
        """Room for the buffers, for the blocks that the grid doubles, and for one head's scores."""
        K, R, wide = self.num_heads, self.rows, self.dot_dtype.itemsize
        pages = 2 * (self.pages_per_block + self.pages_written)
        pages *= K * self.page_size * self.lanes * self.dtype.itemsize
        if self.scaled:  # padded to tiles of 8 rows
            pages += 2 * self.pages_per_block * K * 4 * 8 * self.scale_lanes
        new = 2 * K * (self.queries + 32) * self.lanes * wide
        queries = 2 * K * R * self.key_lanes * wide
        results = 3 * K * R * self.value_width * 4
        softmax = (2 + 2 * self.sinks) * K * R * LANES * 4
        scores = 4 * 4 * R * self.keys + 4 * 4 * self.keys * self.lanes
        return pages + new + queries + results + softmax + scores + SPARE_BYTES

    @property
    def refs(self) -> list[str]:
        """The names of the kernel's refs, in order."""
        scalars = ["layer", "window", "table", "contexts", "query_lens"]
        both = self.writes and self.scaled
        inputs = ["q", *["sinks"] * self.sinks, *["new"] * self.writes, *["new_scales"] * both]
        inputs += ["pages", *["scales"] * self.scaled]
        outputs = ["out", *["written"] * self.writes, *["written_scales"] * both]
        scratch = ["top", "total", "sum", "kv", "arrived", "slot"]
        scratch += ["kv_scales"] * self.scaled
        scratch += ["patched", "sent", "in_flight"] * self.writes + ["patched_scales"] * both
        return scalars + inputs + outputs + scratch
