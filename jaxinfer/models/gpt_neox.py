"""The GPT-NeoX family, which Pythia is of: attention and an ungated MLP side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, renamed, settings
from jaxinfer.models.huggingface_rope import partial_to_hf
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout

NAMES = replace(
    HF_NAMES,
    embed="gpt_neox.embed_in",
    norm="gpt_neox.final_layer_norm",
    head="embed_out",
    layer="gpt_neox.layers.{i}.",
    **dict.fromkeys(("query", "key", "value"), "attention.query_key_value"),
    out="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
GGUF_FUSED_NAMES = replace(GGUF_NAMES, **dict.fromkeys(("query", "key", "value"), "attn_qkv"))

_OLD_NAMES = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        renamed(hf, _OLD_NAMES),
        bos_token_id=0,
        eos_token_id=2,
        hidden_act="gelu",
        partial_rotary_factor=0.25,
        layer_norm_eps=1e-5,
    )
    bias = fields.flag("attention_bias", True)
    return decoder_from_hf(
        fields,
        family="gpt_neox",
        eps="layer_norm_eps",
        norm="layer",
        parallel_residual=fields.flag("use_parallel_residual", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=True,
        gated_mlp=False,
    )


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    return decoder_to_hf(
        config,
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        eps="layer_norm_eps",
        rotary_pct=partial_to_hf(config.rope, config.head_dim),
        use_parallel_residual=config.parallel_residual,
        attention_bias=config.qkv_bias,
    )


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    return decoder_from_gguf(
        file,
        family="gpt_neox",
        names=GGUF_FUSED_NAMES,
        eps="attention.layer_norm_epsilon",
        partial_rope=True,
        norm="layer",
        parallel_residual=file.fields.flag("use_parallel_residual", True),
        gated_mlp=False,
        activation="gelu",  # as most of them, but no key says
    )


FAMILY = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=NAMES, grouped=True),
    ignored=("*.attention.bias", "*.attention.masked_bias"),  # buffers that old files hold
    gguf_architectures=("gptneox",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_FUSED_NAMES),
)
