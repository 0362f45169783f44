"""Saving is the exact inverse of loading."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.checkpoint import load_params, open_checkpoint, save_huggingface


def assert_bits_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tiny_model_round_trip(tiny, tiny_tensors, tmp_path, dtype):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint, dtype=dtype)
    save_huggingface(tmp_path / "saved", checkpoint.config, params)
    again = open_checkpoint(tmp_path / "saved")
    assert again.config == checkpoint.config
    assert_bits_equal(load_params(again, dtype=dtype), params)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(tiny_tensors)
    for name, array in tiny_tensors.items():
        np.testing.assert_array_equal(saved[name], array.astype(saved[name].dtype))
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    "flags", [{"qkv_bias": True, "out_bias": True, "mlp_bias": True}, {"tie_embeddings": True}]
)
def test_variants_round_trip(make_model, tmp_path, flags):
    folder, config, tensors = make_model(8, **flags)
    params = load_params(open_checkpoint(folder), dtype="float32")
    save_huggingface(tmp_path / "saved", config, params)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert set(saved) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(saved[name], array)


def test_gguf_becomes_huggingface(make_model, write_gguf, tmp_path):
    _, config, tensors = make_model(16)
    checkpoint = open_checkpoint(write_gguf(config, tensors))
    params = load_params(checkpoint, dtype="float32")
    save_huggingface(tmp_path / "saved", checkpoint.config, params)
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, array in tensors.items():
        np.testing.assert_array_equal(saved[name], array)


def test_shards_are_cut_by_size(tiny, tmp_path):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint, dtype="float32")
    folder = tmp_path / "saved"
    save_huggingface(folder, checkpoint.config, params, max_shard_bytes=100_000)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 5
    assert [shard.name for shard in shards] == [
        f"model-{i:05}-of-00005.safetensors" for i in range(1, 6)
    ]
    assert all(shard.stat().st_size < 100_000 + 3_000 for shard in shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params))
    assert_bits_equal(load_params(open_checkpoint(folder), dtype="float32"), params)


def test_nothing_is_overwritten(tiny):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint, dtype="float32")
    before = (tiny / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="already holds weights"):
        save_huggingface(tiny, checkpoint.config, params)
    assert (tiny / "model.safetensors").read_bytes() == before


def test_wrong_params_are_refused_before_anything_is_written(tiny, tmp_path):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint, dtype="float32")
    mixed = params | {"norm": {"weight": params["norm"]["weight"].astype(jnp.bfloat16)}}
    with pytest.raises(ValueError, match="dtype bfloat16, float32"):
        save_huggingface(tmp_path / "saved", checkpoint.config, mixed)
    short = params | {"norm": {"weight": params["norm"]["weight"][1:]}}
    with pytest.raises(ValueError, match=r"norm\.weight has shape \[63\]"):
        save_huggingface(tmp_path / "saved", checkpoint.config, short)
    assert not (tmp_path / "saved").exists()
