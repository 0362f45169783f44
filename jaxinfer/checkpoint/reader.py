"""`Reader`: the contract of a checkpoint format, one final implementation a file.

A reader knows names, shapes and dtypes as soon as it is made, and has then checked that every byte
is there; the values it reads on demand.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np

from jaxinfer.config import ModelConfig, require
from jaxinfer.models.weights import Leaf, LeafPath


@dataclass(frozen=True)
class TensorSpec:
    """What a checkpoint says of a tensor.

    Attributes:
        shape: outermost axis first.
        dtype: the format's own name for how the values are stored.
    """

    shape: tuple[int, ...]
    dtype: str


Spec = TypeVar("Spec", bound=TensorSpec)


class Reader(ABC, Generic[Spec]):
    """One opened checkpoint.

    Attributes:
        path: the file or folder it was opened from.
        metadata: the settings that came with the weights, in the format's own terms.
        tensors: every tensor of the checkpoint by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Spec]

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
        """Whether values stored so can be read."""

    @abstractmethod
    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name may be there and is no weight."""

    @abstractmethod
    def arrays(
        self,
        leaves: Iterable[Leaf],
        dtype: str,
        shardings: Mapping[LeafPath, jax.sharding.Sharding],
    ) -> Iterator[tuple[Leaf, np.ndarray | jax.Array]]:
        """Each leaf with its values in `dtype`, on the host and the caller's own.

        A format that can read a part of a leaf onto the device that wants it does so for the leaves
        that have a sharding, and gives the placed array.
        """


def refuse_overflow(name: str, is_finite: bool) -> None:
    """Raises ValueError unless the float16 values of a tensor are all finite."""
    if not is_finite:
        raise ValueError(
            f'{name} has values that float16 cannot hold (above 65504). Use dtype="bfloat16".'
        )


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in the file `path`; an error that ends with `remedy` where there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}). {remedy}") from error
    require(isinstance(content, dict), f"{path} must hold a JSON object. {remedy}")
    return content
