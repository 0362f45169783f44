"""`RowReader`: formats that are read some rows at a time, so no tensor need ever be held twice."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.reader import Reader, TensorSpec, refuse_overflow
from jaxinfer.config import require
from jaxinfer.models.weights import Leaf, LeafPath, Part, to_view

# Elements that are read and converted at a time.
_CHUNK = 1 << 20


@dataclass(frozen=True)
class TensorEntry(TensorSpec):
    """A tensor as the file declares it.

    Attributes:
        path, offset, num_bytes: where the stored values lie.
    """

    path: Path
    offset: int
    num_bytes: int


class RowReader(Reader[TensorEntry]):
    """A checkpoint whose tensors lie in files, each as one run of bytes."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start..stop` along axis 0 in the stored dtype, or float32 where it is quantised."""

    def arrays(
        self,
        leaves: Iterable[Leaf],
        dtype: str,
        shardings: Mapping[LeafPath, jax.sharding.Sharding],
    ) -> Iterator[tuple[Leaf, np.ndarray | jax.Array]]:
        leaves = tuple(leaves)
        _check_copies(self, leaves)
        for leaf in leaves:
            yield leaf, _read_leaf(self, leaf, dtype)


def _read_leaf(reader: RowReader, leaf: Leaf, dtype: str) -> np.ndarray:
    """`leaf` filled from the checkpoint, in `dtype`, on the host."""
    array = np.empty(leaf.shape, _numpy_dtype(dtype))
    for part in leaf.parts:
        target = array[part.index]
        for start, stop in _chunks(part):
            span = part.span(start, stop)
            with np.errstate(over="ignore"):  # float16 is checked below, for every source dtype
                # In one expression, so that no rows outlive their turn.
                target[start:stop] = to_view(part, reader.read(part.name, *span))
        if dtype == "float16":
            refuse_overflow(part.name, bool(np.isfinite(target).all()))
    return array


def _chunks(part: Part) -> Iterator[tuple[int, int]]:
    """Ranges of the view's rows that cover it, each of about `_CHUNK` elements."""
    num_rows = part.view[0]
    step = max(1, _CHUNK * num_rows // math.prod(part.view))
    return ((start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _check_copies(reader: RowReader, leaves: Iterable[Leaf]) -> None:
    """Raises ValueError if a tensor that must equal another one does not."""
    for part in (part for leaf in leaves for part in leaf.parts):
        for copy in part.copies:
            if copy not in reader.tensors:
                continue
            for start, stop in _chunks(part):
                span = part.span(start, stop)
                require(
                    np.array_equal(reader.read(part.name, *span), reader.read(copy, *span)),
                    f"{reader.path}: the settings tie {copy} to {part.name}, but the file has "
                    "both and they differ. Set tie_word_embeddings to false to use both.",
                )


def read_bytes(path: Path, offset: int, count: int) -> np.ndarray:
    """`count` bytes of a file as uint8, in memory of their own (a map would keep its pages)."""
    data = np.fromfile(path, np.uint8, count, offset=offset)
    if data.size != count:
        raise ValueError(
            f"{path} ended {count - data.size} bytes early while it was read. Fetch it again."
        )
    return data


def check_extent(name: str, entry: TensorEntry) -> None:
    """Raises ValueError if the file ends before the tensor does."""
    size = entry.path.stat().st_size
    end = entry.offset + entry.num_bytes
    if end > size:
        raise ValueError(
            f"{entry.path} is cut short: it has {size} bytes, and tensor {name} ends at byte {end}"
            ". Fetch it again."
        )
