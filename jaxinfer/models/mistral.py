"""The Mistral family: Llama's layers, each with the same window of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, settings
from jaxinfer.models.layout import HF_NAMES, Layout


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        hf,
        bos_token_id=1,
        eos_token_id=2,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
    )
    kind = LayerKind(window=fields.optional_integer("sliding_window"))
    return decoder_from_hf(fields, family="mistral", pattern=(kind,))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="mistral",
        architecture="MistralForCausalLM",
        sliding_window=config.kind(0).window,
    )


FAMILY = Family(
    name="mistral",
    model_types=("mistral",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_NAMES),
)
