"""Where arrays lie on a mesh of devices: rules as data, and the shardings that follow from them.

A mesh has two axes. `data` splits requests: rows of a batch and pages of the cache, which a page
table names by their number within the shard. `model` splits what the weights compute: heads,
feed-forward columns, vocabulary. `jax.jit` partitions by the shardings of operands; attention, the
products of fused weights and sampling, which it would take apart badly, are mapped with `shard`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer.compute.types import DecodeState, KVCache, SamplingState
from jaxinfer.compute.vocabulary import WHOLE, Vocabulary
from jaxinfer.config import ModelConfig, ParallelConfig, require

AXES = ("data", "model")

# Logical axis -> mesh axis. What is not here lies whole on every device.
RULES = {
    "rows": "data",
    "pages": "data",
    "kv_heads": "model",
    "heads": "model",
    "ffn": "model",
    "vocab": "model",
}

# Module -> the logical axes of its weight and of its bias; whole where it is not here.
PARAM_AXES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "embed": {"weight": ("vocab", None)},
    "head": {"weight": ("vocab", None)},
    "qkv": {"weight": ("kv_heads", None, None, None), "bias": ("kv_heads", None, None)},
    "q_norm": {"weight": ("kv_heads", None, None)},
    "k_norm": {"weight": ("kv_heads", None, None)},
    "out": {"weight": (None, "heads")},
    "gate_up": {"weight": (None, "ffn", None), "bias": (None, "ffn")},
    "up": {"weight": ("ffn", None), "bias": ("ffn",)},
    "down": {"weight": (None, "ffn")},
}


def spec(*axes: str | None) -> P:
    """The `PartitionSpec` of an array with these logical axes."""
    return P(*(None if axis is None else RULES[axis] for axis in axes))


def make_mesh(parallel: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """`mesh_over` them; None for one device, on which nothing needs to be placed."""
    require(
        isinstance(parallel, ParallelConfig),
        f"parallel={parallel!r} is no ParallelConfig. Write ParallelConfig(data=2, model=3).",
    )
    return None if parallel.num_devices == 1 else mesh_over(parallel, devices)


def mesh_over(parallel: ParallelConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first `data * model` devices (None: of JAX's default platform).

    If they are all, they are ordered by how they are connected. Raises ValueError if there are
    fewer.
    """
    devices = list(jax.devices() if devices is None else devices)
    count = parallel.num_devices
    require(
        len(devices) >= count,
        f"{parallel} takes {count} devices, and there are {len(devices)}. Ask for fewer. To try it "
        f"on CPU, start with XLA_FLAGS=--xla_force_host_platform_device_count={count}.",
    )
    shape, types = (parallel.data, parallel.model), (AxisType.Auto, AxisType.Auto)
    if len(devices) == count:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    # JAX orders whole boxes of a TPU slice only, and three devices of one are none.
    first = np.array(devices[:count]).reshape(shape)
    return Mesh(first, AXES, axis_types=types)


def num_model_shards(mesh: Mesh | None) -> int:
    """How many shards the weights of a mesh have; raises ValueError unless it has our axes."""
    if mesh is None:
        return 1
    require(
        mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto},
        f"The mesh has the axes {dict(zip(mesh.axis_names, mesh.axis_types))} and needs "
        f"{' and '.join(AXES)}, both AxisType.Auto. Make it with {__name__}.make_mesh.",
    )
    return mesh.shape["model"]


