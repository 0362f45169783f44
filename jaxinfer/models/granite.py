"""The Granite 3 family: Llama's layers with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, preimage, settings
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(hf, bos_token_id=1, eos_token_id=2)
    bias = fields.flag("attention_bias")
    return decoder_from_hf(
        fields,
        family="granite",
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        attention_scale=fields.number("attention_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_scale=_reciprocal(fields.number("logits_scaling", 1.0)),
    )


def _reciprocal(x: float) -> float:
    return 1 / x


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="granite",
        architecture="GraniteForCausalLM",
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        attention_multiplier=config.attention_scale or config.head_dim**-0.5,
        embedding_multiplier=config.embedding_scale,
        residual_multiplier=config.residual_scale,
        logits_scaling=preimage(_reciprocal, config.logits_scale, 1 / config.logits_scale),
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    fields = file.fields
    # Of Granite this says whether anything rotates; of multipliers 0 says that there is none.
    fields.expect(**{"rope.scaling.finetuned": True})
    return decoder_from_gguf(
        file,
        family="granite",
        attention_scale=fields.number("attention.scale", 0.0) or None,
        embedding_scale=fields.number("embedding_scale", 0.0) or 1.0,
        residual_scale=fields.number("residual_scale", 0.0) or 1.0,
        logits_scale=_reciprocal(fields.number("logit_scale")),
    )


FAMILY = Family(
    name="granite",
    model_types=("granite",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_NAMES),
    gguf_architectures=("granite",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES, interleaved=True),
)
