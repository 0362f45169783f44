"""GGUF of every family that llama.cpp writes: the same model as the Hugging Face folder is."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, open_checkpoint, save_huggingface
from jaxinfer.checkpoint.gguf import GGUFReader
from jaxinfer.compute import Decoder
from jaxinfer.models import FAMILIES, family_of_hf

from ..conftest import TINY, TINY_NAMES
from ..logits import logits_in_chunks
from .llama_cpp import ARCHITECTURES, PERMUTED, write_gguf

LOCAL, FULL = "sliding_attention", "full_attention"

# What llama.cpp has built in, for models that differ: patterns, scales of scores, no windows.
BUILT_IN = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "sliding_window_pattern": 6,
        "layer_types": [LOCAL] * 5 + [FULL, LOCAL],
    },
    "mistral": {"sliding_window": None},
    "qwen2_window": {
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": [FULL] * 4,
    },
    "smollm3": {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1]},
}


def tiny_settings(name):
    return json.loads((TINY / name / "config.json").read_text()) | BUILT_IN.get(name, {})


def write_folder(folder, settings, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_both(tmp_path, settings, tensors, **options):
    """The Hugging Face folder and the GGUF file, opened."""
    folder = write_folder(tmp_path / "hf", settings, tensors)
    path = write_gguf(tmp_path / "model.gguf", settings, tensors, **options)
    return open_checkpoint(folder), open_checkpoint(path)


def assert_same_config(gguf, hf):
    """Except what GGUF says otherwise: Mistral's is a Llama; formulas of ropes are worked out."""
    rope = hf.rope
    if rope.kind == "llama3":
        rope = gguf.rope
        assert rope.kind == "longrope" and rope.attention_factor == 1
    elif rope.kind == "longrope":
        factor = gguf.rope.attention_factor
        formula = (1 + np.log(rope.factor) / np.log(rope.original_max_position)) ** 0.5
        assert factor == pytest.approx(formula, rel=1e-7)
        rope = dataclasses.replace(rope, attention_factor=factor)
    family = "llama" if hf.family == "mistral" else hf.family
    assert gguf == dataclasses.replace(hf, family=family, rope=rope)


def params_of(checkpoint):
    return load_params(checkpoint, dtype="float32")


def assert_same_params(actual, expected, atol):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=0), actual, expected)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_logits_equal_those_of_the_folder(name, tmp_path):
    """Of 40 tokens, beyond the windows and the context that LongRoPE was first made for."""
    tensors = load_file(TINY / name / "model.safetensors")
    hf, gguf = write_both(tmp_path, tiny_settings(name), tensors)
    assert_same_config(gguf.config, hf.config)
    ids = np.random.default_rng(0).integers(0, 256, 40)
    expected, actual = (
        logits_in_chunks(Decoder(checkpoint.config), params_of(checkpoint), ids, 40)
        for checkpoint in (hf, gguf)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5, rtol=0)
    assert np.ptp(expected) > 0.5


@pytest.mark.parametrize("name", TINY_NAMES)
def test_what_was_read_can_be_saved_as_a_folder(name, tmp_path):
    tensors = load_file(TINY / name / "model.safetensors")
    gguf = open_checkpoint(write_gguf(tmp_path / "x.gguf", tiny_settings(name), tensors))
    params = params_of(gguf)
    save_huggingface(tmp_path / "saved", gguf.config, params)
    saved = open_checkpoint(tmp_path / "saved")
    assert saved.config == gguf.config
    assert_same_params(params_of(saved), params, atol=0)


def test_each_family_is_there():
    read = {name for family in FAMILIES for name in family.gguf_architectures}
    assert len(read) == len(FAMILIES) - 1  # Mistral's files are those of a Llama
    names = {json.loads((TINY / n / "config.json").read_text())["model_type"] for n in TINY_NAMES}
    assert names == set(ARCHITECTURES)


