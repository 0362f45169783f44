"""From a checkpoint on disk to params on the device.

Names, shapes and dtypes are checked first, all of them; then leaf after leaf is read and placed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.checkpoint.fetch import resolve
from jaxinfer.checkpoint.gguf import GGUFReader
from jaxinfer.checkpoint.orbax import OrbaxReader
from jaxinfer.checkpoint.reader import Reader
from jaxinfer.checkpoint.safetensors import SafetensorsReader
from jaxinfer.config import DTYPES, ModelConfig, ParallelConfig, require
from jaxinfer.models.weights import Leaf, LeafPath, Part, leaf_at, unflatten

if TYPE_CHECKING:
    from jaxinfer.compute.decoder import Decoder

FORMATS: tuple[type[Reader[Any]], ...] = (GGUFReader, OrbaxReader, SafetensorsReader)
_KINDS = "a GGUF file, a Hugging Face folder, or a folder that `jaxinfer convert` wrote"
_MAX_SHOWN = 10


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose tensors are all there, in the shapes that its config asks for."""

    config: ModelConfig
    leaves: tuple[Leaf, ...]
    reader: Reader[Any]

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.reader.path


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, in one of `FORMATS`. Reads no weights.

    Raises ValueError or FileNotFoundError if a file is missing, cut short or not understood, or if
    tensors are missing, unexpected or misshapen.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give {_KINDS}.")
    formats = [reader for reader in FORMATS if reader.recognises(path)]
    require(bool(formats), f"{path} is not a checkpoint. Give {_KINDS}.")
    reader = formats[0](path)
    config = reader.config()
    leaves = reader.leaves(config)
    faults = list(_faults(reader, leaves))
    shown = "; ".join(faults[:_MAX_SHOWN])
    more = f"; and {len(faults) - _MAX_SHOWN} more" if len(faults) > _MAX_SHOWN else ""
    require(
        not faults,
        f"{path} does not hold the {config.family} model that its settings describe: {shown}{more}"
        ". Fetch it again, or correct its settings.",
    )
    return Checkpoint(config, leaves, reader)


def _parts(leaves: Iterable[Leaf]) -> Iterator[Part]:
    return (part for leaf in leaves for part in leaf.parts)


def _faults(reader: Reader[Any], leaves: tuple[Leaf, ...]) -> Iterator[str]:
    """What is wrong with the tensors of a checkpoint, a phrase each."""
    shapes = {part.name: part.shape for part in _parts(leaves)}
    copies = {copy: part.shape for part in _parts(leaves) for copy in part.copies}
    for name in shapes:
        if name not in reader.tensors:
            yield f"missing {name}"
    readable: dict[str, bool] = {}
    for name, entry in reader.tensors.items():
        shape = shapes.get(name, copies.get(name))
        if shape is None:
            if not reader.is_ignored(name):
                yield f"unexpected {name}"
            continue
        if entry.shape != shape:
            yield f"{name} has shape {list(entry.shape)} and needs {list(shape)}"
        if entry.dtype not in readable:
            readable[entry.dtype] = reader.is_readable(entry.dtype)
        if not readable[entry.dtype]:
            yield f"{name} is stored as {entry.dtype}, which is not supported"


def load(
    model: str | Path,
    *,
    dtype: str = "bfloat16",
    parallel: ParallelConfig | None = None,
    mesh: Mesh | None = None,
) -> tuple[Decoder, dict[str, Any]]:
    """The model and its params, for use in programs of your own.

    Args:
        model: an alias ("smollm2-135m"), a GGUF file, a Hugging Face or Orbax folder, or a hub id.
        dtype: of every leaf: "float32", "bfloat16" or "float16".
        parallel: how many devices to spread it over; mesh: which, instead. Each then reads its own
            part, and the model has the mesh.

    Raises ValueError, before it reads a weight, if the model cannot be split so.
    """
    from jaxinfer.compute.decoder import Decoder  # noqa: PLC0415 (flax, which opening never needs)
    from jaxinfer.compute.sharding import fit_config, make_mesh, num_model_shards  # noqa: PLC0415

    require(parallel is None or mesh is None, "Both parallel and mesh are given. Choose one.")
    mesh = make_mesh(parallel) if parallel is not None else mesh
    checkpoint = open_checkpoint(resolve(str(model)))
    config = fit_config(checkpoint.config, num_model_shards(mesh))
    return Decoder(config, mesh=mesh), load_params(checkpoint, dtype=dtype, mesh=mesh)


