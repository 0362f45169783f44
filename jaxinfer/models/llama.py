"""The Llama family, which SmolLM2 is of: a norm before attention and MLP, one rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, settings
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(hf, bos_token_id=1, eos_token_id=2)
    bias = fields.flag("attention_bias")
    return decoder_from_hf(
        fields,
        family="llama",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="llama",
        architecture="LlamaForCausalLM",
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    return decoder_from_gguf(file, family="llama")


weights = Layout(names=HF_NAMES)
# Rows of queries and keys stand pair by pair in GGUF.
gguf_weights = Layout(names=GGUF_NAMES, interleaved=True)

FAMILY = Family(
    name="llama",
    model_types=("llama",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=weights,
    gguf_architectures=("llama",),
    config_from_gguf=config_from_gguf,
    gguf_weights=gguf_weights,
)
