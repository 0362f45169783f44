"""How keys and values lie in pages, how new ones are written and pages copied.

A page is `[K, p, lanes]`: per kv head, p slots with the key in lanes `0:H` and the value in `H:2H`.
The cache of a layer is `[P, K, p, lanes]`, or `[L, P, K, p, lanes]` with a layer index. bfloat16
pages may be stored as their bits in uint16, which is what XLA:CPU updates in place. Of a latent
attention (MLA) a slot holds one vector of H lanes, key and value at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

LANES = 128  # of a TPU's vector register

# The largest number of each type that needs scales, or that the values are cut to without.
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledPages:
    """Pages of int8 or float8 and what their numbers are multiplied by.

    `scales` is float32 `[P, K, 1, 2p rounded up]`, or with L in front: per page and kv head the
    scales of its p keys, then those of its p values. `PageSpec.scales_shape` gives it.
    """

    values: Array
    scales: Array


Pages = Array | ScaledPages


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
        lanes = _stored_lanes(2 * head_dim, platform)
        return cls(num_kv_heads, page_size, lanes, _stored_dtype(dtype, platform))

    @classmethod
    def of_latent(cls, page_size: int, latent_dim: int, dtype: str, platform: str) -> PageSpec:
        """The page of a latent attention, whose key is the whole vector of `latent_dim` lanes."""
        lanes = _stored_lanes(latent_dim, platform)
        return cls(1, page_size, lanes, _stored_dtype(dtype, platform))

    def shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """`[P, K, p, lanes]`."""
        return (num_pages, self.num_kv_heads, self.page_size, self.lanes)

    def scales_shape(self, num_pages: int) -> tuple[int, int, int, int]:
        """`[P, K, 1, 2p rounded up]`: whole registers, or XLA would lay pages innermost on TPU."""
        return (num_pages, self.num_kv_heads, 1, scale_lanes(self.page_size))


def whole_lanes(lanes: int) -> int:
    """`lanes` rounded up to whole registers."""
    return -(-lanes // LANES) * LANES


def scale_lanes(page_size: int) -> int:
    """Lanes of a page's scales: those of the keys, then those of the values, in whole registers."""
    return whole_lanes(2 * page_size)


def _stored_lanes(lanes: int, platform: str) -> int:
    return whole_lanes(lanes) if platform == "tpu" else lanes


def _stored_dtype(dtype: str, platform: str) -> jnp.dtype:
    bits = platform == "cpu" and dtype == "bfloat16"
    return jnp.dtype("uint16" if bits else dtype)


def values_of(pages: Pages) -> Array:
    """The array of the pages, without the scales if there are any."""
    return pages.values if isinstance(pages, ScaledPages) else pages


def from_storage(kv: Array) -> Array:
    """Stored keys and values as numbers: bfloat16 where they are kept as bits or in 8 bits."""
    if kv.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(kv, jnp.bfloat16)
    return kv.astype(jnp.bfloat16) if kv.dtype.itemsize == 1 else kv


def to_storage(kv: Array, dtype: jnp.dtype) -> Array:
    """Numbers as a page of `dtype` stores them."""
    if dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(kv.astype(jnp.bfloat16), jnp.uint16)
    if dtype == jnp.float8_e4m3fn:  # which has no infinity: what is too large would become NaN
        kv = jnp.clip(kv, -LARGEST["float8_e4m3fn"], LARGEST["float8_e4m3fn"])
    return kv.astype(dtype)


def quantize(new_kv_BTKL: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """`(values_BTKL, scales_BTK2)`: keys and values in `dtype`, each vector by its own largest."""
    *rows, L = new_kv_BTKL.shape
    kv = new_kv_BTKL.astype(jnp.float32).reshape(*rows, 2, L // 2)
    largest = jnp.abs(kv).max(-1, keepdims=True)
    limit = LARGEST[dtype.name]
    scales = jnp.where(largest > 0, largest / limit, 1.0)
    values = kv / scales
    if dtype == jnp.int8:
        values = jnp.round(values)
    return to_storage(values, dtype).reshape(*rows, L), scales[..., 0]


def write_kv(
    pages: Pages,
    new_kv_BTKL: Array,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    layer: Array | None = None,
) -> Pages:
    """The pages with the new keys and values in their slots.

    Query t of row b goes to position `context_lens[b] - query_lens[b] + t`. Queries from
    `query_lens[b]` on, and those whose page-table entry is `num_pages`, change nothing.
    """
    values = values_of(pages)
    num_pages, _, page_size, lanes = values.shape[-4:]
    steps_T = jnp.arange(new_kv_BTKL.shape[1], dtype=jnp.int32)
    positions_BT = (context_lens_B - query_lens_B)[:, None] + steps_T
    page_BT = jnp.take_along_axis(page_table_BM, positions_BT // page_size, axis=1, mode="clip")
    # An index equal to num_pages is out of range and dropped; a negative one would wrap.
    page_BT = jnp.where(steps_T < query_lens_B[:, None], page_BT, num_pages)
    slot_BT = positions_BT % page_size

    def write(array: Array, at: tuple[Array | slice | int, ...], new: Array) -> Array:
        return array.at[at if layer is None else (layer, *at)].set(new, mode="drop")

    def write_values(kv_BTKL: Array) -> Array:
        kv = jnp.pad(kv_BTKL, [(0, 0)] * 3 + [(0, lanes - kv_BTKL.shape[-1])])
        return write(values, (page_BT, slice(None), slot_BT), kv)

    if not isinstance(pages, ScaledPages):
        return write_values(to_storage(new_kv_BTKL, values.dtype))
    kv_BTKL, scales_BTK2 = quantize(new_kv_BTKL, values.dtype)
    slot_BT2 = jnp.stack([slot_BT, page_size + slot_BT], axis=-1)
    at = (page_BT[..., None], slice(None), 0, slot_BT2)
    scales = write(pages.scales, at, scales_BTK2.swapaxes(-1, -2))
    return ScaledPages(write_values(kv_BTKL), scales)


def read_pages(
    pages: Pages, page_ids: Array, *, head_dim: int, layer: Array | None = None
) -> Array:
    """`[..., M, K, p, lanes]`: the numbers of the pages of ids `[..., M]`; any page for an id out
    of range.
    """
    at = (page_ids,) if layer is None else (layer, page_ids)
    kv = from_storage(values_of(pages).at[at].get(mode="clip"))
    if isinstance(pages, ScaledPages):
        scales = pages.scales.at[at].get(mode="clip")[..., 0, :, None]
        p = kv.shape[-2]
        is_value = jnp.arange(kv.shape[-1]) >= head_dim
        kv = kv.astype(jnp.float32)
        kv *= jnp.where(is_value, scales[..., p : 2 * p, :], scales[..., :p, :])
    return kv


def copy_pages(pages: Pages, sources_C: Array, destinations_C: Array) -> Pages:
    """The pages, of one layer or stacked, with page `destinations[c]` now a copy of `sources[c]`.

    All are read before any is written. Destinations out of range, such as `num_pages`, are padding
    and change nothing, whatever their source. Donate the pages: they are updated in place.
    """

    def copy(array: Array) -> Array:
        every_layer = (slice(None),) * (array.ndim - 4)
        copied = array.at[(*every_layer, sources_C)].get(mode="clip")
        # Not wrapped, so that a negative destination too is out of range.
        at = array.at[(*every_layer, destinations_C)]
        return at.set(copied, mode="drop", wrap_negative_indices=False)

    return jax.tree.map(copy, pages)
