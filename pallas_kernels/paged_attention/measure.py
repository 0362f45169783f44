"""Calls of paged attention to measure: their operands, their least work, and their seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pallas_kernels.paged_attention.layout import PageSpec, ScaledPages


@dataclass(frozen=True)
class Shape:
    """A call in which all rows have one length.

    Attributes:
        rows, context, queries: sequences, tokens of each with the new ones, new tokens of each.
        group: query heads to a kv head.
        dtype: of the pages; int8 has scales.
    """

    rows: int
    context: int
    queries: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: str

    @property
    def page_spec(self) -> PageSpec:
        """The page of a TPU."""
        return PageSpec.of(self.kv_heads, self.page_size, self.head_dim, self.dtype, "tpu")

    @property
    def pages_per_row(self) -> int:
        """Width of the page table."""
        return -(-self.context // self.page_size)

    @property
    def cache_bytes(self) -> int:
        """Of keys and values that a call must read: of every row, once."""
        per_token = self.kv_heads * 2 * self.head_dim * self.page_spec.dtype.itemsize
        return self.rows * self.context * per_token

    @property
    def flops(self) -> int:
        """Of both products, for the keys that each query sees."""
        keys = self.queries * self.context - self.queries * (self.queries - 1) // 2
        return 4 * self.rows * keys * self.kv_heads * self.group * self.head_dim


def make_operands(shape: Shape, seed: int = 0) -> tuple[Any, ...]:
    """What `paged_attention` takes, random, on the device; each row's pages lie scattered."""
    rng, spec = np.random.default_rng(seed), shape.page_spec
    B, T, K, H, M = shape.rows, shape.queries, shape.kv_heads, shape.head_dim, shape.pages_per_row
    table = rng.permutation(B * M).reshape(B, M).astype(np.int32)
    keys = jax.random.split(jax.random.key(seed), 3)
    size = spec.shape(B * M)
    if spec.dtype == jnp.int8:
        values = jax.random.randint(keys[2], size, -127, 128, jnp.int8)
        pages = ScaledPages(values, jnp.full(spec.scales_shape(B * M), 1 / 127, jnp.float32))
    else:
        pages = jax.random.normal(keys[2], size, jnp.float32).astype(spec.dtype)
    return (
        jax.random.normal(keys[0], (B, T, K * shape.group, H), jnp.float32),
        jax.random.normal(keys[1], (B, T, K, 2 * H), jnp.float32),
        pages,
        jnp.asarray(table),
        jnp.full(B, shape.context, jnp.int32),
        jnp.full(B, shape.queries, jnp.int32),
    )


def seconds_per_call(call: Callable[..., Any], operands: tuple[Any, ...], calls: int) -> float:
    """Seconds of one of `calls` calls in a row on the device, the best of three times.

    The pages go from call to call, as they do from layer to layer; so none can be left out, and
    what starting a program costs is spread over all.
    """
    q_BTNH, new_kv_BTKL, pages, *where = operands

    @jax.jit
    def repeat(pages: Any, q_BTNH: Array, new_kv_BTKL: Array, where: list[Array]) -> Any:
        def once(_, carry):
            return call(q_BTNH, new_kv_BTKL, carry[1], *where)

        shape, _ = jax.eval_shape(call, q_BTNH, new_kv_BTKL, pages, *where)
        return lax.fori_loop(0, calls, once, (jnp.zeros(shape.shape, shape.dtype), pages))

    return best_seconds(lambda: repeat(pages, q_BTNH, new_kv_BTKL, where)) / calls


def best_seconds(run: Callable[[], Any], times: int = 3) -> float:
    """The least seconds of `times` runs, after one that is not counted."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds)
