"""The Llama config from config.json and from GGUF metadata: nothing is dropped in silence."""

import pytest

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models import family_of, family_of_gguf, family_of_hf, named_shape
from jaxinfer.models.gguf import GGUFSettings
from jaxinfer.models.llama import config_from_gguf as read_gguf
from jaxinfer.models.llama import config_from_hf, config_to_hf

HF = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}

GGUF = {
    "general.architecture": "llama",
    "general.name": "a model",
    "llama.vocab_size": 49152,
    "llama.embedding_length": 576,
    "llama.feed_forward_length": 1536,
    "llama.block_count": 30,
    "llama.context_length": 8192,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.attention.layer_norm_rms_epsilon": 9.999999747378752e-06,
    "llama.rope.freq_base": 100000.0,
    "llama.rope.dimension_count": 64,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_from_gguf(metadata, tensor_names=(), rope_tensors=None):
    return read_gguf(GGUFSettings(metadata, tensor_names, rope_tensors or {}))


def test_smollm2_from_both_files_is_the_named_shape():
    """The published config.json of SmolLM2-135M-Instruct, odd fields and all, and the GGUF keys."""
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pad_token_id": 2,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": 49152,
    }
    assert config_from_hf(hf) == named_shape("smollm2-135m")
    assert config_from_gguf(GGUF, {"token_embd.weight"}) == named_shape("smollm2-135m")


def test_defaults_of_absent_fields():
    config = config_from_hf(HF)
    assert config == ModelConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0, dim=16),
        max_position=4096,
        bos_id=1,
        eos_ids=(2,),
    )
    bare = {name: value for name, value in HF.items() if name != "num_key_value_heads"}
    assert config_from_hf(bare | {"head_dim": None}).num_kv_heads == 4
    wide = config_from_hf(HF | {"head_dim": 32, "attention_bias": True, "mlp_bias": True})
    assert (wide.head_dim, wide.rope.dim) == (32, 32)
    assert wide.qkv_bias and wide.out_bias and wide.mlp_bias


@pytest.mark.parametrize(("eos", "ids"), [(2, (2,)), ([7, 2, 7], (7, 2)), (None, ())])
def test_eos_is_one_id_or_several(eos, ids):
    assert config_from_hf(HF | {"eos_token_id": eos}).eos_ids == ids


ROPES = [
    ({"rope_type": "default"}, {}),
    ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0}),
    (
        LLAMA3,
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position": 8192,
        },
    ),
    (
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "truncate": False, "mscale": 0.7},
        {
            "factor": 4.0,
            "beta_fast": 16.0,
            "truncate": False,
            "mscale": 0.7,
            "original_max_position": 4096,
        },
    ),
    (
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.25,
        },
        {
            "short_factor": (1.0,) * 8,
            "long_factor": (2.0,) * 8,
            "original_max_position": 1024,
            "factor": 4.0,
            "attention_factor": 1.25,
        },
    ),
]


@pytest.mark.parametrize(("given", "fields"), ROPES)
def test_rope_in_both_forms(given, fields):
    expected = RopeConfig(kind=given["rope_type"], theta=500000.0, dim=16, **fields)
    new = config_from_hf(HF | {"rope_parameters": given | {"rope_theta": 500000.0}})
    old = config_from_hf(HF | {"rope_scaling": given, "rope_theta": 500000.0})
    legacy = {**given, "type": given["rope_type"]}
    del legacy["rope_type"]
    oldest = config_from_hf(HF | {"rope_scaling": legacy, "rope_theta": 500000})
    assert new.rope == old.rope == oldest.rope == expected
    both = {"rope_scaling": given, "rope_parameters": given, "rope_theta": 500000.0}
    assert config_from_hf(HF | both).rope == expected


