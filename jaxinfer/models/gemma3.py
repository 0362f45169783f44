"""The Gemma 3 family: of six layers five have a window and a rotary embedding of their own.

Of checkpoints that also see, the text part is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.config import LayerKind, ModelConfig, RopeConfig
from jaxinfer.models.family import Family
from jaxinfer.models.fields import Fields
from jaxinfer.models.gemma2 import DEFAULTS, gemma_from_gguf, gemma_from_hf, gemma_to_hf
from jaxinfer.models.gguf import GGUFSettings, windows_from_gguf
from jaxinfer.models.huggingface import (
    HARMLESS,
    pattern_of,
    settings,
    token_ids,
    windows_from_hf,
)
from jaxinfer.models.huggingface_rope import rope_from_hf, rope_to_hf
from jaxinfer.models.layout import GGUF_NAMES, HF_POST_NORM_NAMES, Layout

# Of a checkpoint that also sees: what is about images.
_VISION = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
)
_GGUF_VISION = (
    "mm.tokens_per_image",
    "vision.attention.head_count",
    "vision.attention.layer_norm_epsilon",
    "vision.block_count",
    "vision.embedding_length",
    "vision.feed_forward_length",
    "vision.image_size",
    "vision.num_channels",
    "vision.patch_size",
)


def config_from_hf(hf: Mapping[str, Any]) -> ModelConfig:
    """The config that a config.json describes. Raises ValueError on a setting it does not know."""
    fields = settings(
        _text_settings(hf) if "text_config" in hf else hf,
        **DEFAULTS,
        # Published files of checkpoints that also see leave out even these.
        vocab_size=262208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        max_position_embeddings=131072,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window_pattern=6,
    )
    fields.take("_sliding_window_pattern")  # what layer_types was made from
    period = fields.integer("sliding_window_pattern")
    window = fields.optional_integer("sliding_window")
    windows = windows_from_hf(fields, window, lambda i: (i + 1) % period != 0)
    rope, local = _ropes(fields)
    kinds = (LayerKind(window=w, rope=local) if w is not None else LayerKind() for w in windows)
    return gemma_from_hf(
        fields, family="gemma3", qk_norm="head", rope=rope, pattern=pattern_of(kinds)
    )


def _text_settings(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the text part; both levels may name ids that end a text."""
    outer = Fields(hf, "config.json")
    text = dict(outer.take("text_config"))
    tied = text.get("tie_word_embeddings", True)
    outer.expect(tie_word_embeddings=tied, is_encoder_decoder=False)
    if outer.take("bos_token_id") is not None:
        text.setdefault("bos_token_id", outer.take("bos_token_id"))
    ends = token_ids([*token_ids(outer.take("eos_token_id")), *token_ids(text.get("eos_token_id"))])
    outer.refuse_rest(HARMLESS.union(_VISION))
    return text | {"eos_token_id": list(ends)} if ends else text


def _ropes(fields: Fields) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers without a window, and with one."""
    forms = Fields(fields.take("rope_parameters", {}), "config.json, rope_parameters")
    full = {
        "rope_parameters": forms.take("full_attention"),
        "rope_scaling": fields.take("rope_scaling"),
        "rope_theta": fields.take("rope_theta"),
    }
    sliding = {
        "rope_parameters": forms.take("sliding_attention"),
        "rope_theta": fields.take("rope_local_base_freq"),
    }
    forms.refuse_rest()
    sizes = fields.integer("head_dim"), fields.integer("max_position_embeddings")
    full_rope, local = (rope_from_hf(Fields(x, "config.json"), *sizes) for x in (full, sliding))
    return full_rope, local


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The config.json of `config`; `config_from_hf` gives `config` back."""
    local = next((kind.rope for kind in config.pattern if kind.rope), config.rope)
    return gemma_to_hf(
        config,
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
    ) | {
        "rope_parameters": {
            "full_attention": rope_to_hf(config.rope, config.head_dim),
            "sliding_attention": rope_to_hf(local, config.head_dim),
        }
    }


def config_from_gguf(file: GGUFSettings) -> ModelConfig:
    """The config that a GGUF file describes. Raises ValueError on a setting it does not know."""
    fields = file.fields
    window = fields.integer("attention.sliding_window", 0) or None
    local = RopeConfig(theta=fields.number("rope.freq_base_swa", 1e4), dim=file.head_dim)
    kinds = (
        LayerKind() if window is None else LayerKind(window=window, rope=local)
        for window in windows_from_gguf(fields, window, period=6)
    )
    return gemma_from_gguf(
        file,
        family="gemma3",
        layers_of_27b=62,
        harmless=_GGUF_VISION,
        qk_norm="head",
        pattern=pattern_of(kinds),
        logits_soft_cap=fields.number("final_logit_softcapping", 0.0) or None,
    )


FAMILY = Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    weights=Layout(names=HF_POST_NORM_NAMES),
    prefixes=(
        ("language_model.", ""),
        ("model.language_model.", "model."),
    ),
    ignored=("*vision_tower.*", "*multi_modal_projector.*"),
    gguf_architectures=("gemma3",),
    config_from_gguf=config_from_gguf,
    gguf_weights=Layout(names=GGUF_NAMES, norm_offset=1.0),
)
