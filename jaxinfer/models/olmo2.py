"""The OLMo 2 family: norms behind attention and MLP only, and over all heads of a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, settings
from jaxinfer.models.layout import GGUF_NAMES, HF_POST_NORM_NAMES, Layout


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(hf, eos_token_id=50279, rms_norm_eps=1e-5)
    bias = fields.flag("attention_bias")
    return decoder_from_hf(
        fields,
        family="olmo2",
        pre_norm=False,
        post_norm=True,
        qk_norm="projection",
        qkv_bias=bias,
        out_bias=bias,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        attention_bias=config.qkv_bias,
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    return decoder_from_gguf(
        file, family="olmo2", pre_norm=False, post_norm=True, qk_norm="projection"
    )


FAMILY = Family(
    name="olmo2",
    model_types=("olmo2",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_POST_NORM_NAMES),
    gguf_architectures=("olmo2",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES),
)
