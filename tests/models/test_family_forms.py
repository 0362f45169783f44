"""The forms that config.json has had over the years: equal models are read as equal configs."""

import dataclasses
import json

import pytest

from jaxinfer.config import LayerKind, RopeConfig
from jaxinfer.models import family_of, family_of_hf

from .small_configs import LONGROPE, MODEL_TYPES, read

DEFAULT = {"rope_type": "default"}
FULL, WINDOW = "full_attention", "sliding_attention"
LOCAL = RopeConfig(theta=1e4, dim=256)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("family", sorted(MODEL_TYPES.keys() - {"gemma3"}))
def test_rope_in_old_and_new_form(family):
    new = read(family, rope_parameters={**DEFAULT, "rope_theta": 5e5})
    assert new.rope.theta == 5e5
    assert new == read(family, rope_theta=500000)
    scaled = read(family, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert scaled.rope.kind == "llama3" and scaled.rope.dim == new.rope.dim
    if family != "phi3":  # which has the original length of its own
        assert scaled.rope.original_max_position == 512
    assert scaled == read(family, rope_scaling=LLAMA3, rope_theta=5e5)


NO_RULE = {"sliding_window": 64}
SAME = {
    # Forms of one and the same model: (family, older files', newer ones').
    "mistral without a window": (
        "mistral",
        {"sliding_window": None},
        {"sliding_window": None, "num_key_value_heads": 8},
    ),
    "qwen2 with late windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 10},
        {**NO_RULE, "use_sliding_window": True, "layer_types": [FULL] * 10 + [WINDOW] * 2},
    ),
    "qwen3 whose window is not in use": (
        "qwen3",
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 2},
        {"sliding_window": None, "layer_types": [FULL] * 12},
    ),
    "gemma2": (
        "gemma2",
        {**NO_RULE, "hidden_act": "gelu", "sliding_window_size": 64},
        {**NO_RULE, "layer_types": [WINDOW, FULL] * 6, "use_bidirectional_attention": None},
    ),
    "gemma3": (
        "gemma3",
        {
            "sliding_window": 64,
            "sliding_window_pattern": 4,
            "rope_theta": 2e6,
            "rope_local_base_freq": 2e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "sliding_window": 64,
            "_sliding_window_pattern": 4,
            "layer_types": ([WINDOW] * 3 + [FULL]) * 3,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e6},
                WINDOW: {"rope_type": "default", "rope_theta": 2e4},
            },
        },
    ),
    "smollm3 by interval": (
        "smollm3",
        {"no_rope_layer_interval": 3},
        {"no_rope_layers": [1, 1, 0] * 4, "layer_types": [FULL] * 12, "max_window_layers": 28},
    ),
    "smollm3 with windows where nothing turns": (
        "smollm3",
        {**NO_RULE, "use_sliding_window": True},
        {
            **NO_RULE,
            "use_sliding_window": True,
            "no_rope_layers": [1, 1, 1, 0] * 3,
            "layer_types": [FULL, FULL, FULL, WINDOW] * 3,
        },
    ),
    "stablelm": (
        "stablelm",
        {"partial_rotary_factor": 0.5, "rope_theta": 2e4},
        {"rope_parameters": {**DEFAULT, "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
    ),
    "gpt_neox": (
        "gpt_neox",
        {"rotary_pct": 0.5, "rotary_emb_base": 20000},
        {"rope_parameters": {**DEFAULT, "rope_theta": 2e4, "partial_rotary_factor": 0.5}},
    ),
    "gpt_neox with both names": (
        "gpt_neox",
        {"rotary_pct": 0.5, "partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "classifier_dropout": 0.1},
    ),
}


@pytest.mark.parametrize(("family", "old", "new"), SAME.values(), ids=SAME)
def test_old_and_new_forms(family, old, new):
    config = read(family, **old)
    assert read(family, **new) == config
    saved = json.loads(json.dumps(family_of(config).config_to_hf(config)))
    assert family_of(config).config_from_hf(saved) == config


def test_what_the_forms_mean():
    """So that the equalities above are not of two files read wrong alike."""
    assert read("mistral", sliding_window=None).windows == (None,) * 12
    _, old, _ = SAME["qwen2 with late windows"]
    assert read("qwen2", **old).windows == (None,) * 10 + (64, 64)
    _, old, _ = SAME["qwen3 whose window is not in use"]
    assert read("qwen3", **old).windows == (None,) * 12
    _, old, _ = SAME["gemma3"]
    config = read("gemma3", **old)
    assert config.windows == (64, 64, 64, None) * 3
    full = RopeConfig(kind="linear", theta=2e6, dim=256, factor=8.0)
    local = RopeConfig(theta=2e4, dim=256)
    assert [config.rope_of(i) for i in range(4)] == [local] * 3 + [full]
    _, old, _ = SAME["smollm3 with windows where nothing turns"]
    config = read("smollm3", **old)
    assert config.windows == (None, None, None, 64) * 3
    assert [config.rope_of(i) is None for i in range(4)] == [False, False, False, True]
    assert read("gpt_neox", rotary_pct=0.5, rotary_emb_base=2e4).rope == RopeConfig(
        theta=2e4, dim=4
    )


LONG = {name: LONGROPE[name] for name in ("short_factor", "long_factor")}


@pytest.mark.parametrize(
    "settings",
    [
        {
            "rope_scaling": {"type": "longrope", **LONG},
            "original_max_position_embeddings": 1024,
            "partial_rotary_factor": 0.75,
            "rope_theta": 10000.0,
        },
        {
            "rope_scaling": {"type": "su", **LONG},
            "original_max_position_embeddings": 1024,
            "partial_rotary_factor": 0.75,
        },
        {
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope",
                **LONG,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 9,  # the one beside it goes first
                "partial_rotary_factor": 0.75,
            },
        },
    ],
)
def test_phi3_longrope(settings):
    config = read("phi3", max_position_embeddings=8192, **settings)
    assert config.rope == RopeConfig(
        kind="longrope",
        dim=6,
        factor=8.0,
        original_max_position=1024,
        short_factor=(1.0,) * 3,
        long_factor=(2.0,) * 3,
    )
    default = read("phi3", **settings | {"original_max_position_embeddings": 4096})
    absent = {k: v for k, v in settings.items() if k != "original_max_position_embeddings"}
    assert read("phi3", **absent) == default


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_python", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
    ],
)
def test_activations(name, activation):
    assert read("llama", hidden_act=name).activation == activation
    assert read("gpt_neox", hidden_act=name).activation == activation
    assert read("gemma2", hidden_activation=name).activation == activation


def test_a_gemma3_that_also_sees():
    """Its published files hold little more of the text part than this; the rest are defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": text,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    }
    family = family_of_hf(hf)
    config = family.config_from_hf(hf)
    rope = RopeConfig(kind="linear", theta=1e6, dim=256, factor=8.0)
    pattern = (LayerKind(window=1024, rope=LOCAL),) * 5 + (LayerKind(),)
    assert config == dataclasses.replace(
        read("gemma3"),
        vocab_size=262208,
        hidden_size=2560,
        intermediate_size=10240,
        num_layers=34,
        num_heads=8,
        rope=rope,
        pattern=pattern,
        embedding_scale=2560**0.5,
        eos_ids=(1, 106),
    )
    assert config == family.config_from_hf(text | {"eos_token_id": [1, 106]})
    for change, message in (
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"text_config": text | {"use_bidirectional_attention": True}}, "bidirectional"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
    ):
        with pytest.raises(ValueError, match=message):
            family.config_from_hf(hf | change)
