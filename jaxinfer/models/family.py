"""`Family`: what one file of this folder offers, a row of the table in `jaxinfer.models`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.weights import Leaf


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: which files are its own, how to read their settings, where weights stand.

    Attributes:
        name: what `ModelConfig.family` holds.
        model_types: values of `model_type` in config.json.
        gguf_architectures: values of `general.architecture` in GGUF.
        config_from_gguf: takes the metadata, the tensor names and the rotary divisors.
        weights: the leaves with the names of Hugging Face checkpoints.
        gguf_weights: the leaves with those of GGUF.
    """

    name: str
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    config_from_gguf: Callable[[Mapping[str, Any], Collection[str], Sequence[float]], ModelConfig]
    weights: Callable[[ModelConfig], tuple[Leaf, ...]]
    gguf_weights: Callable[[ModelConfig], tuple[Leaf, ...]]
