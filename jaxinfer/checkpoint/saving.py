"""Writes params as a Hugging Face folder: the exact inverse of loading one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.safetensors import CONFIG, INDEX, WHOLE, write_file
from jaxinfer.config import DTYPES, ModelConfig, require
from jaxinfer.models import family_of
from jaxinfer.models.weights import Part, from_view, leaf_at

Tensor = tuple[str, tuple[int, ...], Callable[[], np.ndarray]]


def save_huggingface(
    folder: str | Path,
    config: ModelConfig,
    params: Any,
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes config.json and model.safetensors, or shards of `max_shard_bytes` at most.

    A tensor larger than that gets a shard of its own. Weights keep their dtype and their bits.
    Raises FileExistsError if the folder holds weights already, and ValueError if the params do not
    have the shapes of `config` or are of several dtypes.
    """
    folder = Path(folder)
    if any(folder.glob("*.safetensors*")):
        raise FileExistsError(f"{folder} already holds weights. Choose another folder.")
    dtype, tensors = _tensors(config, params)
    shards = list(_shards(tensors, np.dtype(dtype).itemsize, max_shard_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    settings = family_of(config).config_to_hf(config) | {"dtype": dtype}
    _write_json(folder / CONFIG, settings)
    if len(shards) == 1:
        write_file(folder / WHOLE, shards[0], dtype)
        return
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        write_file(folder / name, shard, dtype)
    total = sum(np.prod(shape) for _, shape, _ in tensors) * np.dtype(dtype).itemsize
    shard_of = {tensor[0]: name for name, shard in zip(names, shards) for tensor in shard}
    # Last, so that a folder with an index is a whole one.
    _write_json(folder / INDEX, {"metadata": {"total_size": int(total)}, "weight_map": shard_of})


def _tensors(config: ModelConfig, params: Any) -> tuple[str, list[Tensor]]:
    """The dtype of the params, and each tensor of the file with a function that makes it."""
    dtypes: set[str] = set()
    pieces: dict[str, list[tuple[Part, Any]]] = {}
    for leaf in family_of(config).weights(config):
        array = leaf_at(params, leaf.path)
        path = ".".join(map(str, leaf.path))
        require(
            tuple(array.shape) == leaf.shape,
            f"{path} has shape {list(array.shape)}; this config needs {list(leaf.shape)}.",
        )
        dtypes.add(str(array.dtype))
        for part in leaf.parts:
            pieces.setdefault(part.name, []).append((part, array))
    require(
        len(dtypes) == 1 and dtypes <= set(DTYPES),
        f"The params are of dtype {', '.join(sorted(dtypes))}. "
        f"Convert all to one of {', '.join(DTYPES)}.",
    )
    return dtypes.pop(), [
        (name, of_file[0][0].shape, lambda of_file=of_file: _put_together(of_file))
        for name, of_file in pieces.items()
    ]


def _put_together(pieces: list[tuple[Part, Any]]) -> np.ndarray:
    """A tensor of the file from all its parts and the leaves that they are in."""
    pieces = sorted(pieces, key=lambda piece: piece[0].start)
    rows = [from_view(part, np.asarray(array)[part.index]) for part, array in pieces]
    return rows[0] if len(rows) == 1 else np.concatenate(rows)


def _shards(tensors: list[Tensor], itemsize: int, max_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors in order, cut where the next one would make a shard too large."""
    shard: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        size = int(np.prod(tensor[1])) * itemsize
        if shard and filled + size > max_bytes:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size
    yield shard


def _write_json(path: Path, content: Any) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
