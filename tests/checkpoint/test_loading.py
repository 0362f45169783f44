"""Loading: all is checked first, each leaf filled once, in the asked dtype, in little memory."""

import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.config import RopeConfig
from jaxinfer.models import num_parameters


def load(path, dtype="float32", **options):
    return load_params(open_checkpoint(path), dtype=dtype, **options)


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_tiny_params_stand_where_the_tree_says(tiny, tiny_tensors):
    checkpoint = open_checkpoint(tiny)
    config = checkpoint.config
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope == RopeConfig(
        kind="llama3",
        theta=10000.0,
        dim=16,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=64,
    )
    params = load_params(checkpoint, dtype="float32")
    t = tiny_tensors
    np.testing.assert_array_equal(params["embed"]["weight"], t["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["weight"], t["lm_head.weight"])
    np.testing.assert_array_equal(params["norm"]["weight"], t["model.norm.weight"])
    assert isinstance(params["layers"], tuple) and len(params["layers"]) == 2
    for i, layer in enumerate(params["layers"]):
        prefix = f"model.layers.{i}."
        qkv = layer["attention"]["qkv"]["weight"]
        assert qkv.shape == (2, 4, 16, 64)
        for n in range(4):
            q = t[f"{prefix}self_attn.q_proj.weight"][16 * n : 16 * n + 16]
            np.testing.assert_array_equal(qkv[n // 2, n % 2], q)
        for row, name in ((2, "k"), (3, "v")):
            heads = t[f"{prefix}self_attn.{name}_proj.weight"].reshape(2, 16, 64)
            np.testing.assert_array_equal(qkv[:, row], heads)
        out = t[f"{prefix}self_attn.o_proj.weight"]
        np.testing.assert_array_equal(layer["attention"]["out"]["weight"], out)
        gate_up = layer["mlp"]["gate_up"]["weight"]
        np.testing.assert_array_equal(gate_up[0], t[f"{prefix}mlp.gate_proj.weight"])
        np.testing.assert_array_equal(gate_up[1], t[f"{prefix}mlp.up_proj.weight"])
        np.testing.assert_array_equal(
            layer["mlp"]["down"]["weight"], t[f"{prefix}mlp.down_proj.weight"]
        )
        for ours, theirs in (
            ("attention_norm", "input_layernorm"),
            ("mlp_norm", "post_attention_layernorm"),
        ):
            np.testing.assert_array_equal(layer[ours]["weight"], t[f"{prefix}{theirs}.weight"])


def test_biases_are_filled(make_model):
    folder, _, tensors = make_model(8, qkv_bias=True, out_bias=True, mlp_bias=True)
    attention = load(folder)["layers"][1]["attention"]
    prefix = "model.layers.1.self_attn."
    bias = attention["qkv"]["bias"]
    np.testing.assert_array_equal(bias[:, :2], tensors[f"{prefix}q_proj.bias"].reshape(2, 2, 8))
    np.testing.assert_array_equal(bias[:, 2], tensors[f"{prefix}k_proj.bias"].reshape(2, 8))
    np.testing.assert_array_equal(bias[:, 3], tensors[f"{prefix}v_proj.bias"].reshape(2, 8))
    np.testing.assert_array_equal(attention["out"]["bias"], tensors[f"{prefix}o_proj.bias"])


@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_every_leaf_has_the_asked_dtype(tiny, dtype, itemsize):
    checkpoint = open_checkpoint(tiny)
    leaves = jax.tree.leaves(load_params(checkpoint, dtype=dtype))
    assert {str(leaf.dtype) for leaf in leaves} == {dtype}
    assert sum(leaf.nbytes for leaf in leaves) == num_parameters(checkpoint.config) * itemsize


def test_bfloat16_rounds_to_nearest_even(tiny, tiny_tensors):
    wanted = tiny_tensors["lm_head.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(load(tiny, "bfloat16")["head"]["weight"], wanted)


def test_unknown_dtype_is_refused(tiny):
    with pytest.raises(ValueError, match="dtype='int8' is not supported"):
        load(tiny, "int8")


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_float16_overflow_is_refused_by_name(tiny, tiny_tensors, stored):
    tiny_tensors["model.norm.weight"][3] = 1e5
    tensors = {name: array.astype(stored) for name, array in tiny_tensors.items()}
    save_file(tensors, tiny / "model.safetensors")
    assert float(load(tiny, "bfloat16")["norm"]["weight"][3]) == pytest.approx(1e5, rel=1e-2)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*float16"):
        load(tiny, "float16")


def test_all_faults_are_named_before_anything_is_read(tiny, tiny_tensors):
    del tiny_tensors["model.norm.weight"]
    tiny_tensors["lm_head.weight"] = tiny_tensors["lm_head.weight"][:-1].copy()
    tiny_tensors["model.layers.0.extra.weight"] = np.zeros(3, np.float32)
    tiny_tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((128, 64), np.int8)
    save_file(tiny_tensors, tiny / "model.safetensors")
    with pytest.raises(ValueError) as error:
        open_checkpoint(tiny)
    message = str(error.value)
    assert "missing model.norm.weight" in message
    assert "lm_head.weight has shape [255, 64] and needs [256, 64]" in message
    assert "unexpected model.layers.0.extra.weight" in message
    assert "model.layers.1.mlp.up_proj.weight is stored as I8" in message
    assert "more" not in message


def test_long_lists_of_faults_are_cut(tiny, tiny_tensors):
    kept = {name: array for name, array in tiny_tensors.items() if ".layers." not in name}
    save_file(kept, tiny / "model.safetensors")
    with pytest.raises(ValueError, match="; and 8 more") as error:
        open_checkpoint(tiny)
    assert str(error.value).count("missing") == 10


def test_buffers_of_old_files_are_ignored(tiny, tiny_tensors):
    expected = load(tiny)
    tiny_tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    save_file(tiny_tensors, tiny / "model.safetensors")
    assert_trees_equal(load(tiny), expected)


def test_untied_model_needs_its_head(tiny, tiny_tensors):
    del tiny_tensors["lm_head.weight"]
    save_file(tiny_tensors, tiny / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing lm_head\.weight"):
        open_checkpoint(tiny)


def test_tied_model_has_no_head_and_accepts_only_an_equal_one(tiny, tiny_tensors, edit_settings):
    edit_settings(tiny, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"tie lm_head\.weight to model\.embed_tokens\.weight"):
        load(tiny)
    tiny_tensors["lm_head.weight"] = tiny_tensors["model.embed_tokens.weight"]
    save_file(tiny_tensors, tiny / "model.safetensors")
    with_copy = load(tiny)
    assert "head" not in with_copy
    del tiny_tensors["lm_head.weight"]
    save_file(tiny_tensors, tiny / "model.safetensors")
    assert_trees_equal(load(tiny), with_copy)


def test_place_and_progress_see_every_leaf_once(tiny):
    checkpoint = open_checkpoint(tiny)
    paths, progress = [], []

    def place(path, array):
        paths.append(path)
        return jax.device_put(array)

    load_params(
        checkpoint, place=place, progress=lambda done, total: progress.append((done, total))
    )
    assert paths == [leaf.path for leaf in checkpoint.leaves]
    total = num_parameters(checkpoint.config)
    assert progress[0] == (256 * 64, total) and progress[-1] == (total, total)
    assert len(progress) == len(paths)


def test_params_do_not_change_when_the_file_does(tiny, tiny_tensors):
    params = load(tiny)
    size = (tiny / "model.safetensors").stat().st_size
    (tiny / "model.safetensors").write_bytes(bytes(size))
    np.testing.assert_array_equal(params["head"]["weight"], tiny_tensors["lm_head.weight"])


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_host_memory_stays_at_weights_plus_largest_tensor(
    tiny, tiny_tensors, edit_settings, stored
):
    """Traced numpy memory; the slack is one chunk of rows as read and one as converted."""
    vocab = 1 << 17
    edit_settings(tiny, vocab_size=vocab)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tiny_tensors[name] = np.ones((vocab, 64), np.float32)
    tensors = {name: array.astype(stored) for name, array in tiny_tensors.items()}
    save_file(tensors, tiny / "model.safetensors")
    del tensors
    tiny_tensors.clear()
    checkpoint = open_checkpoint(tiny)
    weights = 2 * num_parameters(checkpoint.config)
    largest = 2 * vocab * 64

    def peak(**options):
        tracemalloc.start()
        params = load_params(checkpoint, dtype="bfloat16", **options)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        del params
        return most

    assert peak() < weights + largest
    # An accelerator takes the leaves away: then only one of them is ever on the host.
    elsewhere = jax.numpy.zeros(())
    assert peak(place=lambda path, array: elsewhere) < largest + 7_000_000


@pytest.mark.parametrize("name", ["missing", "empty", "notes.txt"])
def test_paths_that_hold_no_checkpoint(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text(json.dumps({}))
    with pytest.raises((ValueError, FileNotFoundError), match=name):
        open_checkpoint(tmp_path / name)
