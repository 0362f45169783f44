"""Tests on 8 devices, which `tests/test_on_eight_devices.py` runs; elsewhere they are left out."""

from __future__ import annotations

import jax

from jaxinfer import ParallelConfig, load
from jaxinfer.compute import sharding

from ..conftest import TINY

if jax.device_count() < 8:
    collect_ignore_glob = ["test_*.py"]


def tiny(name="llama", data=1, model=1):
    """`(model, params)` of a tiny checkpoint over so many devices."""
    return load(TINY / name, dtype="float32", parallel=ParallelConfig(data=data, model=model))


def mesh_of(data=1, model=1):
    """The mesh, also of one device."""
    return sharding.mesh_over(ParallelConfig(data=data, model=model))
