"""The config of each family from GGUF metadata: what keys say, what is built in, what is refused.

Numbers of files are float32, as Python reads them.
"""

import numpy as np
import pytest

from jaxinfer.config import LayerKind, RopeConfig
from jaxinfer.models import FAMILIES, family_of_gguf, named_shape
from jaxinfer.models.gguf import GGUFSettings

SIZES = {
    "context_length": 8192,
    "embedding_length": 96,
    "feed_forward_length": 64,
    "block_count": 12,
    "attention.head_count": 8,
    "attention.head_count_kv": 4,
    "vocab_size": 300,
}
RMS = {"attention.layer_norm_rms_epsilon": 1e-6}
LAYER = {"attention.layer_norm_epsilon": 1e-5}
GEMMA = RMS | {"attention.key_length": 16, "attention.value_length": 16}

# The keys that each architecture needs.
NEEDED = {
    "llama": RMS,
    "qwen2": RMS,
    "qwen3": RMS,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "phi3": RMS | {"attention.sliding_window": 0},
    "olmo2": RMS,
    "smollm3": RMS,
    "granite": RMS | {"logit_scale": 8.0},
    "stablelm": LAYER,
    "gptneox": LAYER,
}
DIVISORS = [1.0, 1.5, 2.0, 3.0, 4.0, 8.0]
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"


def config_of(architecture, keys, tensor_names, rope_tensors=None):
    """The config of a file with these keys; those of no architecture begin with `tokenizer`."""
    metadata = {"general.architecture": architecture}
    for key, value in keys.items():
        stored = float(np.float32(value)) if isinstance(value, float) else value
        metadata[key if key.startswith("tokenizer") else f"{architecture}.{key}"] = stored
    read = family_of_gguf(metadata).config_from_gguf
    assert read is not None
    return read(GGUFSettings(metadata, tensor_names, rope_tensors or {}))


def read(architecture, tensor_names=("blk.0.ffn_norm.weight",), rope_tensors=None, **changes):
    """The config of a file with what it needs and these changes; `__` stands for a dot."""
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    end = {"tokenizer.ggml.eos_token_id": 2}
    keys = {**SIZES, **NEEDED[architecture], **end, **changes}
    return config_of(architecture, keys, tensor_names, rope_tensors)


def test_every_architecture_is_tested():
    assert set(NEEDED) == {name for family in FAMILIES for name in family.gguf_architectures}


@pytest.mark.parametrize("architecture", NEEDED)
def test_what_every_architecture_shares(architecture):
    config = read(architecture, rope__freq_base=123456.7)
    assert config.family == architecture.replace("gptneox", "gpt_neox")
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (12, 8, 4)
    assert config.head_dim == NEEDED[architecture].get("attention.key_length", 12)
    assert config.norm_eps in (1e-6, 1e-5)
    assert config.rope == RopeConfig(theta=123456.7, dim=config.head_dim)
    assert (config.tie_embeddings, config.qkv_bias, config.out_bias) == (True, False, False)
    assert (config.max_position, config.vocab_size, config.eos_ids) == (8192, 300, (2,))
    bare = {key: value for key, value in SIZES.items() if key != "attention.head_count_kv"}
    other = config_of(architecture, bare | NEEDED[architecture], ("output.weight",))
    assert (other.num_kv_heads, other.tie_embeddings) == (8, False)
    assert (other.bos_id, other.eos_ids) == (None, ())


def test_published_files_are_the_named_shapes():
    """The keys of Qwen3 8B, and of Gemma 3 27B, whose file has 64 rows less."""
    qwen = {
        "context_length": 40960,
        "embedding_length": 4096,
        "feed_forward_length": 12288,
        "block_count": 36,
        "attention.head_count": 32,
        "attention.head_count_kv": 8,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "rope.freq_base": 1000000.0,
    }
    gemma = {
        "context_length": 131072,
        "embedding_length": 5376,
        "feed_forward_length": 21504,
        "block_count": 62,
        "attention.head_count": 32,
        "attention.head_count_kv": 16,
        "attention.key_length": 128,
        "attention.value_length": 128,
        "attention.layer_norm_rms_epsilon": 9.999999974752427e-07,
        "attention.sliding_window": 1024,
        "rope.freq_base": 1000000.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
        "mm.tokens_per_image": 256,
    }
    for architecture, keys, size, ends, tensor_names, name in (
        ("qwen3", qwen, 151936, (151643, 151645, 151643), ("output.weight",), "qwen3-8b"),
        ("gemma3", gemma, 262208, (2, 1, 106), (), "gemma-3-27b"),
    ):
        ids = (f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "eot"))
        tokenizer = {"tokenizer.ggml.tokens": ["x"] * size, **dict(zip(ids, ends))}
        assert config_of(architecture, keys | tokenizer, tensor_names) == named_shape(name)