def fit_config(config: ModelConfig, num_shards: int) -> ModelConfig:
    """`config` as `num_shards` along `model` can compute it.

    Fewer kv heads than shards are repeated, so that each shard has the one that its query heads
    read. Raises ValueError where a size cannot be split.
    """
    name, kv_heads = f"ParallelConfig.model={num_shards}", config.num_kv_heads
    for what, size in (
        ("num_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
        ("vocab_size", config.vocab_size),
    ):
        require(
            size % num_shards == 0,
            f"{name} does not divide the model's {what}={size}. Choose a divisor of it.",
        )
    require(
        kv_heads % num_shards == 0 or num_shards % kv_heads == 0,
        f"{name} neither divides the model's num_kv_heads={kv_heads} nor is a multiple of it. "
        "Choose one that is.",
    )
    return dataclasses.replace(config, num_kv_heads=max(kv_heads, num_shards))


def has_kv_heads(module: str, ndim: int) -> bool:
    """Whether the first axis of a leaf of that attention module are the kv heads."""
    return module in ("qkv", "q_norm", "k_norm") and ndim >= 3


def repeat_kv_heads(module: str, leaf: Array, config: ModelConfig) -> Array:
    """`leaf` of the attention module of that name, with each kv head as often as `config` has it.

    Each copy takes its share of the head's queries with it, so the order of query heads stays.
    """
    K = config.num_kv_heads
    if not has_kv_heads(module, leaf.ndim) or leaf.shape[0] == K:
        return leaf
    old, rest = leaf.shape[0], leaf.shape[2:]

    def spread(queries: Array) -> Array:
        return queries.reshape(K, -1, *rest)

    def repeat(shared: Array) -> Array:
        return jnp.repeat(shared, K // old, axis=0)

    if module == "qkv":
        return jnp.concatenate([spread(leaf[:, :-2]), repeat(leaf[:, -2:])], axis=1)
    return spread(leaf) if module == "q_norm" else repeat(leaf)


def param_spec(module: str, kind: str, ndim: int) -> P:
    """Where the "weight" or "bias" of a module lies; stacked layers have an axis more in front."""
    axes = PARAM_AXES.get(module, {}).get(kind, ())
    if ndim < len(axes):
        return P()  # the norm of a head, which all heads share
    return spec(*((None,) * (ndim - len(axes)) if axes else ()), *axes)


def param_specs(params: Any) -> Any:
    """Where each leaf of `params`, which may be shapes, lies."""

    def of_leaf(path, leaf) -> P:
        module, kind = (key.key for key in path[-2:])
        return param_spec(module, kind, leaf.ndim)

    return jax.tree_util.tree_map_with_path(of_leaf, params)


def param_shardings(mesh: Mesh, params: Any) -> Any:
    """The sharding of each leaf of `params`, which may be shapes."""
    return shardings(mesh, param_specs(params))


def page_spec(pages: Array) -> P:
    """Where the pages of a layer, or those of all layers stacked, lie."""
    return spec(*(None,) * (pages.ndim - 4), "pages", "kv_heads")


def cache_spec(cache: KVCache) -> KVCache:
    """Where the pages lie, as a tree like `cache`."""
    return jax.tree.map(page_spec, cache)


def state_spec(state: DecodeState) -> DecodeState:
    """Where a decode state lies, as a tree like `state`."""
    return dataclasses.replace(
        jax.tree.map(lambda _: spec("rows"), state), sampling=sampling_spec(state.sampling)
    )


def sampling_spec(sampling: SamplingState) -> SamplingState:
    """Where a sampling state lies, as a tree like `sampling`."""
    rows = jax.tree.map(lambda _: spec("rows"), sampling)
    return dataclasses.replace(rows, counts_BV=spec("rows", "vocab"))


def vocabulary_of(mesh: Mesh | None) -> Vocabulary:
    """How logits are split inside of `shard`."""
    return WHOLE if mesh is None else Vocabulary(columns=RULES["vocab"], rows=RULES["rows"])


def shardings(mesh: Mesh, specs: Any) -> Any:
    """`specs` as shardings on `mesh`."""
    return jax.tree.map(
        lambda one: NamedSharding(mesh, one), specs, is_leaf=lambda one: isinstance(one, P)
    )


def is_mapped(axis: str) -> bool:
    """Whether what is traced now is one shard's part along the mesh axis `axis`."""
    return axis in jax.sharding.get_abstract_mesh().manual_axes


def num_data_shards(mesh: Mesh | None) -> int:
    """How many shards along `data` make up the arrays that are traced now."""
    return 1 if mesh is None or is_mapped("data") else mesh.shape["data"]


def rows_per_shard(mesh: Mesh | None, num_rows: int) -> int:
    """How many of a batch's rows each data shard has; ValueError if they cannot be shared out."""
    shards = num_data_shards(mesh)
    require(
        num_rows % shards == 0,
        f"The batch has {num_rows} rows, and the mesh has {shards} data shards. Fill it up with "
        "rows of query length 0.",
    )
    return num_rows // shards


def traced_for(mesh: Mesh | None) -> AbstractContextManager:
    """A context in which programs are traced for `mesh`, whatever mesh the caller has set."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def any_row(mesh: Mesh | None, holds_B: Array) -> Array:
    """Whether it holds of any row of any shard: what all shards decide together."""
    return most(mesh, jnp.any(holds_B).astype(jnp.int32)) > 0


def most(mesh: Mesh | None, count: Array) -> Array:
    """The largest `count` of any shard of requests: loops of all shards end together."""
    return count if mesh is None or not is_mapped("data") else lax.pmax(count, "data")


def shard(function: Callable, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable:
    """`function` of each shard's part of the arguments; `function` itself without a mesh.

    May stand inside the caller's own `shard_map` over `data`, which then counts as done. Raises
    ValueError inside one over `model`, along which the products would miss their sums.
    """
    if mesh is None:
        return function
    require(
        not is_mapped("model"),
        "A Decoder with a mesh stands inside a shard_map over its axis 'model'. "
        "Map over 'data' alone: axis_names={'data'}.",
    )
    return _map(function, mesh, in_specs, out_specs)


def over_data(function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """`function` of each shard along `data`, with its own rows and pages; within it, what `model`
    splits looks whole.
    """
    return _map(function, mesh, in_specs, out_specs, {"data"})


def _map(
    function: Callable, mesh: Mesh, in_specs: Any, out_specs: Any, axes: Iterable[str] = AXES
) -> Callable:
    """`function` mapped over `axes`, as far as it is not within a map over them already."""
    axes = {axis for axis in axes if not is_mapped(axis)}

    def narrow(one: P) -> P:
        names = (name if isinstance(name, tuple) else (name,) for name in one)
        return P(*(tuple(name for name in some if name in axes) or None for some in names))

    def narrowed(specs: Any) -> Any:
        return jax.tree.map(narrow, specs, is_leaf=lambda one: isinstance(one, P))

    return jax.shard_map(
        function,
        # Within another map JAX knows the mesh, of which some axes are taken.
        mesh=None if jax.sharding.get_abstract_mesh().manual_axes else mesh,
        in_specs=narrowed(in_specs),
        out_specs=narrowed(out_specs),
        axis_names=axes,
        check_vma=False,
    )
