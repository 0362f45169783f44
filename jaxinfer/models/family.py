"""`Family`: what one file of this folder offers, a row of the table in `jaxinfer.models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.gguf import GGUFSettings
from jaxinfer.models.weights import Leaf


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models: which files are its own, how to read their settings, where weights stand.

    Attributes:
        name: what `ModelConfig.family` holds.
        model_types: values of `model_type` in config.json.
        weights: the leaves with the names of Hugging Face checkpoints.
        prefixes: beginnings of tensor names in Hugging Face checkpoints, and what `weights` has.
        ignored: patterns of names of tensors there that are no weights of the decoder.
        gguf_architectures: values of `general.architecture` in GGUF.
        config_from_gguf: None, like `gguf_weights`, without `gguf_architectures`.
        gguf_weights: the leaves with the names of GGUF.
    """

    name: str
    model_types: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    weights: Callable[[ModelConfig], tuple[Leaf, ...]]
    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    gguf_architectures: tuple[str, ...] = ()
    config_from_gguf: Callable[[GGUFSettings], ModelConfig] | None = None
    gguf_weights: Callable[[ModelConfig], tuple[Leaf, ...]] | None = None

    def tensor_name(self, name: str) -> str:
        """What `weights` calls the tensor of this name."""
        for prefix, ours in self.prefixes:
            if name.startswith(prefix):
                return ours + name.removeprefix(prefix)
        return name

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name is no weight of the decoder."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)
