"""Each family's config from config.json: defaults, old and new forms, refusals, the way back."""

import dataclasses
import json

import pytest

from jaxinfer.checkpoint.config_json import config_from_json, config_to_json
from jaxinfer.config import LayerKind, ModelConfig, RopeConfig
from jaxinfer.models import FAMILIES, NAMED_SHAPES, family_of, family_of_hf
from jaxinfer.models.huggingface import pattern_of, preimage

from .small_configs import LONGROPE, MODEL_TYPES, VARIANTS, read


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


LONG = {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
FULL, WINDOW = "full_attention", "sliding_attention"

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
