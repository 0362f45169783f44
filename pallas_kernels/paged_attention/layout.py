"""How keys and values lie in pages, how new ones are written and pages copied.

A page is `[K, p, lanes]`: per kv head, p slots with the key in lanes `0:H` and the value in `H:2H`.
The cache of a layer is `[P, K, p, lanes]`, or `[L, P, K, p, lanes]` with a layer index. bfloat16
pages may be stored as their bits in uint16, which is what XLA:CPU updates in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class PageSpec:
    """The shape and storage of one page, as a platform wants them."""

    num_kv_heads: int
    page_size: int
    lanes: int
    dtype: jnp.dtype

    @classmethod
    def of(
        cls, num_kv_heads: int, page_size: int, head_dim: int, dtype: str, platform: str
    ) -> PageSpec:
        """The page that `platform` ("cpu", "gpu", "tpu") reads fastest for values of `dtype`."""
        lanes = 2 * head_dim
        if platform == "tpu":
            lanes = -(-lanes // 128) * 128
        bits = platform == "cpu" and dtype == "bfloat16"
        return cls(num_kv_heads, page_size, lanes, jnp.dtype("uint16" if bits else dtype))

    def shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """`[P, K, p, lanes]`."""
        return (num_pages, self.num_kv_heads, self.page_size, self.lanes)


def from_storage(kv: Array) -> Array:
    """Stored keys and values as numbers: bfloat16 where they are kept as bits."""
    return jax.lax.bitcast_convert_type(kv, jnp.bfloat16) if kv.dtype == jnp.uint16 else kv


def to_storage(kv: Array, dtype: jnp.dtype) -> Array:
    """Numbers as a page of `dtype` stores them."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
    return kv.astype(dtype)


def write_kv(
    pages: Array,
    new_kv_BTKL: Array,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    layer: Array | None = None,
) -> Array:
    """The pages with the new keys and values in their slots.

    Query t of row b goes to position `context_lens[b] - query_lens[b] + t`. Queries from
    `query_lens[b]` on, and those whose page-table entry is `num_pages`, change nothing.
    """
    num_pages, page_size = pages.shape[-4], pages.shape[-2]
    lanes = pages.shape[-1]
    steps_T = jnp.arange(new_kv_BTKL.shape[1], dtype=jnp.int32)
    positions_BT = (context_lens_B - query_lens_B)[:, None] + steps_T
    page_BT = jnp.take_along_axis(page_table_BM, positions_BT // page_size, axis=1, mode="clip")
    # An index equal to num_pages is out of range and dropped; a negative one would wrap.
    page_BT = jnp.where(steps_T < query_lens_B[:, None], page_BT, num_pages)
    slot_BT = positions_BT % page_size
    kv = jnp.pad(new_kv_BTKL, [(0, 0)] * 3 + [(0, lanes - new_kv_BTKL.shape[-1])])
    kv = to_storage(kv, pages.dtype)
    if layer is None:
        return pages.at[page_BT, :, slot_BT].set(kv, mode="drop")
    return pages.at[layer, page_BT, :, slot_BT].set(kv, mode="drop")


def read_pages(pages: Array, page_ids: Array, *, layer: Array | None = None) -> Array:
    """`[..., M, K, p, lanes]`: the pages of ids `[..., M]`; any page for an id out of range."""
    if layer is None:
        return pages.at[page_ids].get(mode="clip")
    return pages.at[layer, page_ids].get(mode="clip")


def copy_pages(pages: Array, sources_C: Array, destinations_C: Array) -> Array:
    """The pages, of one layer or stacked, with page `destinations[c]` now a copy of `sources[c]`.

    All are read before any is written. Destinations out of range, such as `num_pages`, are padding
    and change nothing, whatever their source. Donate the pages: they are updated in place.
    """
    every_layer = (slice(None),) * (pages.ndim - 4)
    copied = pages.at[(*every_layer, sources_C)].get(mode="clip")
    # Not wrapped, so that a negative destination too is out of range.
    at = pages.at[(*every_layer, destinations_C)]
    return at.set(copied, mode="drop", wrap_negative_indices=False)
