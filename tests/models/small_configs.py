"""Small configs of every family, read from what a config.json would say."""

from jaxinfer.models import FAMILIES, family_of_hf

SIZES = {
    "vocab_size": 500,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 32,
}
MODEL_TYPES = {family.name: family.model_types[0] for family in FAMILIES}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}

# What a file says besides, for each thing in which models of a family differ.
VARIANTS = [
    *((name, {}) for name in MODEL_TYPES),
    ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 8}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    ("gemma2", {"attention_bias": True, "query_pre_attn_scalar": 144}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    ("olmo2", {"attention_bias": True, "num_key_value_heads": 8}),
    ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    (
        "granite",
        {
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 13.0,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    ("stablelm", {"partial_rotary_factor": 1.0}),
    ("gpt_neox", {"rotary_pct": 1.0}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("phi3", {"sliding_window": 2047, "num_key_value_heads": 8, "tie_word_embeddings": True}),
    (
        "phi3",
        {
            "max_position_embeddings": 8192,
            "original_max_position_embeddings": 1024,
            "rope_scaling": LONGROPE,
            "partial_rotary_factor": 0.75,
        },
    ),
]


def read(family, **settings):
    """The config of a file with SIZES and these settings."""
    hf = {"model_type": MODEL_TYPES[family], **SIZES, **settings}
    return family_of_hf(hf).config_from_hf(hf)
