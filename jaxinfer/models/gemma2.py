"""The Gemma 2 family: norms around attention and MLP, soft-caps, a window on every other layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.fields import Fields
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf, windows_from_gguf
from jaxinfer.models.huggingface import (
    decoder_from_hf,
    decoder_to_hf,
    pattern_of,
    preimage,
    settings,
    windows_from_hf,
    windows_to_hf,
)
from jaxinfer.models.layout import GGUF_NAMES, HF_POST_NORM_NAMES, Layout

DEFAULTS = {
    "bos_token_id": 2,
    "eos_token_id": 1,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

# `hidden_act` is what older files say and no model reads; the other is about a cache of theirs.
_HARMLESS = ("hidden_act", "cache_implementation")


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        hf,
        **DEFAULTS,
        max_position_embeddings=8192,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    window = fields.optional_integer("sliding_window")
    fields.expect(sliding_window_size=window)
    windows = windows_from_hf(fields, window, lambda i: i % 2 == 0)
    pattern = pattern_of(LayerKind(window=window) for window in windows)
    return gemma_from_hf(fields, family="gemma2", pattern=pattern)


def gemma_from_hf(fields: Fields, **own: Any) -> ModelConfig:
    """The config from what the settings of Gemma 2 and 3 share; `own` are the family's fields."""
    fields.expect(use_bidirectional_attention=False)
    bias = fields.flag("attention_bias")
    return decoder_from_hf(
        fields,
        act="hidden_activation",
        harmless=_HARMLESS,
        norm_offset=1.0,
        post_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        attention_scale=_attention_scale(fields.number("query_pre_attn_scalar")),
        attention_soft_cap=fields.optional_number("attn_logit_softcapping"),
        logits_soft_cap=fields.optional_number("final_logit_softcapping"),
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        **own,
    )


def _attention_scale(query_pre_attn_scalar: float) -> float:
    return query_pre_attn_scalar**-0.5


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return gemma_to_hf(config, model_type="gemma2", architecture="Gemma2ForCausalLM")


def gemma_to_hf(config: ModelConfig, **own: Any) -> dict[str, Any]:
    """The settings that config.json has of Gemma 2 and 3, and `own` ones."""
    scale = config.attention_scale or config.head_dim**-0.5
    return decoder_to_hf(
        config,
        act="hidden_activation",
        attention_bias=config.qkv_bias,
        query_pre_attn_scalar=preimage(_attention_scale, scale, scale**-2),
        attn_logit_softcapping=config.attention_soft_cap,
        final_logit_softcapping=config.logits_soft_cap,
        **windows_to_hf(config),
        **own,
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    fields = file.fields
    window = fields.integer("attention.sliding_window", 4096) or None
    windows = windows_from_gguf(fields, window, period=2)
    return gemma_from_gguf(
        file,
        family="gemma2",
        layers_of_27b=46,
        pattern=pattern_of(LayerKind(window=window) for window in windows),
        attention_soft_cap=fields.number("attn_logit_softcapping", 50.0) or None,
        logits_soft_cap=fields.number("final_logit_softcapping", 30.0) or None,
    )


def gemma_from_gguf(
    file: GGUFSettings, *, layers_of_27b: int, harmless: Collection[str] = (), **own: Any
) -> ModelConfig:
    """The config from what GGUF files of Gemma 2 and 3 share; `own` are the family's fields.

    The models of 27B alone scale scores by another size than that of a head, which no key says.
    """
    fields, size = file.fields, file.head_dim
    hidden_size = fields.integer("embedding_length")
    if fields.integer("block_count") == layers_of_27b:
        size = hidden_size // fields.integer("attention.head_count")
    return decoder_from_gguf(
        file,
        harmless=harmless,
        norm_offset=1.0,
        post_norm=True,
        activation="gelu_tanh",
        attention_scale=_attention_scale(size),
        embedding_scale=hidden_size**0.5,
        **own,
    )


FAMILY = Family(
    name="gemma2",
    model_types=("gemma2",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_POST_NORM_NAMES),
    gguf_architectures=("gemma2",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES, norm_offset=1.0),
)
