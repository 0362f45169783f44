"""Each family's config from config.json: defaults, old and new forms, refusals, the way back."""

import dataclasses
import json

import pytest

from jaxinfer.checkpoint.config_json import config_from_json, config_to_json
from jaxinfer.config import LayerKind, ModelConfig, RopeConfig
from jaxinfer.models import FAMILIES, NAMED_SHAPES, family_of, family_of_hf
from jaxinfer.models.huggingface import pattern_of, preimage

from .small_configs import LONGROPE, MODEL_TYPES, VARIANTS, read

DEFAULT = {"rope_type": "default"}
FULL, WINDOW = "full_attention", "sliding_attention"


def make(family, **fields):
    """A config of SIZES."""
    sizes = {
        "vocab_size": 500,
        "hidden_size": 256,
        "intermediate_size": 96,
        "num_layers": 12,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_dim": 8,
        "norm_eps": 1e-6,
        "rope": RopeConfig(dim=8),
    }
    return ModelConfig(family=family, **(sizes | fields))


GEMMA = {
    "num_kv_heads": 4,
    "head_dim": 256,
    "norm_offset": 1.0,
    "post_norm": True,
    "activation": "gelu_tanh",
    "attention_scale": 1 / 16,
    "embedding_scale": 16.0,
    "tie_embeddings": True,
    "bos_id": 2,
    "eos_ids": (1,),
}
LOCAL = RopeConfig(theta=1e4, dim=256)

# What the classes of the transformers library make of a file that has nothing but sizes.
DEFAULTS = [
    make("llama", bos_id=1, eos_ids=(2,)),
    make(
        "mistral",
        num_kv_heads=8,
        pattern=(LayerKind(window=4096),),
        max_position=131072,
        bos_id=1,
        eos_ids=(2,),
    ),
    make("qwen2", qkv_bias=True, max_position=32768),
    make("qwen3", head_dim=128, rope=RopeConfig(dim=128), qk_norm="head", max_position=32768),
    make(
        "gemma2",
        **GEMMA,
        rope=RopeConfig(dim=256),
        pattern=(LayerKind(window=4096), LayerKind()),
        attention_soft_cap=50.0,
        logits_soft_cap=30.0,
        max_position=8192,
    ),
    make(
        "gemma3",
        **GEMMA,
        qk_norm="head",
        rope=RopeConfig(theta=1e6, dim=256),
        pattern=(LayerKind(window=4096, rope=LOCAL),) * 5 + (LayerKind(),),
        max_position=131072,
    ),
    make("phi3", norm_eps=1e-5, max_position=4096, bos_id=1, eos_ids=(32000,)),
    make(
        "olmo2",
        norm_eps=1e-5,
        pre_norm=False,
        post_norm=True,
        qk_norm="projection",
        eos_ids=(50279,),
    ),
    make(
        "smollm3",
        num_kv_heads=4,
        rope=RopeConfig(theta=2e6, dim=8),
        pattern=(LayerKind(),) * 3 + (LayerKind(use_rope=False),),
        max_position=32768,
        tie_embeddings=True,
        bos_id=128000,
        eos_ids=(128001,),
    ),
    make("granite", attention_scale=1.0, bos_id=1, eos_ids=(2,)),
    make(
        "stablelm",
        norm="layer",
        norm_eps=1e-5,
        rope=RopeConfig(dim=2),
        max_position=4096,
        bos_id=0,
        eos_ids=(0,),
    ),
    make(
        "gpt_neox",
        norm="layer",
        norm_eps=1e-5,
        rope=RopeConfig(dim=2),
        parallel_residual=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated_mlp=False,
        activation="gelu",
        bos_id=0,
        eos_ids=(2,),
    ),
]


@pytest.mark.parametrize("expected", DEFAULTS, ids=lambda config: config.family)
def test_defaults(expected):
    assert read(expected.family) == expected


def test_defaults_are_known_of_every_family():
    assert [config.family for config in DEFAULTS] == [family.name for family in FAMILIES]


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
    assert read(family, **old) == read(family, **new)


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
        DEFAULTS[5],
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


