"""Hugging Face folders: whole or sharded, stray files, missing and damaged ones."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.safetensors import SafetensorsReader, read_header, write_file

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tiny, tiny_tensors):
    """The tiny checkpoint in two shards."""
    (tiny / "model.safetensors").unlink()
    names = sorted(tiny_tensors)
    shard_of = {name: SHARDS[i % 2] for i, name in enumerate(names)}
    for shard in SHARDS:
        save_file(
            {name: tiny_tensors[name] for name in names if shard_of[name] == shard}, tiny / shard
        )
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return tiny


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_reads_what_the_library_wrote(tiny, tiny_tensors, dtype):
    tensors = {name: array.astype(dtype) for name, array in tiny_tensors.items()}
    save_file(tensors, tiny / "model.safetensors")
    reader = SafetensorsReader(tiny)
    assert set(reader.tensors) == set(tensors)
    for name, array in tensors.items():
        read = reader.read(name)
        assert read.dtype == dtype
        np.testing.assert_array_equal(read, array)
        np.testing.assert_array_equal(reader.read(name, 3, 8), array[3:8])
        np.testing.assert_array_equal(reader.read(name, len(array) - 2), array[-2:])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_library_reads_what_we_wrote(tmp_path, dtype):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3).astype(dtype),
        "a": np.arange(5, dtype=np.float32).astype(dtype),
    }
    path = tmp_path / "x.safetensors"
    write_file(path, [(name, a.shape, lambda a=a: a) for name, a in arrays.items()], dtype)
    loaded = load_file(path)
    assert set(loaded) == set(arrays)
    for name, array in arrays.items():
        assert loaded[name].dtype == array.dtype
        np.testing.assert_array_equal(loaded[name], array)
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(tmp_path.iterdir()) == [path]


def test_shards_are_one_checkpoint_and_stray_files_none_of_it(sharded, tiny_tensors):
    save_file({"stray": np.zeros(3, np.float32)}, sharded / "consolidated.safetensors")
    (sharded / "optimizer.safetensors").write_bytes(b"not even a header")
    reader = open_checkpoint(sharded).reader
    assert set(reader.tensors) == set(tiny_tensors)
    for name, array in tiny_tensors.items():
        np.testing.assert_array_equal(reader.read(name), array)


@pytest.mark.parametrize("shard", SHARDS)
def test_missing_shard_is_named(sharded, shard):
    (sharded / shard).unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shard} of the 2 shards"):
        open_checkpoint(sharded)


def test_tensor_that_its_shard_lacks_is_named(sharded, tiny_tensors):
    shard = load_file(sharded / SHARDS[0])
    del shard["lm_head.weight"]
    save_file(shard, sharded / SHARDS[0])
    with pytest.raises(ValueError, match=rf"lm_head\.weight \({SHARDS[0]}\)"):
        open_checkpoint(sharded)


def test_tensor_in_a_shard_but_not_in_the_index_is_unexpected(sharded):
    shard = load_file(sharded / SHARDS[0])
    save_file(shard | {"new": np.zeros(3, np.float32)}, sharded / SHARDS[0])
    with pytest.raises(ValueError, match="unexpected new"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", SHARDS)
@pytest.mark.parametrize("cut", [1, 100])
def test_truncated_shard_is_named(sharded, shard, cut):
    path = sharded / shard
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=f"{shard} is cut short"):
        open_checkpoint(sharded)


def test_file_cut_while_it_is_read(tiny):
    reader = open_checkpoint(tiny).reader
    path = tiny / "model.safetensors"
    last = max(reader.tensors, key=lambda name: reader.tensors[name].offset)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors ended 100 bytes early"):
        reader.read(last)


def header(content):
    text = json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a whole safetensors file"),
        (b"\x05\0\0", "not a whole safetensors file"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "not a whole safetensors file"),
        ((4).to_bytes(8, "little") + b"oops", "damaged header"),
        (header({"a": {"dtype": "F32"}}), "damaged header"),
        (header({"a": F32 | {"shape": [3]}}) + bytes(8), "damaged header .8 bytes for F32"),
        (header({"a": F32}) + bytes(9), "its header accounts for"),
        (header({"a": F32}) + bytes(4), "cut short"),
    ],
)
def test_damaged_headers(tmp_path, data, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        read_header(path)


def test_missing_and_damaged_settings(tiny):
    (tiny / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        open_checkpoint(tiny)
    (tiny / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object"):
        open_checkpoint(tiny)
    (tiny / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        open_checkpoint(tiny)


def test_missing_weights(tiny):
    (tiny / "model.safetensors").rename(tiny / "model-00001-of-00002.safetensors")
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tiny)
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(FileNotFoundError, match="lacks any shard"):
        open_checkpoint(tiny)


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [(2, [2, 7], (2, 7)), ([2, 7], None, (2, 7)), (None, 5, (5,)), (2, 7, (2, 7))],
)
def test_eos_ids_of_both_settings_files_are_joined(tiny, edit_settings, own, generation, ids):
    edit_settings(tiny, eos_token_id=own)
    content = {"temperature": 0.7} | ({"eos_token_id": generation} if generation else {})
    (tiny / "generation_config.json").write_text(json.dumps(content))
    assert open_checkpoint(tiny).config.eos_ids == ids
