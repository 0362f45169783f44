"""`RowReader`: formats that are read some rows at a time, so no tensor need ever be held twice."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.reader import Reader, TensorSpec, refuse_overflow
from jaxinfer.config import require
from jaxinfer.models.weights import Leaf, LeafPath, Part, to_view

# Of each axis of a leaf, where a part of it begins and ends.
Box = tuple[tuple[int, int], ...]

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
            if leaf.path not in shardings:
                whole = tuple((0, size) for size in leaf.shape)
                yield leaf, _read_boxes(self, leaf, dtype, [whole])[0]
            else:
                yield leaf, _read_shards(self, leaf, dtype, shardings[leaf.path])


def _read_shards(
    reader: RowReader, leaf: Leaf, dtype: str, sharding: jax.sharding.Sharding
) -> jax.Array:
    """`leaf` on its devices; of the file only the rows that those of this process need are read."""

    def box_of(index: tuple[slice, ...]) -> Box:
        return tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape))

    indices = sharding.addressable_devices_indices_map(leaf.shape).values()
    boxes = list(dict.fromkeys(box_of(index) for index in indices if index is not None))
    arrays = dict(zip(boxes, _read_boxes(reader, leaf, dtype, boxes)))
    placed = jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: arrays[box_of(index or ())]
    )
    return jax.block_until_ready(placed)


def _read_boxes(
    reader: RowReader, leaf: Leaf, dtype: str, boxes: Sequence[Box]
) -> list[np.ndarray]:
    """The boxes of `leaf` filled from the checkpoint, in `dtype`, on the host: each row of the file
    is read once for all of them.
    """
    arrays = [np.empty([stop - start for start, stop in box], _numpy_dtype(dtype)) for box in boxes]
    for part in leaf.parts:
        targets = []
        for array, box in zip(arrays, boxes):
            found = _overlap(part, box)
            if found is not None:
                targets.append((array[found[0]], found[1]))
        for start, stop in _chunks(part):
            _fill(reader, part, targets, start, stop)
        if dtype == "float16":
            is_finite = all(np.isfinite(target).all() for target, _ in targets)
            refuse_overflow(part.name, bool(is_finite))
    return arrays


def _overlap(part: Part, box: Box) -> tuple[tuple[int | slice, ...], tuple[slice, ...]] | None:
    """Where a box has what `part` fills of it, and where the part's view has that; None if it has
    nothing of it.
    """
    target, view = [], []
    index = (*part.index, *(slice(None),) * (len(box) - len(part.index)))
    for place, (start, stop) in zip(index, box):
        if isinstance(place, int):
            if not start <= place < stop:
                return None
            target.append(place - start)
            continue
        first = place.start or 0
        low, high = max(first, start), stop if place.stop is None else min(place.stop, stop)
        if low >= high:
            return None
        target.append(slice(low - start, high - start))
        view.append(slice(low - first, high - first))
    return tuple(target), tuple(view)


def _fill(
    reader: RowReader,
    part: Part,
    targets: Sequence[tuple[np.ndarray, tuple[slice, ...]]],
    start: int,
    stop: int,
) -> None:
    """Fills the `targets`, arrays that want those slices of the view, from its rows start..stop."""
    bounds = [(max(rows.start, start), min(rows.stop, stop)) for _, (rows, *_) in targets]
    wanted = [(low, high) for low, high in bounds if low < high]
    if not wanted:
        return
    start, stop = min(low for low, _ in wanted), max(high for _, high in wanted)
    with np.errstate(over="ignore"):  # float16 is checked later, for every source dtype
        found = to_view(part, reader.read(part.name, *part.span(start, stop)))
        for (target, (rows, *columns)), (low, high) in zip(targets, bounds):
            if low < high:
                some = found[(slice(low - start, high - start), *columns)]
                target[low - rows.start : high - rows.start] = some


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