def test_gemma2():
    config = read("gemma2")
    assert config.windows == (4096, None) * 6
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert (config.attention_scale, config.embedding_scale) == (0.25, 96**0.5)
    assert (config.norm_offset, config.post_norm, config.activation) == (1.0, True, "gelu_tanh")
    other = read(
        "gemma2",
        attn_logit_softcapping=20.3,
        final_logit_softcapping=10.1,
        attention__sliding_window=128,
    )
    assert (other.attention_soft_cap, other.logits_soft_cap) == (20.3, 10.1)
    assert other.windows == (128, None) * 6
    large = read("gemma2", block_count=46)  # its 27B model: hidden size / heads
    assert large.attention_scale == 12**-0.5
    every_third = read("gemma2", attention__sliding_window_pattern=3)
    assert every_third.windows == (4096, 4096, None) * 4


def test_gemma3():
    config = read(
        "gemma3",
        attention__sliding_window=512,
        rope__freq_base=1e6,
        rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )
    local = LayerKind(window=512, rope=RopeConfig(theta=1e4, dim=16))
    assert config.pattern == (local,) * 5 + (LayerKind(),)
    assert config.rope == RopeConfig(kind="linear", theta=1e6, dim=16, factor=8.0)
    assert (config.qk_norm, config.logits_soft_cap, config.attention_scale) == ("head", None, 0.25)
    assert read("gemma3").pattern == (LayerKind(),)
    assert read("gemma3", final_logit_softcapping=30.5).logits_soft_cap == 30.5
    flags = [True, False, False, True] * 3
    other = read(
        "gemma3",
        attention__sliding_window=64,
        attention__sliding_window_pattern=flags,
        rope__freq_base_swa=2e4,
    )
    assert other.windows == (64, None, None, 64) * 3
    assert other.rope_of(3) == RopeConfig(theta=2e4, dim=16)
    assert read("gemma3", block_count=62, attention__sliding_window=64).attention_scale == 12**-0.5


def test_phi3():
    assert read("phi3").pattern == (LayerKind(),)
    assert read("phi3", attention__sliding_window=2047).pattern == (LayerKind(window=2047),)
    assert read("phi3", rope__dimension_count=8).rope.dim == 8
    longrope = {
        "rope_tensors": {LONG: DIVISORS, SHORT: [1.0] * 6},
        "rope__scaling__original_context_length": 2048,
        "rope__scaling__attn_factor": 1.19,
    }
    expected = RopeConfig(
        kind="longrope",
        dim=12,
        factor=4.0,
        original_max_position=2048,
        attention_factor=1.19,
        long_factor=tuple(DIVISORS),
        short_factor=(1.0,) * 6,
    )
    assert read("phi3", **longrope).rope == expected
    assert read("phi3", **longrope, rope__scaling__type="longrope").rope == expected


def test_olmo2_smollm3_and_qwen():
    olmo2 = read("olmo2")
    assert (olmo2.pre_norm, olmo2.post_norm, olmo2.qk_norm) == (False, True, "projection")
    rotating, not_rotating = LayerKind(), LayerKind(use_rope=False)
    assert read("smollm3").pattern == (rotating,) * 3 + (not_rotating,)
    assert read("smollm3", block_count=3).pattern == (rotating,)
    names = {f"blk.0.attn_{x}.bias" for x in "qkv"}
    assert read("qwen2", names).qkv_bias and not read("qwen2", names).out_bias
    assert (read("qwen2").qk_norm, read("qwen3").qk_norm) == (None, "head")


def test_granite():
    config = read(
        "granite",
        attention__scale=0.015625,
        embedding_scale=12.0,
        residual_scale=0.22,
        logit_scale=13.0,
    )
    assert (config.attention_scale, config.embedding_scale) == (0.015625, 12.0)
    assert (config.residual_scale, config.logits_scale) == (0.22, 1 / 13)
    bare = read("granite", residual_scale=0.0, embedding_scale=0.0, attention__scale=0.0)
    assert (bare.attention_scale, bare.embedding_scale, bare.residual_scale) == (None, 1.0, 1.0)
    assert bare == read("granite", rope__scaling__finetuned=True)


def test_layer_norms_and_parallel_residuals():
    stablelm = read("stablelm", rope__dimension_count=4, use_parallel_residual=True)
    assert (stablelm.norm, stablelm.rope.dim) == ("layer", 4)
    assert not stablelm.parallel_residual and not stablelm.shared_norm
    parallel = read("stablelm", ("token_embd.weight",), use_parallel_residual=False)
    assert parallel.parallel_residual and parallel.shared_norm
    biases = {f"blk.0.{x}.bias" for x in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}
    neox = read("gptneox", biases, rope__dimension_count=4)
    assert (neox.norm, neox.rope.dim, neox.gated_mlp, neox.activation) == (
        "layer",
        4,
        False,
        "gelu",
    )
    assert neox.qkv_bias and neox.out_bias and neox.mlp_bias
    assert neox.parallel_residual and not neox.shared_norm
    assert not read("gptneox", use_parallel_residual=False).parallel_residual


