"""Allocates the paged KV cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.compute.types import KVCache
from jaxinfer.config import CacheConfig, ModelConfig
from pallas_kernels.paged_attention import PageSpec


def init_cache(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    stacked: bool = False,
    platform: str | None = None,
) -> KVCache:
    """An empty cache: one array of pages per layer, or one for all if `stacked` (layers scanned).

    Takes `num_layers * num_pages * page bytes` of device memory, all of it now. Safe to call inside
    `jit`. The pages are those that `platform` wants; None: the default backend.
    """
    spec = PageSpec.of(
        config.num_kv_heads,
        cache.page_size,
        config.head_dim,
        cache.dtype,
        platform or jax.default_backend(),
    )
    shape = spec.shape(cache.num_pages)
    if stacked:
        return KVCache(pages=jnp.zeros((config.num_layers, *shape), spec.dtype))
    return KVCache(pages=tuple(jnp.zeros(shape, spec.dtype) for _ in range(config.num_layers)))
