"""Reads and writes Hugging Face folders: config.json with model.safetensors, whole or in shards.

The format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length, a JSON header of
that length with dtype, shape and byte range of each tensor, then the values.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.reader import read_json
from jaxinfer.checkpoint.rows import RowReader, TensorEntry, check_extent, read_bytes
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of, family_of_hf
from jaxinfer.models.huggingface import token_ids
from jaxinfer.models.weights import Leaf

WHOLE = "model.safetensors"
REMEDY = "Fetch the checkpoint again."
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
GENERATION = "generation_config.json"

_FLOATS: tuple[tuple[str, Any], ...] = (
    ("F64", np.float64),
    ("F32", np.float32),
    ("F16", np.float16),
    ("BF16", ml_dtypes.bfloat16),
)
_MAX_HEADER_BYTES = 100_000_000

# Buffers that older versions of transformers saved along with the weights.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


class SafetensorsReader(RowReader):
    """A folder in Hugging Face form. Files that neither name nor index mentions are left alone.

    `metadata` is config.json; its `eos_token_id` holds the ids of generation_config.json as well.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata = _read_settings(path)
        self._family = family_of_hf(self.metadata)
        self.tensors = {
            self._family.tensor_name(name): entry for name, entry in _read_tensors(path).items()
        }
        self._dtypes = {name: np.dtype(dtype) for name, dtype in _FLOATS}

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_dir()

    def config(self) -> ModelConfig:
        return self._family.config_from_hf(self.metadata)

    def leaves(self, config: ModelConfig) -> tuple[Leaf, ...]:
        return family_of(config).weights(config)

    def is_readable(self, dtype: str) -> bool:
        return dtype in self._dtypes

    def is_ignored(self, name: str) -> bool:
        return name.endswith(_IGNORED_SUFFIXES) or self._family.is_ignored(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        entry = self.tensors[name]
        rows = range(entry.shape[0])[start:stop]
        row_bytes = entry.num_bytes // entry.shape[0]
        data = read_bytes(entry.path, entry.offset + rows.start * row_bytes, len(rows) * row_bytes)
        return data.view(self._dtypes[entry.dtype]).reshape(len(rows), *entry.shape[1:])


def _read_settings(folder: Path) -> dict[str, Any]:
    settings = read_json(folder / CONFIG, REMEDY)
    generation = folder / GENERATION
    if generation.exists():
        more = read_json(generation, REMEDY).get("eos_token_id")
        own = settings.get("eos_token_id")
        settings["eos_token_id"] = list(token_ids([*token_ids(own), *token_ids(more)]))
    return settings


def _read_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of the folder, from the one file or from the shards that the index names."""
    if (folder / WHOLE).exists():
        return read_header(folder / WHOLE)
    if not (folder / INDEX).exists():
        raise FileNotFoundError(f"{folder} holds neither {WHOLE} nor {INDEX}. Fetch it again.")
    shard_of = read_json(folder / INDEX, REMEDY).get("weight_map", {})
    shards = sorted(set(shard_of.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing or not shards:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing) or 'any shard'} of the {len(shards)} shards "
            f"in {INDEX}. Fetch it again."
        )
    tensors: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(folder / shard).items():
            if shard_of.get(name, shard) == shard:
                tensors[name] = entry
    absent = [f"{name} ({shard})" for name, shard in shard_of.items() if name not in tensors]
    if absent:
        raise ValueError(
            f"{folder}: {INDEX} promises {len(absent)} tensors that their shards lack: "
            f"{', '.join(absent[:10])}. Fetch it again."
        )
    return tensors


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one file, in file order; each is known to lie inside it."""
    size = path.stat().st_size
    length = int(read_bytes(path, 0, 8).view("<u8")[0]) if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ValueError(
            f"{path} is not a whole safetensors file: its header of {length} bytes does not fit "
            f"its {size}. Fetch it again."
        )
    try:
        header = json.loads(read_bytes(path, 8, length).tobytes())
        header.pop("__metadata__", None)
        tensors = {
            name: _entry(path, 8 + length, fields)
            for name, fields in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has a damaged header ({error}). Fetch it again.") from error
    for name, entry in tensors.items():
        check_extent(name, entry)
    end = max((entry.offset + entry.num_bytes for entry in tensors.values()), default=8 + length)
    if end != size:
        raise ValueError(f"{path} has {size} bytes; its header accounts for {end}. Fetch it again.")
    return tensors


def _entry(path: Path, base: int, fields: Mapping[str, Any]) -> TensorEntry:
    start, stop = fields["data_offsets"]
    shape, dtype = tuple(fields["shape"]), fields["dtype"]
    itemsize = {name: np.dtype(kind).itemsize for name, kind in _FLOATS}.get(dtype)
    if itemsize is not None and math.prod(shape) * itemsize != stop - start:
        raise ValueError(f"{stop - start} bytes for {dtype}{list(shape)}")
    return TensorEntry(shape, dtype, path, base + start, stop - start)


def write_file(path: Path, tensors: Iterable[tuple[str, tuple[int, ...], Any]], dtype: str) -> None:
    """Writes one file, a tensor at a time; it appears under its name only when it is whole.

    Args:
        tensors: name, shape, and a function that makes the array.
        dtype: of all of them: "float32", "bfloat16" or "float16".
    """
    tensors = list(tensors)
    code = {np.dtype(kind): name for name, kind in _FLOATS}[np.dtype(dtype)]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, _ in tensors:
        start, end = end, end + math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape, make in tensors:
            array = np.ascontiguousarray(make())
            assert array.shape == shape and array.dtype == dtype, (name, array.shape, array.dtype)
            file.write(array.view(np.uint8).data)
    os.replace(partial, path)