HARMLESS = [
    # What published files say besides, and no model reads or reads otherwise.
    ("qwen2", {"use_mrope": False}),
    ("gemma2", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    ("gemma3", {"cache_implementation": "hybrid", "attn_logit_softcapping": None}),
    ("smollm3", {"max_window_layers": 28, "pretraining_tp": 2, "sliding_window": None}),
    ("gpt_neox", {"attention_probs_dropout_prob": 0.1, "classifier_dropout": 0.1}),
    (
        "phi3",
        {
            "attention_bias": False,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "embd_pdrop": 0.0,
        },
    ),
]


@pytest.mark.parametrize(("family", "settings"), HARMLESS)
def test_settings_that_change_nothing(family, settings):
    assert read(family, **settings) == read(family)


REFUSED = [
    ("mistral", {"layer_types": [FULL] * 12}, "layer_types"),
    ("mistral", {"attention_bias": True}, "attention_bias=True"),
    ("qwen2", {"use_mrope": True}, "use_mrope=True"),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention"),
    ("qwen2", {"layer_types": [FULL] * 11}, "must name 12 layers"),
    ("qwen2", {"layer_types": ["linear_attention"] * 12}, "linear_attention.*each one of full"),
    ("qwen2", {"layer_types": [FULL, WINDOW] * 6}, "no sliding_window is in use"),
    ("qwen3", {"num_experts": 8}, "num_experts=8"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"hidden_activation": "quick_gelu"}, "hidden_activation='quick_gelu'"),
    ("gemma2", {"sliding_window_size": 64}, "sliding_window_size=64"),
    ("gemma2", {"query_pre_attn_scalar": None}, "lacks query_pre_attn_scalar"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma3", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.*rope_type"),
    ("gemma3", {"sliding_window": 0}, "window=0 must be at least 1"),
    ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
    ("phi3", {"full_attn_mod": 2}, "full_attn_mod=2"),
    ("phi3", {"rope_scaling": {"type": "yarn", **LONG}}, "'yarn'.*long_factor"),
    ("phi3", {"rope_scaling": {"type": "longrope", **LONG}}, "short_factor has 3 values.*needs 4"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "0 or 1 for each of 12 layers"),
    ("granite", {"logits_multiplier": 2.0}, "logits_multiplier=2.0"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm=True"),
    ("stablelm", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
    ("gpt_neox", {"hidden_act": "relu"}, "hidden_act='relu'"),
    ("gpt_neox", {"rotary_pct": 0.5, "partial_rotary_factor": 1.0}, "rotary_pct=0.5.*contradict"),
]


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_what_is_not_understood_is_refused_by_name(family, change, message):
    with pytest.raises(ValueError, match=message):
        read(family, **change)


@pytest.mark.parametrize("family", sorted(MODEL_TYPES))
def test_unknown_settings_are_refused_by_every_family(family):
    for change in ({"quantization_config": {"bits": 4}}, {"new_trick": 0.5}):
        with pytest.raises(ValueError, match=next(iter(change))):
            read(family, **change)


CONFIGS = [
    *(read(family, **settings) for family, settings in VARIANTS),
    *(read(family, **settings) for family, settings, _ in SAME.values()),
    *NAMED_SHAPES.values(),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
def test_round_trips(config):
    """Through config.json as text, and through the form of Orbax folders."""
    family = family_of(config)
    settings = json.loads(json.dumps(family.config_to_hf(config)))
    assert family_of_hf(settings) is family
    assert family.config_from_hf(settings) == config
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


def test_several_windows_cannot_be_saved():
    pattern = (LayerKind(window=8), LayerKind(window=16))
    config = dataclasses.replace(read("gemma2"), pattern=pattern)
    with pytest.raises(ValueError, match=r"windows of \[8, 16\]"):
        family_of(config).config_to_hf(config)


def test_preimage_gives_the_very_setting_back():
    def scale(x):
        return x**-0.5

    def reciprocal(x):
        return 1 / x

    for number in range(1, 600):
        assert preimage(scale, scale(number), scale(number) ** -2) == number
        tenth = number / 10
        for function, guess in ((scale, scale(tenth) ** -2), (reciprocal, 1 / reciprocal(tenth))):
            assert function(preimage(function, function(tenth), guess)) == function(tenth)


def test_pattern_is_the_shortest():
    a, b = LayerKind(), LayerKind(window=4)
    assert pattern_of([a] * 5) == (a,)
    assert pattern_of([b, a, b, a, b]) == (b, a)
    assert pattern_of([a, a, b, b]) == (a, a, b, b)
    assert pattern_of([b, b, a] * 2 + [b]) == (b, b, a)
