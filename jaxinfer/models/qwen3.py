"""The Qwen3 family: a norm on each query and key head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, settings
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout
from jaxinfer.models.qwen2 import DEFAULTS, pattern_from_hf, pattern_to_hf


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(hf, **DEFAULTS, head_dim=128)
    bias = fields.flag("attention_bias")
    return decoder_from_hf(
        fields,
        family="qwen3",
        qk_norm="head",
        qkv_bias=bias,
        out_bias=bias,
        pattern=pattern_from_hf(fields),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        attention_bias=config.qkv_bias,
        **pattern_to_hf(config),
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    return decoder_from_gguf(file, family="qwen3", qk_norm="head")


FAMILY = Family(
    name="qwen3",
    model_types=("qwen3",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_NAMES),
    gguf_architectures=("qwen3",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES),
)
