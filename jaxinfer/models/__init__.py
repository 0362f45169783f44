"""The table of model families and the look-ups in it: one file and one row for each family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig, require
from jaxinfer.models import (
    gemma2,
    gemma3,
    gpt_neox,
    granite,
    llama,
    mistral,
    olmo2,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    stablelm,
)
from jaxinfer.models.family import Family
from jaxinfer.models.shapes import NAMED_SHAPES, named_shape

__all__ = [
    "FAMILIES",
    "NAMED_SHAPES",
    "Family",
    "family_of",
    "family_of_gguf",
    "family_of_hf",
    "named_shape",
    "num_parameters",
]

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma2.FAMILY,
    gemma3.FAMILY,
    phi3.FAMILY,
    olmo2.FAMILY,
    smollm3.FAMILY,
    granite.FAMILY,
    stablelm.FAMILY,
    gpt_neox.FAMILY,
)


def family_of(config: ModelConfig) -> Family:
    """The family of `config`."""
    return _find("ModelConfig.family", config.family, {f.name: f for f in FAMILIES})


def family_of_hf(hf: Mapping[str, Any]) -> Family:
    """The family that reads this config.json."""
    rows = {model_type: family for family in FAMILIES for model_type in family.model_types}
    return _find("config.json: model_type", hf.get("model_type"), rows)


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """The family that reads a GGUF file with this metadata."""
    rows = {name: family for family in FAMILIES for name in family.gguf_architectures}
    return _find("GGUF: general.architecture", metadata.get("general.architecture"), rows)


def _find(field: str, name: Any, rows: Mapping[Any, Family]) -> Family:
    require(name in rows, f"{field}={name!r} is not supported. Known: {', '.join(sorted(rows))}.")
    return rows[name]


def num_parameters(config: ModelConfig) -> int:
    """Number of weights of the model."""
    return sum(leaf.size for leaf in family_of(config).weights(config))
