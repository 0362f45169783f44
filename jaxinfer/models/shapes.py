"""Configurations by name, for planning and benchmarking without weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.config import ModelConfig, RopeConfig

NAMED_SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "smollm2-135m": ModelConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rope=RopeConfig(theta=100000.0, dim=64),
            tie_embeddings=True,
            max_position=8192,
            bos_id=1,
            eos_ids=(2,),
        ),
        "llama-3-8b": ModelConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rope=RopeConfig(theta=500000.0, dim=128),
            max_position=8192,
            bos_id=128000,
            eos_ids=(128001, 128009),
        ),
        "llama-3-70b": ModelConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            head_dim=128,
            rope=RopeConfig(theta=500000.0, dim=128),
            max_position=8192,
            bos_id=128000,
            eos_ids=(128001, 128009),
        ),
    }
)


def named_shape(name: str) -> ModelConfig:
    """The configuration of that name. Raises ValueError with the known names."""
    if name not in NAMED_SHAPES:
        raise ValueError(f"No shape is named {name!r}. Known: {', '.join(NAMED_SHAPES)}.")
    return NAMED_SHAPES[name]
