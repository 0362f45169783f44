"""From a checkpoint on disk to params on the device.

Names, shapes and dtypes are checked first, all of them; then leaf after leaf is filled, part by
part and some rows at a time, and placed. The host never holds more than one leaf not yet placed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.fetch import resolve
from jaxinfer.checkpoint.gguf import GGUFReader
from jaxinfer.checkpoint.reader import Reader
from jaxinfer.checkpoint.safetensors import SafetensorsReader
from jaxinfer.config import DTYPES, ModelConfig, require
from jaxinfer.models.weights import Leaf, LeafPath, Part, to_view, unflatten

if TYPE_CHECKING:
    from jaxinfer.compute.decoder import Decoder

FORMATS: tuple[type[Reader], ...] = (GGUFReader, SafetensorsReader)

# Elements that are read and converted at a time.
_CHUNK = 1 << 20
_MAX_SHOWN = 10


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint whose tensors are all there, in the shapes that its config asks for."""

    config: ModelConfig
    leaves: tuple[Leaf, ...]
    reader: Reader

    @property
    def path(self) -> Path:
        """The file or folder."""
        return self.reader.path


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file or a Hugging Face folder. Reads no weights.

    Raises ValueError or FileNotFoundError if a file is missing, cut short or not understood, or if
    tensors are missing, unexpected or misshapen.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist. Give a GGUF file or a Hugging Face folder."
        )
    formats = [reader for reader in FORMATS if reader.recognises(path)]
    require(
        bool(formats), f"{path} is not a checkpoint. Give a GGUF file or a Hugging Face folder."
    )
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


def _faults(reader: Reader, leaves: tuple[Leaf, ...]) -> Iterator[str]:
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


def load(model: str | Path, *, dtype: str = "bfloat16") -> tuple[Decoder, dict[str, Any]]:
    """The model and its params, for use in programs of your own.

    Args:
        model: an alias ("smollm2-135m"), a GGUF file, a Hugging Face folder, or a hub id.
        dtype: of every leaf: "float32", "bfloat16" or "float16".
    """
    from jaxinfer.compute.decoder import Decoder  # noqa: PLC0415 (flax, which opening never needs)

    checkpoint = open_checkpoint(resolve(str(model)))
    return Decoder(checkpoint.config), load_params(checkpoint, dtype=dtype)


def place_on_device(path: LeafPath, array: np.ndarray) -> jax.Array:
    """`array` on the default device. On the CPU it takes the memory over where alignment allows."""
    return jax.block_until_ready(jax.device_put(array))


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: str = "bfloat16",
    place: Callable[[LeafPath, np.ndarray], jax.Array] = place_on_device,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """The params tree of `checkpoint`, every leaf in `dtype`.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        place: puts a filled leaf on its device or devices, given its path; the array is its own.
        progress: called after each leaf with the number of weights done and of all.

    The host's peak is the placed leaves (where the device is the host), one leaf, and some
    megabytes of rows on their way. Raises ValueError if a value overflows float16, or if a file of
    a model with tied embeddings holds an output projection that differs from the embedding.
    """
    require(
        dtype in DTYPES,
        f"dtype={dtype!r} is not supported. Choose one of {', '.join(DTYPES)}.",
    )
    _check_copies(checkpoint)
    total = sum(leaf.size for leaf in checkpoint.leaves)
    done = 0
    arrays: dict[LeafPath, jax.Array] = {}
    for leaf in checkpoint.leaves:
        assert leaf.path not in arrays, f"{leaf.path} is assigned twice"
        arrays[leaf.path] = place(leaf.path, read_leaf(checkpoint.reader, leaf, dtype))
        done += leaf.size
        if progress is not None:
            progress(done, total)
    return unflatten(arrays)


def read_leaf(reader: Reader, leaf: Leaf, dtype: str) -> np.ndarray:
    """`leaf` filled from the checkpoint, in `dtype`, on the host."""
    array = np.empty(leaf.shape, _numpy_dtype(dtype))
    for part in leaf.parts:
        target = array[part.index]
        for start, stop in _chunks(part):
            first, last = start * part.rows, stop * part.rows
            with np.errstate(over="ignore"):  # float16 is checked below, for every source dtype
                # In one expression, so that no rows outlive their turn.
                target[start:stop] = to_view(part, reader.read(part.name, first, last))
        if dtype == "float16":
            require(
                bool(np.isfinite(target).all()),
                f"{part.name} has values that float16 cannot hold (above 65504). "
                'Use dtype="bfloat16".',
            )
    return array


def _chunks(part: Part) -> Iterator[tuple[int, int]]:
    """Ranges of the view's rows that cover it, each of about `_CHUNK` elements."""
    num_rows = part.view[0]
    step = max(1, _CHUNK * num_rows // math.prod(part.view))
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _check_copies(checkpoint: Checkpoint) -> None:
    """Raises ValueError if a tensor that must equal another one does not."""
    reader = checkpoint.reader
    for part in _parts(checkpoint.leaves):
        for copy in part.copies:
            if copy not in reader.tensors:
                continue
            for start, stop in _chunks(part):
                rows = slice(start * part.rows, stop * part.rows)
                same = np.array_equal(
                    reader.read(part.name, rows.start, rows.stop),
                    reader.read(copy, rows.start, rows.stop),
                )
                require(
                    same,
                    f"{checkpoint.path}: the settings tie {copy} to {part.name}, but the file has "
                    "both and they differ. Set tie_word_embeddings to false to use both.",
                )
