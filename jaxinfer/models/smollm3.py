"""The SmolLM3 family: every fourth layer has no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, require
from jaxinfer.models.family import Family
from jaxinfer.models.fields import Fields
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import (
    decoder_from_hf,
    decoder_to_hf,
    pattern_of,
    settings,
    windows_from_hf,
    windows_to_hf,
)
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        hf,
        bos_token_id=128000,
        eos_token_id=128001,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        rope_theta=2e6,
        no_rope_layer_interval=4,
        tie_word_embeddings=True,
    )
    bias = fields.flag("attention_bias")
    return decoder_from_hf(
        fields,
        family="smollm3",
        harmless=("max_window_layers",),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=fields.flag("mlp_bias"),
        pattern=_pattern(fields),
    )


def _pattern(fields: Fields) -> tuple[LayerKind, ...]:
    """Which layers have a rotary embedding, and a window: those without, if it is in use."""
    count, every = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval")
    turns = fields.take("no_rope_layers", [int((i + 1) % every != 0) for i in range(count)])
    require(
        len(turns) >= count and set(turns) <= {0, 1},
        f"config.json: no_rope_layers={turns} must have a 0 or 1 for each of {count} layers. "
        "Fetch the file again.",
    )
    window = fields.optional_integer("sliding_window")
    if not fields.flag("use_sliding_window"):
        window = None
    windows = windows_from_hf(fields, window, lambda i: not turns[i])
    return pattern_of(LayerKind(window=w, use_rope=bool(t)) for w, t in zip(windows, turns))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        no_rope_layers=[int(config.kind(i).use_rope) for i in range(config.num_layers)],
        use_sliding_window=any(config.windows),
        **windows_to_hf(config),
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    # Every fourth layer has no rotary embedding, which no key says.
    turns = ((i + 1) % 4 != 0 for i in range(file.fields.integer("block_count")))
    pattern = pattern_of(LayerKind(use_rope=turn) for turn in turns)
    return decoder_from_gguf(file, family="smollm3", pattern=pattern)


FAMILY = Family(
    name="smollm3",
    model_types=("smollm3",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_NAMES),
    gguf_architectures=("smollm3",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES, interleaved=True),
)
