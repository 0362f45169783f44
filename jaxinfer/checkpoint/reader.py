"""`Reader`: the contract of a checkpoint format, one final implementation a file.

A reader knows names, shapes and dtypes as soon as it is made, and has then checked that every byte
is there; the values it reads on demand, rows at a time, so that no tensor need ever be held whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.models.weights import Leaf


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the file declares it.

    Attributes:
        shape: outermost axis first.
        dtype: the format's own name for how the values are stored.
        path, offset, num_bytes: where the stored values lie.
    """

    shape: tuple[int, ...]
    dtype: str
    path: Path
    offset: int
    num_bytes: int


class Reader(ABC):
    """One opened checkpoint.

    Attributes:
        path: the file or folder it was opened from.
        metadata: the settings that came with the weights, in the format's own terms.
        tensors: every tensor of the checkpoint by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]

    @classmethod
    @abstractmethod
    def recognises(cls, path: Path) -> bool:
        """Whether `path` looks like this format."""

    @abstractmethod
    def __init__(self, path: Path):
        """Opens the checkpoint; ValueError or FileNotFoundError if a byte of it is missing."""

    @abstractmethod
    def config(self) -> ModelConfig:
        """The model that the checkpoint holds."""

    @abstractmethod
    def leaves(self, config: ModelConfig) -> tuple[Leaf, ...]:
        """The params tree with this format's tensor names."""

    @abstractmethod
    def is_readable(self, dtype: str) -> bool:
        """Whether `read` knows values stored so."""

    @abstractmethod
    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name may be there and is no weight."""

    @abstractmethod
    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows `start..stop` along axis 0 in the stored dtype, or float32 where it is quantised."""


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
