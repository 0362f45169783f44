"""Where each weight of a model stands in a checkpoint: `Leaf`, `Part`, and the moves between them.

A leaf is one array of the params tree. It is filled from its parts, each a tensor of the file or
some of a tensor's rows; query, key and value projections, for one, are one leaf here, and in files
three tensors, or one that has them one below the other. Everything is described as data, so that a
reader can check names and shapes before it allocates, read only some rows, and so that saving is
the exact inverse of loading.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

LeafPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Part:
    """A tensor of a checkpoint, or some of its rows, and their place in a leaf.

    Attributes:
        name: of the tensor in the file.
        shape: of the tensor in the file.
        view: the part's elements in row-major order, in the shape of `leaf[index]`. A row of the
            view is one or more whole rows of the file.
        index: which part of the leaf it fills; () is all of it.
        start: the row of the file where the part begins.
        interleaved_axis: the axis of the view whose elements the file stores as pairs (i, i + n/2),
            as GGUF does for rotary heads; None where the file has them in order.
        offset: what the file adds to the leaf's values.
        copies: other names under which a file may hold this very tensor.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    start: int = 0
    interleaved_axis: int | None = None
    offset: float = 0.0
    copies: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the file that make one row of the view."""
        return math.prod(self.view[1:]) // math.prod(self.shape[1:])

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Where the file has the rows `first..last` of the view: `(start, stop)` on its axis 0."""
        return self.start + first * self.rows, self.start + last * self.rows


@dataclass(frozen=True)
class Leaf:
    """One array of the params tree: its path, its shape, and the parts that fill it once each."""

    path: LeafPath
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def whole(path: LeafPath, name: str, shape: tuple[int, ...], copies: tuple[str, ...] = ()) -> Leaf:
    """A leaf that is one tensor of the file, as it stands there."""
    return Leaf(path, shape, (Part(name, shape, shape, copies=copies),))


def stacked(parts: Iterable[Part]) -> tuple[Part, ...]:
    """`parts`, each a whole tensor; those of one name become rows of one, one below the other."""
    parts = tuple(parts)
    total: Counter[str] = Counter()
    starts = []
    for part in parts:
        starts.append(total[part.name])
        total[part.name] += part.shape[0]
    return tuple(
        replace(part, shape=(total[part.name], *part.shape[1:]), start=start)
        for part, start in zip(parts, starts)
    )


def to_view(part: Part, rows: np.ndarray) -> np.ndarray:
    """Some rows of the file's tensor (a multiple of `part.rows`) as rows of `leaf[part.index]`."""
    view = rows.reshape(-1, *part.view[1:])
    if part.interleaved_axis is not None:
        view = _swap_pairs(view, part.interleaved_axis, (-1, 2))
    return view.astype(np.float32) - part.offset if part.offset else view


def from_view(part: Part, view: np.ndarray) -> np.ndarray:
    """The inverse of `to_view`: what the file holds for these rows of `leaf[part.index]`."""
    if part.offset:
        view = (view.astype(np.float32) + part.offset).astype(view.dtype)
    if part.interleaved_axis is not None:
        view = _swap_pairs(view, part.interleaved_axis, (2, -1))
    return np.ascontiguousarray(view).reshape(-1, *part.shape[1:])


def _swap_pairs(array: np.ndarray, axis: int, split: tuple[int, int]) -> np.ndarray:
    """`array` with `axis` cut into a `split` matrix and that matrix transposed."""
    cut = array.reshape(*array.shape[:axis], *split, *array.shape[axis + 1 :])
    return cut.swapaxes(axis, axis + 1).reshape(array.shape)


def unflatten(arrays: Mapping[LeafPath, Any]) -> dict[str, Any]:
    """The tree whose leaf at each path is that array; levels with integer keys become tuples."""
    root: dict[str | int, Any] = {}
    for path, array in arrays.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        assert path[-1] not in node, f"{path} is given twice"
        node[path[-1]] = array
    return _tuples(root)


def _tuples(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _tuples(child) for key, child in node.items()}
    if all(isinstance(key, int) for key in children):
        return tuple(children[i] for i in range(len(children)))
    return children


def leaf_at(params: Any, path: Iterable[str | int]) -> Any:
    """The array at `path` of a params tree."""
    for key in path:
        params = params[key]
    return params
