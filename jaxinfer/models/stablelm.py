"""The StableLM family: layer norms, a rotary embedding of a quarter of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, settings
from jaxinfer.models.huggingface_rope import partial_to_hf
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        hf,
        bos_token_id=0,
        eos_token_id=0,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        partial_rotary_factor=0.25,
        layer_norm_eps=1e-5,
    )
    fields.expect(qk_layernorm=False)
    parallel = fields.flag("use_parallel_residual")
    return decoder_from_hf(
        fields,
        family="stablelm",
        eps="layer_norm_eps",
        norm="layer",
        parallel_residual=parallel,
        shared_norm=parallel,
        qkv_bias=fields.flag("use_qkv_bias"),
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        eps="layer_norm_eps",
        partial_rotary_factor=partial_to_hf(config.rope, config.head_dim),
        use_parallel_residual=config.parallel_residual,
        use_qkv_bias=config.qkv_bias,
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    # The tensors say it; converters set the flag of some whose config.json does not have it.
    shared = "blk.0.ffn_norm.weight" not in file.tensor_names
    return decoder_from_gguf(
        file,
        family="stablelm",
        eps="attention.layer_norm_epsilon",
        partial_rope=True,
        harmless=("use_parallel_residual",),
        norm="layer",
        parallel_residual=shared,
        shared_norm=shared,
    )


FAMILY = Family(
    name="stablelm",
    model_types=("stablelm",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_NAMES),
    gguf_architectures=("stablelm",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES),
)
