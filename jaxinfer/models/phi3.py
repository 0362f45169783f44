"""The Phi-3 family, which Phi-3.5 and Phi-4 are of: projections that files hold fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig
from jaxinfer.models.family import Family
from jaxinfer.models.gguf import GGUFSettings, decoder_from_gguf
from jaxinfer.models.huggingface import decoder_from_hf, decoder_to_hf, settings
from jaxinfer.models.layout import GGUF_NAMES, HF_NAMES, Layout

NAMES = replace(
    HF_NAMES,
    **dict.fromkeys(("query", "key", "value"), "self_attn.qkv_proj"),
    **dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
)
GGUF_FUSED_NAMES = replace(
    GGUF_NAMES,
    **dict.fromkeys(("query", "key", "value"), "attn_qkv"),
    **dict.fromkeys(("gate", "up"), "ffn_up"),
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        hf,
        bos_token_id=1,
        eos_token_id=32000,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
        rms_norm_eps=1e-5,
    )
    fields.expect(attention_bias=False, mlp_bias=False, lm_head_bias=False)
    fields.expect(full_attn_mod=1, interpolate_factor=1)
    kind = LayerKind(window=fields.optional_integer("sliding_window"))
    return decoder_from_hf(fields, family="phi3", pattern=(kind,))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    own: dict[str, Any] = {"sliding_window": config.kind(0).window}
    if config.rope.kind == "longrope":
        own["original_max_position_embeddings"] = config.rope.original_max_position
    return decoder_to_hf(config, model_type="phi3", architecture="Phi3ForCausalLM", **own)


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    window = file.fields.integer("attention.sliding_window")  # 0: none
    return decoder_from_gguf(
        file,
        family="phi3",
        names=GGUF_FUSED_NAMES,
        partial_rope=True,
        pattern=(LayerKind(window=window or None),),
    )


FAMILY = Family(
    name="phi3",
    model_types=("phi3",),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=NAMES),
    gguf_architectures=("phi3",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_FUSED_NAMES),
)