@pytest.mark.parametrize(("given", "fields"), ROPES)
def test_config_json_round_trip(given, fields):
    config = config_from_hf(
        HF
        | {
            "rope_parameters": given | {"rope_theta": 1e6, "partial_rotary_factor": 1.0},
            "attention_bias": True,
            "tie_word_embeddings": True,
            "eos_token_id": [3, 4],
            "bos_token_id": 1,
        }
    )
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(("head_dim", "dim"), [(64, 16), (80, 32), (44, 30), (46, 26), (96, 72)])
def test_partial_rotation_round_trip(head_dim, dim):
    """Also where head_dim * (dim / head_dim) rounds to less than dim, and truncation loses one."""
    config = config_from_hf(HF | {"head_dim": head_dim})
    wanted = RopeConfig(dim=dim)
    saved = config_to_hf(ModelConfig(**{**vars(config), "rope": wanted}))
    assert config_from_hf(saved).rope == wanted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"logits_scaling": 2.0, "embedding_multiplier": 3.0}, "embedding_multiplier=3.0, logits"),
        ({"hidden_act": "relu"}, "hidden_act='relu' is not supported. Known: silu"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"vocab_size": "many"}, "vocab_size='many' must be an integer"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps='small' must be a number"),
        ({"attention_bias": "no"}, "attention_bias='no' must be true or false"),
        ({"num_attention_heads": 3}, "hidden_size=64 is not a multiple of num_attention_heads=3"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is unknown"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "alpha": 1}},
            "'linear'.* alpha=1",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "'llama3' lacks low_freq_factor",
        ),
        (
            {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "contradict",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(HF | change)


def test_unset_fields_are_not_refused():
    assert config_from_hf(HF | {"sliding_window": None, "pruned_heads": {}}) == config_from_hf(HF)


def test_unknown_architecture_lists_the_known():
    with pytest.raises(ValueError, match=r"'gpt9' is not supported. Known: .*llama"):
        family_of_hf({"model_type": "gpt9"})
    with pytest.raises(ValueError, match="None is not supported"):
        family_of_hf({})
    with pytest.raises(ValueError, match=r"'rwkv9' is not supported. Known: .*llama"):
        family_of_gguf({"general.architecture": "rwkv9"})
    assert family_of(config_from_hf(HF)) is family_of_hf(HF) is family_of_gguf(GGUF)


def test_gguf_facts_that_tensors_tell():
    names = {"token_embd.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.ffn_up.bias"}
    config = config_from_gguf(GGUF, names)
    assert not config.tie_embeddings
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, True)
    tokens = {"tokenizer.ggml.tokens": ["a"] * 40, "llama.vocab_size": None}
    assert config_from_gguf(GGUF | tokens, names).vocab_size == 40
    ends = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2}
    assert config_from_gguf(GGUF | ends, names).eos_ids == (2, 9)


def test_gguf_rope_kinds():
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = RopeConfig(kind="linear", theta=100000.0, dim=64, factor=4.0)
    assert config_from_gguf(GGUF | linear).rope == rope
    assert config_from_gguf(GGUF | {"llama.rope.scale_linear": 4.0}).rope == rope
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 2.0,
        "llama.rope.scaling.original_context_length": 4096,
        "llama.rope.scaling.finetuned": True,
    }
    assert config_from_gguf(GGUF | yarn).rope == RopeConfig(
        kind="yarn", theta=100000.0, dim=64, factor=2.0, original_max_position=4096
    )
    divisors = [1.0 + i for i in range(32)]
    tensors = {"rope_freqs.weight": divisors}
    rope = config_from_gguf(GGUF, rope_tensors=tensors).rope
    assert rope.kind == "longrope" and rope.attention_factor == 1.0
    assert rope.short_factor == rope.long_factor == tuple(divisors)
    with pytest.raises(ValueError, match=r"rope_freqs.weight and rope.scaling.type='linear'"):
        config_from_gguf(GGUF | linear, rope_tensors=tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attention.sliding_window": 4096}, "attention.sliding_window=4096"),
        ({"llama.logit_scale": 0.5}, "logit_scale=0.5"),
        ({"llama.rope.dimension_count": 32}, "rope.dimension_count=32"),
        ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type='longrope'"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor=1.5"),
        ({"llama.attention.value_length": 32}, "attention.value_length=32"),
        ({"llama.feed_forward_length": [1, 2]}, r"feed_forward_length=\[1, 2\] must be an integer"),
        ({"split.count": 3}, "split.count=3"),
        ({"llama.vocab_size": None}, "lacks vocab_size"),
    ],
)
def test_gguf_settings_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_gguf(GGUF | change)