def place_on_device(path: LeafPath, array: np.ndarray) -> jax.Array:
    """`array` on the default device. On the CPU it takes the memory over where alignment allows."""
    return jax.block_until_ready(jax.device_put(array))


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: str = "bfloat16",
    place: Callable[[LeafPath, np.ndarray], jax.Array] | None = None,
    shardings: Any = None,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The params tree of `checkpoint`, every leaf in `dtype`.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        place: puts a filled leaf on its device or devices, given its path; the array is its own.
            None: the default device.
        shardings: instead of `place`, a tree like the params with a `jax.sharding.Sharding` for
            each leaf. Each device then gets its own part, and of the files only what the devices of
            this process need is read.
        mesh: instead of both, the devices that a `Decoder` with this mesh wants the leaves on, in
            its form: with more shards than kv heads, each of those as often as it is needed.
        progress: called after each leaf with the number of weights done and of all.

    The host's peak is the placed leaves (where the device is the host), one leaf, and some
    megabytes of rows on their way; from an Orbax folder it is some leaves, up to 256 MiB if each is
    smaller than that. Raises ValueError if a value overflows float16, if a file of a model with
    tied embeddings holds an output projection that differs from the embedding, if `shardings`
    lacks a leaf, or if the model cannot be split over `mesh`.
    """
    require(
        dtype in DTYPES,
        f"dtype={dtype!r} is not supported. Choose one of {', '.join(DTYPES)}.",
    )
    require(
        sum(option is not None for option in (place, shardings, mesh)) <= 1,
        "More than one of place, shardings and mesh is given. Choose one.",
    )
    sharding_of = {} if shardings is None else _by_path(checkpoint.leaves, shardings)
    repeats: dict[LeafPath, Callable[[jax.Array], jax.Array]] = {}
    if mesh is not None:
        sharding_of, repeats = _on_mesh(checkpoint, mesh)
    total = sum(leaf.size for leaf in checkpoint.leaves)
    done = 0
    arrays: dict[LeafPath, jax.Array] = {}
    for leaf, array in checkpoint.reader.arrays(checkpoint.leaves, dtype, sharding_of):
        assert leaf.path not in arrays, f"{leaf.path} is assigned twice"
        if leaf.path in sharding_of:
            placed = jax.block_until_ready(jax.device_put(array, sharding_of[leaf.path]))
        else:
            placed = (place or place_on_device)(leaf.path, np.asarray(array))
        arrays[leaf.path] = repeats[leaf.path](placed) if leaf.path in repeats else placed
        del array, placed  # before the next one is read
        done += leaf.size
        if progress is not None:
            progress(done, total)
    return unflatten(arrays)


def _on_mesh(
    checkpoint: Checkpoint, mesh: Mesh
) -> tuple[dict[LeafPath, jax.sharding.Sharding], dict[LeafPath, Callable[[jax.Array], jax.Array]]]:
    """Where each leaf is to go; and of those with kv heads to repeat, which go whole to every
    device, what then makes the params' leaf of them.
    """
    from jaxinfer.compute import sharding as sh  # noqa: PLC0415 (flax, which opening never needs)

    config = sh.fit_config(checkpoint.config, sh.num_model_shards(mesh))
    places: dict[LeafPath, jax.sharding.Sharding] = {}
    repeats: dict[LeafPath, Callable[[jax.Array], jax.Array]] = {}
    repeat = functools.cache(  # one program serves the leaves of all layers
        lambda module, out: jax.jit(
            functools.partial(sh.repeat_kv_heads, module, config=config), out_shardings=out
        )
    )
    for leaf in checkpoint.leaves:
        module, kind = map(str, leaf.path[-2:])
        place = NamedSharding(mesh, sh.param_spec(module, kind, len(leaf.shape)))
        places[leaf.path] = place
        if config != checkpoint.config and sh.has_kv_heads(module, len(leaf.shape)):
            places[leaf.path] = NamedSharding(mesh, PartitionSpec())
            repeats[leaf.path] = repeat(module, place)
    return places, repeats


def _by_path(leaves: Iterable[Leaf], shardings: Any) -> dict[LeafPath, jax.sharding.Sharding]:
    """The sharding of each leaf."""
    found: dict[LeafPath, jax.sharding.Sharding] = {}
    for leaf in leaves:
        try:
            found[leaf.path] = leaf_at(shardings, leaf.path)
        except (KeyError, IndexError, TypeError):
            name = ".".join(map(str, leaf.path))
            raise ValueError(f"shardings has nothing for {name}. Give every leaf one.") from None
    return found
