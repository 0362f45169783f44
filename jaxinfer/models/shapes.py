"""Configurations by name, for planning and benchmarking without weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.config import LayerKind, ModelConfig, RopeConfig

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
        "qwen3-0.6b": ModelConfig(
            family="qwen3",
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            norm_eps=1e-6,
            qk_norm="head",
            rope=RopeConfig(theta=1e6, dim=128),
            tie_embeddings=True,
            max_position=40960,
            bos_id=151643,
            eos_ids=(151645, 151643),
        ),
        "qwen3-8b": ModelConfig(
            family="qwen3",
            vocab_size=151936,
            hidden_size=4096,
            intermediate_size=12288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            norm_eps=1e-6,
            qk_norm="head",
            rope=RopeConfig(theta=1e6, dim=128),
            max_position=40960,
            bos_id=151643,
            eos_ids=(151645, 151643),
        ),
        "gemma-3-27b": ModelConfig(
            family="gemma3",
            vocab_size=262208,
            hidden_size=5376,
            intermediate_size=21504,
            num_layers=62,
            num_heads=32,
            num_kv_heads=16,
            head_dim=128,
            norm_eps=1e-6,
            norm_offset=1.0,
            post_norm=True,
            qk_norm="head",
            activation="gelu_tanh",
            rope=RopeConfig(kind="linear", theta=1e6, dim=128, factor=8.0),
            pattern=(LayerKind(window=1024, rope=RopeConfig(theta=1e4, dim=128)),) * 5
            + (LayerKind(),),
            attention_scale=168**-0.5,
            embedding_scale=5376**0.5,
            tie_embeddings=True,
            max_position=131072,
            bos_id=2,
            eos_ids=(1, 106),
        ),
    }
)


def named_shape(name: str) -> ModelConfig:
    """The configuration of that name. Raises ValueError with the known names."""
    if name not in NAMED_SHAPES:
        raise ValueError(f"No shape is named {name!r}. Known: {', '.join(NAMED_SHAPES)}.")
    return NAMED_SHAPES[name]
