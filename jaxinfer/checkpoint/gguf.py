"""Reads GGUF files: metadata, and tensors of every type that the gguf package can dequantise.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), versions 2 and 3,
little-endian. The header is parsed here and not by gguf.GGUFReader, which keeps an array for each
token of the vocabulary: 8 s and 160 MB for 49,152 tokens, against 0.3 s and 20 MB.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from jaxinfer.checkpoint.rows import RowReader, TensorEntry, check_extent, read_bytes
from jaxinfer.config import ModelConfig
from jaxinfer.models import family_of, family_of_gguf
from jaxinfer.models.gguf import GGUFSettings
from jaxinfer.models.gguf_rope import ROPE_TENSORS
from jaxinfer.models.weights import Leaf

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# Value type -> struct format, by the specification's numbers.
_SCALARS: tuple[tuple[int, str], ...] = (
    (0, "B"),
    (1, "b"),
    (2, "H"),
    (3, "h"),
    (4, "I"),
    (5, "i"),
    (6, "f"),
    (7, "?"),
    (10, "Q"),
    (11, "q"),
    (12, "d"),
)


class GGUFReader(RowReader):
    """One GGUF file. `metadata` holds its key/value pairs; arrays are lists."""

    def __init__(self, path: Path):
        self.path = path
        self.metadata, self.tensors = read_header(path)

    @classmethod
    def recognises(cls, path: Path) -> bool:
        return path.is_file() and path.suffix == ".gguf"

    def config(self) -> ModelConfig:
        family = family_of_gguf(self.metadata)
        assert family.config_from_gguf is not None
        rope = {name: self.read(name).tolist() for name in ROPE_TENSORS if name in self.tensors}
        return family.config_from_gguf(GGUFSettings(self.metadata, self.tensors, rope))

    def leaves(self, config: ModelConfig) -> tuple[Leaf, ...]:
        family = family_of(config)
        assert family.gguf_weights is not None
        return family.gguf_weights(config)

    def is_readable(self, dtype: str) -> bool:
        kind = GGMLQuantizationType[dtype]
        try:
            dequantize(np.zeros((1, _row_bytes(256, dtype)), np.uint8), kind)
        except NotImplementedError:
            return False
        return True

    def is_ignored(self, name: str) -> bool:
        return name in ROPE_TENSORS  # read by `config`

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        entry = self.tensors[name]
        kind = GGMLQuantizationType[entry.dtype]
        if len(entry.shape) == 1:
            data = read_bytes(entry.path, entry.offset, entry.num_bytes)
            return dequantize(data, kind)[start:stop]
        rows = range(entry.shape[0])[start:stop]
        row_bytes = entry.num_bytes // entry.shape[0]
        data = read_bytes(entry.path, entry.offset + rows.start * row_bytes, len(rows) * row_bytes)
        # The package works fastest on flat rows, many at a time.
        flat = data.reshape(-1, _row_bytes(entry.shape[-1], entry.dtype))
        return dequantize(flat, kind).reshape(len(rows), *entry.shape[1:])


def _row_bytes(columns: int, dtype: str) -> int:
    """Bytes of one row of `columns` values. Raises ValueError if it is not in whole blocks."""
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    if columns % per_block:
        raise ValueError(
            f"rows of {columns} values are not whole blocks of {per_block}, as {dtype}"
        )
    return columns // per_block * block_bytes


class _Cursor:
    """Walks over the header; raises ValueError where the file ends too early."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path = path
        self.data = data
        self.position = 0
        self.formats: Mapping[int, struct.Struct] = {
            kind: struct.Struct(f"<{code}") for kind, code in _SCALARS
        }

    def take(self, count: int) -> bytes:
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise ValueError(
                f"{self.path} is cut short: its header goes on past its {len(self.data)} bytes. "
                "Fetch it again."
            )
        return self.data[start : self.position]

    def scalar(self, kind: int) -> Any:
        if kind not in self.formats:
            raise ValueError(f"{self.path} has a value of unknown type {kind}. Fetch it again.")
        layout = self.formats[kind]
        return layout.unpack(self.take(layout.size))[0]

    def string(self) -> str:
        # Vocabularies may hold single bytes of a character.
        return self.take(self.scalar(10)).decode("utf-8", errors="surrogateescape")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(kind)
        item, count = self.scalar(4), self.scalar(10)
        if item in self.formats:
            layout = self.formats[item]
            return [value for (value,) in layout.iter_unpack(self.take(count * layout.size))]
        return [self.value(item) for _ in range(count)]


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Metadata and tensors of one file; each tensor is known to lie inside it."""
    if path.stat().st_size < 24:
        raise ValueError(f"{path} is not a GGUF file: it is too short. Fetch it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        cursor = _Cursor(path, data)
        magic, version = cursor.take(4), cursor.scalar(4)
        if magic != _MAGIC or version not in (2, 3):
            raise ValueError(
                f"{path} starts with {magic!r}, version {version}; only little-endian GGUF 2 and 3 "
                "are supported. Fetch it again, or convert it."
            )
        num_tensors, num_values = cursor.scalar(10), cursor.scalar(10)
        metadata: dict[str, Any] = {}
        for _ in range(num_values):
            name = cursor.string()
            metadata[name] = cursor.value(cursor.scalar(4))
        declared = [_declaration(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        base = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, kind, offset in declared:
        if name in tensors:
            raise ValueError(f"{path} has two tensors named {name}. Fetch it again.")
        tensors[name] = _entry(path, name, shape, kind, base + offset)
        check_extent(name, tensors[name])
    return metadata, tensors


def _declaration(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (outermost first: the file has it reversed), type and offset of one tensor."""
    name = cursor.string()
    dims = [cursor.scalar(10) for _ in range(cursor.scalar(4))]
    return name, tuple(reversed(dims)), cursor.scalar(4), cursor.scalar(10)


def _entry(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> TensorEntry:
    try:
        dtype = GGMLQuantizationType(kind).name
        row_bytes = _row_bytes(shape[-1], dtype)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: tensor {name} cannot be read: {error}.") from error
    return TensorEntry(shape, dtype, path, offset, int(np.prod(shape[:-1])) * row_bytes)