@pytest.mark.parametrize("name", ["phi3_longrope", *ARCHITECTURES])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 8), (2, 16), (3, 8), (4, 16)])
def test_any_heads(name, kv_heads, head_dim, tmp_path):
    """Rows of each head and norms are where they are for another number and size of heads."""
    settings = tiny_settings({"gemma3_text": "gemma3"}.get(name, name))
    heads = kv_heads if name == "gpt_neox" else 2 * kv_heads
    settings |= {
        "vocab_size": 24,
        "hidden_size": heads * head_dim,
        "intermediate_size": 20,
        "num_attention_heads": heads,
    }
    if "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = kv_heads
    if "head_dim" in settings:
        settings |= {"head_dim": head_dim, "hidden_size": 40}
    if "query_pre_attn_scalar" in settings:
        settings["query_pre_attn_scalar"] = head_dim
    rope = settings["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        count = int(0.75 * head_dim) // 2
        settings["rope_parameters"] = rope | {
            "long_factor": rope["long_factor"][:count],
            "short_factor": rope["short_factor"][:count],
        }
    family = family_of_hf(settings)
    rng = np.random.default_rng(head_dim)
    tensors = {
        part.name: rng.standard_normal(part.shape, np.float32)
        for leaf in family.weights(family.config_from_hf(settings))
        for part in leaf.parts
    }
    hf, gguf = write_both(tmp_path, settings, tensors)
    assert_same_config(gguf.config, hf.config)
    assert_same_params(params_of(gguf), params_of(hf), atol=3e-7 if "gemma" in name else 0)


@pytest.mark.parametrize("name", TINY_NAMES)
def test_quantised_is_near(name, tmp_path):
    """Within half a step of each block, whose scale is rounded too; fused rows are whole blocks."""
    tensors = load_file(TINY / name / "model.safetensors")
    hf, gguf = write_both(tmp_path, tiny_settings(name), tensors, quantise=Kind.Q8_0)
    stored = {entry.dtype for entry in gguf.reader.tensors.values()}
    assert stored == {"Q8_0", "F32"}
    expected, actual = params_of(hf), params_of(gguf)
    largest = jax.tree.map(lambda x: abs(x).max(), expected)
    errors = jax.tree.map(lambda a, b, c: abs(a - b).max() / c, actual, expected, largest)
    assert max(jax.tree.leaves(errors)) < 0.6 / 127
    assert errors["embed"]["weight"] > 0


@pytest.mark.parametrize("name", ["llama", "granite", "smollm3", "qwen2", "qwen3", "olmo2"])
def test_rows_that_rotate_are_permuted_in_some_families(name, tmp_path):
    """The files differ as they are said to: the equalities above are not those of plain copies."""
    tensors = load_file(TINY / name / "model.safetensors")
    reader = GGUFReader(write_gguf(tmp_path / "x.gguf", tiny_settings(name), tensors))
    for module in "qkv":
        stored = reader.read(f"blk.1.attn_{module}.weight")
        original = tensors[f"model.layers.1.self_attn.{module}_proj.weight"]
        differs = name in PERMUTED and module != "v"
        assert np.array_equal(stored, original) != differs
        np.testing.assert_array_equal(np.sort(stored, axis=0), np.sort(original, axis=0))


def test_fused_rows_of_other_orders(tmp_path):
    """Phi-3 has gate rows above those of up; GPT-NeoX all queries above the keys."""
    tensors = load_file(TINY / "gpt_neox" / "model.safetensors")
    path = write_gguf(tmp_path / "neox.gguf", tiny_settings("gpt_neox"), tensors)
    rows = tensors["gpt_neox.layers.1.attention.query_key_value.bias"].reshape(4, 3, 16)
    stored = GGUFReader(path).read("blk.1.attn_qkv.bias").reshape(3, 4, 16)
    np.testing.assert_array_equal(stored[1, 2], rows[2, 1])
    qkv = params_of(open_checkpoint(path))["layers"][1]["attention"]["qkv"]["bias"]
    np.testing.assert_array_equal(qkv, rows)

    tensors = load_file(TINY / "phi3" / "model.safetensors")
    path = write_gguf(tmp_path / "phi3.gguf", tiny_settings("phi3"), tensors)
    stored = GGUFReader(path).read("blk.1.ffn_up.weight")
    mlp = params_of(open_checkpoint(path))["layers"][1]["mlp"]
    np.testing.assert_array_equal(mlp["gate_up"]["weight"], stored.reshape(2, 96, 64))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_norms_hold_one_more(name, tmp_path):
    tensors = load_file(TINY / name / "model.safetensors")
    path = write_gguf(tmp_path / "x.gguf", tiny_settings(name), tensors)
    layer = params_of(open_checkpoint(path))["layers"][1]
    for ours, module in (
        ("attention_norm", "input_layernorm"),
        ("attention_post_norm", "post_attention_layernorm"),
        ("mlp_norm", "pre_feedforward_layernorm"),
        ("mlp_post_norm", "post_feedforward_layernorm"),
    ):
        original = tensors[f"model.layers.1.{module}.weight"]
        np.testing.assert_allclose(layer[ours]["weight"], original, atol=1e-7, rtol=0)
    stored = GGUFReader(path).read("output_norm.weight")
    np.testing.assert_array_equal(stored, tensors["model.norm.weight"] + 1)


@pytest.mark.parametrize(
    ("name", "lost", "tensor"),
    [
        ("gemma3", "model.layers.3.self_attn.k_norm.weight", "blk.3.attn_k_norm.weight"),
        ("gemma2", "model.layers.3.pre_feedforward_layernorm.weight", "blk.3.ffn_norm.weight"),
        ("qwen2", "model.layers.1.self_attn.v_proj.bias", "blk.1.attn_v.bias"),
        ("phi3", "model.layers.0.self_attn.qkv_proj.weight", "blk.0.attn_qkv.weight"),
        ("gpt_neox", "gpt_neox.layers.1.mlp.dense_h_to_4h.bias", "blk.1.ffn_up.bias"),
        ("stablelm", "model.layers.1.post_attention_layernorm.bias", "blk.1.ffn_norm.bias"),
    ],
)
def test_missing_and_extra_tensors_are_refused_by_name(name, lost, tensor, tmp_path):
    tensors = load_file(TINY / name / "model.safetensors")
    del tensors[lost]
    extra = [("blk.0.attn_sinks.weight", np.ones(4, np.float32))]
    path = write_gguf(tmp_path / "x.gguf", tiny_settings(name), tensors, extra=extra)
    with pytest.raises(ValueError) as error:
        open_checkpoint(path)
    assert f"missing {tensor}; unexpected blk.0.attn_sinks.weight. Fetch" in str(error.value)


def test_norms_of_stablelm_that_are_no_weights_of_ours(tmp_path):
    """Those of each head, which its 12B model has."""
    tensors = load_file(TINY / "stablelm_parallel" / "model.safetensors")
    extra = [("blk.0.attn_q_norm.weight", np.ones((4, 16), np.float32))]
    path = write_gguf(tmp_path / "x.gguf", tiny_settings("stablelm_parallel"), tensors, extra=extra)
    with pytest.raises(ValueError, match=r"unexpected blk\.0\.attn_q_norm\.weight"):
        open_checkpoint(path)


def test_metadata_is_refused_by_name_and_unknown_architectures_list_the_known(tmp_path):
    settings = tiny_settings("qwen3")
    tensors = load_file(TINY / "qwen3" / "model.safetensors")
    changes = {"attention.sliding_window": 16}
    path = write_gguf(tmp_path / "x.gguf", settings, tensors, changes=changes)
    with pytest.raises(ValueError, match=r"'qwen3' sets .* ignore: attention.sliding_window=16"):
        open_checkpoint(path)
    path = write_gguf(tmp_path / "y.gguf", settings, tensors)
    path.write_bytes(path.read_bytes().replace(b"qwen3", b"qwen9"))
    known = "gemma2, gemma3, gptneox, granite, llama, olmo2, phi3, qwen2, qwen3, smollm3, stablelm"
    with pytest.raises(ValueError, match=rf"'qwen9' is not supported. Known: {known}\."):
        open_checkpoint(path)
