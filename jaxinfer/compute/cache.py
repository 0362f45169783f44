"""Allocates the paged KV cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.compute.sharding import cache_spec, is_mapped, num_data_shards, shardings
from jaxinfer.compute.types import KVCache
from jaxinfer.config import CacheConfig, ModelConfig
from pallas_kernels.paged_attention import PageSpec


def init_cache(
    config: ModelConfig,
    cache: CacheConfig,
    *,
    stacked: bool = False,
    platform: str | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """An empty cache: one array of pages per layer, or one for all if `stacked` (layers scanned).

    Takes `num_layers * num_pages * page bytes` of device memory, all of it now, and on a mesh as
    much for each shard along `data`: split over `model`. Safe to call inside `jit`. The pages are
    those that `platform` wants; None: that of the mesh, without one the default backend.
    """
    default = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    spec = PageSpec.of(
        config.num_kv_heads, cache.page_size, config.head_dim, cache.dtype, platform or default
    )
    shape = spec.shape(cache.num_pages * num_data_shards(mesh))

    def zeros() -> KVCache:
        if stacked:
            return KVCache(pages=jnp.zeros((config.num_layers, *shape), spec.dtype))
        return KVCache(pages=tuple(jnp.zeros(shape, spec.dtype) for _ in range(config.num_layers)))

    if mesh is None or is_mapped("data"):
        return zeros()
    out = shardings(mesh, cache_spec(jax.eval_shape(zeros)))
    return jax.jit(zeros, out_shardings=out)()
