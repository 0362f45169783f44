"""Tests on 8 devices, which `tests/test_on_eight_devices.py` runs; elsewhere they are left out."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from jaxinfer import ParallelConfig, load
from jaxinfer.compute import Decoder
from jaxinfer.compute import sharding as sh

from ..conftest import TINY

if jax.device_count() < 8:
    collect_ignore_glob = ["test_*.py"]


def tiny(name="llama", data=1, model=1):
    """`(model, params)` of a tiny checkpoint over so many devices."""
    return load(TINY / name, dtype="float32", parallel=ParallelConfig(data=data, model=model))


def mesh_of(data=1, model=1):
    """The mesh, also of one device."""
    return sh.mesh_over(ParallelConfig(data=data, model=model))


def random_params(config):
    """Params of a model without a mesh, made on the host: nothing is compiled for them."""
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(Decoder(config).init, jax.random.key(0))
    return jax.tree.map(
        lambda leaf: rng.normal(1 if leaf.ndim == 1 else 0, 0.2, leaf.shape).astype(np.float32),
        shapes,
    )


def spread(config, params, data=1, model=1):
    """The model over a mesh, and the params there."""
    mesh = sh.make_mesh(ParallelConfig(data=data, model=model))
    if mesh is None:
        return Decoder(config), params
    config = sh.fit_config(config, model)

    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: sh.repeat_kv_heads(path[-2].key, leaf, config), params
    )
    return Decoder(config, mesh=mesh), jax.device_put(params, sh.param_shardings(mesh, params))


def family(name, data=1, model=1, *, num_heads=None):
    """`(model, params)` of a tiny checkpoint; of random weights, where it has other heads."""
    if num_heads is None:
        return tiny(name, data, model)
    config = dataclasses.replace(tiny(name)[0].config, num_heads=num_heads)
    return spread(config, Decoder(config).init(jax.random.key(0)), data, model)


def fitting_heads(name, model):
    """The `num_heads` of a `family` that so many shards can split."""
    return None if tiny(name)[0].config.num_heads % model == 0 else 8