def test_rope_scaling():
    linear = RopeConfig(kind="linear", dim=12, factor=4.0)
    assert read("qwen2", rope__scaling__factor=4.0).rope == linear  # what a missing type says
    assert read("qwen2", rope__scale_linear=4.0).rope == linear
    plain = RopeConfig(dim=12)
    assert read("qwen2", rope__scaling__factor=0.0).rope == plain
    assert read("qwen2", rope__scaling__type="none", rope__scaling__factor=4.0).rope == plain
    yarn = read(
        "qwen2",
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=2048,
        rope__scaling__yarn_beta_fast=16.5,
        rope__scaling__yarn_beta_slow=1.1,
    )
    assert yarn.rope == RopeConfig(
        kind="yarn",
        dim=12,
        factor=4.0,
        original_max_position=2048,
        beta_fast=16.5,
        beta_slow=1.1,
    )
    stored = np.array([1.1] * 6, np.float32).tolist()
    llama = read("llama", rope_tensors={"rope_freqs.weight": stored}).rope
    assert llama.long_factor == llama.short_factor == (1.1,) * 6
    assert llama.attention_factor == 1.0


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("qwen2", {"attention__sliding_window": 64}, "'qwen2' sets .*attention.sliding_window=64"),
        ("olmo2", {"attention__sliding_window": 64}, "'olmo2' sets .*attention.sliding_window=64"),
        ("smollm3", {"attention__sliding_window": 64}, "attention.sliding_window=64"),
        ("qwen3", {"expert_count": 8}, "expert_count=8 is not supported"),
        ("qwen3", {"attention__scale": 0.5}, "attention.scale=0.5"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"attention__scale": 0.5}, "attention.scale=0.5"),
        ("gemma3", {"attention__causal": False}, "attention.causal=False"),
        ("gemma2", {"rope__freq_base_swa": 1e3}, "rope.freq_base_swa=1000.0"),
        ("gemma2", {"attention__sliding_window_pattern": 0}, "pattern=0, which must be a period"),
        ("gemma2", {"attention__sliding_window_pattern": [True]}, "say of each of 12 layers"),
        ("gptneox", {"attention__clamp_kqv": 8.0}, "attention.clamp_kqv=8.0"),
        (
            "gptneox",
            {"use_parallel_residual": "yes"},
            "use_parallel_residual='yes' must be true or",
        ),
        ("granite", {"logit_scale": None}, "lacks logit_scale"),
        ("granite", {"rope__scaling__finetuned": False}, "rope.scaling.finetuned=False is not"),
        ("granite", {"embedding_scale": "big"}, "embedding_scale='big' must be a number"),
        ("phi3", {"attention__sliding_window": None}, "lacks attention.sliding_window"),
        ("stablelm", {"attention__layer_norm_epsilon": None}, "lacks attention.layer_norm_epsilon"),
        ("olmo2", {"attention__layer_norm_rms_epsilon": None}, "lacks attention.layer_norm_rms"),
        ("granite", {"rope__dimension_count": 8}, "dimension_count=8, and .* all 12 dimensions"),
        ("qwen3", {"rope__dimension_count": 8}, "rope.dimension_count=8"),
        ("phi3", {"rope__dimension_count": 16}, "dim=16 exceeds ModelConfig.head_dim=12"),
        (
            "qwen2",
            {"rope__scaling__yarn_log_multiplier": 0.1},
            "rope.scaling.yarn_log_multiplier=0.1",
        ),
        (
            "qwen2",
            {"rope__scaling__type": "su"},
            "'su' is not supported. Known: none, linear, yarn",
        ),
        ("phi3", {"rope__scaling__attn_factor": 1.2}, f"attn_factor=1.2 without {LONG}"),
        (
            "phi3",
            {"rope__scaling__type": "longrope"},
            "no divisors and rope.scaling.type='longrope'",
        ),
        ("phi3", {"rope_tensors": {LONG: DIVISORS}}, f"has {LONG} and .* must be .*{SHORT}"),
        (
            "phi3",
            {"rope_tensors": {LONG: DIVISORS[:4], SHORT: DIVISORS}},
            "long_factor has 4 values; longrope of dim=12 needs 6",
        ),
        (
            "llama",
            {"rope_tensors": {"rope_freqs.weight": DIVISORS}, "rope__scaling__type": "longrope"},
            "rope_freqs.weight and rope.scaling.type='longrope'",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(architecture, changes, message):
    with pytest.raises(ValueError, match=message):
        read(architecture, **changes)
