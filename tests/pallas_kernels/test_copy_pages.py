"""Whole pages are copied, in place, and nothing else changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import copy_pages

SHAPES = {"layer": (11, 2, 4, 8), "stacked": (3, 11, 2, 4, 8)}
DTYPES = ("float32", "bfloat16", "uint16")


def random_pages(shape, dtype):
    rng = np.random.default_rng(len(shape))
    values = rng.integers(0, 2**16, shape) if dtype == "uint16" else rng.standard_normal(shape)
    return jnp.asarray(values, dtype).at[..., 6, :, 1, :].set(jnp.nan if dtype != "uint16" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(
    "pairs",
    [
        [(2, 5)],
        [(2, 5), (2, 0), (6, 10)],
        [(1, 2), (2, 3), (3, 1)],  # read before any is written
        [(4, 4)],
        [(2, 11), (3, 6), (0, 11), (11, 11), (99, 12)],
        [(1, -1), (2, -11), (3, -12), (-1, 11)],
    ],
)
def test_copies_what_is_in_range_alone(pairs, kind, dtype):
    pages = random_pages(SHAPES[kind], dtype)
    before = np.asarray(pages.astype(jnp.float32))  # exact, whatever the type
    want = before.copy()
    for source, destination in pairs:
        if 0 <= destination < 11:
            want[..., destination, :, :, :] = before[..., source, :, :, :]
    sources_C, destinations_C = jnp.array(pairs, jnp.int32).T
    got = jax.jit(copy_pages)(pages, sources_C, destinations_C)
    assert (got.shape, got.dtype) == (pages.shape, pages.dtype)
    np.testing.assert_array_equal(got.astype(jnp.float32), want)


@pytest.mark.parametrize("dtype", ["float32", "uint16"])  # what XLA:CPU updates in place
@pytest.mark.parametrize("shape", [(512, 2, 16, 32), (3, 512, 2, 16, 32)])
def test_donated_pages_are_updated_in_place(shape, dtype):
    pages, num_copies = jnp.ones(shape, dtype), 4
    ids_C = jnp.arange(num_copies, dtype=jnp.int32)
    jitted = jax.jit(copy_pages, donate_argnums=0)
    memory = jitted.lower(pages, ids_C, ids_C + 9).compile().memory_analysis()
    assert memory.alias_size_in_bytes == pages.nbytes
    assert memory.temp_size_in_bytes <= 2 * num_copies * pages.nbytes // 512 + 1024
    address = pages.unsafe_buffer_pointer()
    copied = jitted(pages, ids_C, ids_C + 9)
    assert pages.is_deleted()
    assert copied.unsafe_buffer_pointer() == address
