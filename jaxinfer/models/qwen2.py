"""The Qwen2 and Qwen2.5 family: biases on queries, keys, values; late layers may have a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
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

DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(hf, **DEFAULTS)
    fields.expect(use_mrope=False)
    return decoder_from_hf(fields, family="qwen2", qkv_bias=True, pattern=pattern_from_hf(fields))


def pattern_from_hf(fields: Fields) -> tuple[LayerKind, ...]:
    """Layers from `max_window_layers` on have the window, if it is in use at all."""
    window, first = fields.optional_integer("sliding_window"), fields.integer("max_window_layers")
    if not fields.flag("use_sliding_window"):
        window = None
    windows = windows_from_hf(fields, window, lambda i: i >= first)
    return pattern_of(LayerKind(window=window) for window in windows)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        **pattern_to_hf(config),
    )


def pattern_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The settings from which `pattern_from_hf` gives the pattern of `config`."""
    return {"use_sliding_window": any(config.windows), **windows_to_hf(config)}


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    return decoder_from_gguf(file, family="qwen2")


FAMILY = Family(
    name="qwen2",
    model_types=("qwen2",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_NAMES),
    gguf_architectures=("qwen2",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES),
)
