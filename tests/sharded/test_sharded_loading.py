"""Each device gets its own part of a checkpoint, and the host reads each row once."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer import ParallelConfig, load
from jaxinfer.checkpoint import load_params, open_checkpoint, save_orbax
from jaxinfer.checkpoint.safetensors import SafetensorsReader
from jaxinfer.compute.sharding import make_mesh, param_shardings, repeat_kv_heads

from ..conftest import TINY, TINY_NAMES
from .conftest import tiny


def assert_placed(model, params, whole):
    """Every leaf is where the rules say, with the bits of the whole one."""
    places = param_shardings(model.mesh, params)
    leaves = zip(
        jax.tree.flatten_with_path(params)[0], jax.tree.leaves(whole), jax.tree.leaves(places)
    )
    for (path, leaf), one, place in leaves:
        if path[0].key == "layers":
            one = repeat_kv_heads(path[-2].key, one, model.config)  # noqa: PLW2901
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim), path
        np.testing.assert_array_equal(leaf, one)
    mine = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    return mine / sum(leaf.nbytes for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(("data", "shards"), [pytest.param(1, 2, marks=pytest.mark.slow), (2, 4)])
@pytest.mark.parametrize("name", TINY_NAMES)
def test_every_family(name, data, shards):
    if name in ("mistral", "qwen3") and shards == 4:
        with pytest.raises(ValueError, match="model=4 does not divide the model's num_heads=6"):
            tiny(name, data, shards)
        return
    _, whole = tiny(name)
    model, params = tiny(name, data, shards)
    assert assert_placed(model, params, whole) < 1.1 / shards


@pytest.mark.parametrize("shards", [2, 4])
def test_an_orbax_folder(tmp_path, shards):
    alone, whole = tiny()
    save_orbax(tmp_path / "saved", alone.config, whole)
    parallel = ParallelConfig(data=2, model=shards)
    assert_placed(*load(tmp_path / "saved", dtype="float32", parallel=parallel), whole)


def test_a_row_is_read_once_and_only_where_it_is_wanted(monkeypatch):
    """As in a process that has only the first of four devices along `model`."""
    read, rows = SafetensorsReader.read, []

    def counted(self, name, start=0, stop=None):
        found = read(self, name, start, stop)
        rows.append((name, found.nbytes))
        return found

    monkeypatch.setattr(SafetensorsReader, "read", counted)
    checkpoint = open_checkpoint(TINY / "llama")
    mesh = make_mesh(ParallelConfig(data=2, model=2))
    load_params(checkpoint, dtype="float32", mesh=mesh)
    whole = sum(np.prod(entry.shape) * 4 for entry in checkpoint.reader.tensors.values())
    assert sum(size for _, size in rows) == whole

    rows.clear()
    devices = set(mesh.devices[:, 0])
    real = jax.sharding.NamedSharding.addressable_devices_indices_map

    def first_only(self, shape):
        return {d: index for d, index in real(self, shape).items() if d in devices}

    monkeypatch.setattr(jax.sharding.NamedSharding, "addressable_devices_indices_map", first_only)
    monkeypatch.setattr(jax, "make_array_from_callback", lambda shape, *_: np.zeros(shape))
    monkeypatch.setattr(jax, "device_put", lambda array, _: array)
    load_params(checkpoint, dtype="float32", mesh=mesh)
    half = dict(rows)
    up = "model.layers.0.mlp.up_proj.weight"
    assert half[up] == np.prod(checkpoint.reader.tensors[up].shape) * 4 // 2
    assert sum(half.values()) < 0.75 * whole, "all but the columns of out and down"


def test_what_cannot_be_split_is_refused_before_a_weight_is_read(monkeypatch):
    monkeypatch.setattr(SafetensorsReader, "read", lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(ValueError, match="model=8 does not divide the model's num_heads=4"):
        tiny("llama", 1, 8)
    with pytest.raises(ValueError, match="Both parallel and mesh"):
        load(
            TINY / "llama",
            parallel=ParallelConfig(model=2),
            mesh=make_mesh(ParallelConfig(model=2)),
        )
