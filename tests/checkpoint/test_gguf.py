"""GGUF: the same params as the Hugging Face form, every quantised type, damaged files."""

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.gguf import GGUFReader, read_header

# Types of intermediate results and of counters, which no file holds as weights.
UNREAD = ("Q8_1", "Q8_K", "Q1_0", "F64", "I8", "I16", "I32", "I64")
READ = [kind for kind in Kind if kind.name not in UNREAD]


def load(path):
    return load_params(open_checkpoint(path), dtype="float32")


@pytest.mark.parametrize("head_dim", [8, 16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_params_equal_those_of_safetensors(make_model, write_gguf, head_dim, biased, tied):
    folder, config, tensors = make_model(
        head_dim, qkv_bias=biased, out_bias=biased, mlp_bias=biased, tie_embeddings=tied
    )
    path = write_gguf(config, tensors)
    assert open_checkpoint(path).config == open_checkpoint(folder).config == config
    jax.tree.map(np.testing.assert_array_equal, load(path), load(folder))


def test_permutation_matters(make_model, write_gguf):
    """The file really holds other rows, so the equality above is not that of two plain copies."""
    _, config, tensors = make_model(8)
    reader = GGUFReader(write_gguf(config, tensors))
    for module, differs in (("q", True), ("k", True), ("v", False)):
        stored = reader.read(f"blk.0.attn_{module}.weight")
        original = tensors[f"model.layers.0.self_attn.{module}_proj.weight"]
        assert (not np.array_equal(stored, original)) == differs


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        (Kind.Q8_0, 1 / 127),
        (Kind.Q4_0, 1 / 7),
        (Kind.Q4_1, 1 / 7),
        (Kind.Q5_0, 1 / 15),
        (Kind.Q5_1, 1 / 15),
    ],
)
def test_quantised_model_is_near_the_original(make_model, write_gguf, kind, step):
    """Each value is within one step of its block, whose largest magnitude is below 5."""
    folder, config, tensors = make_model(16)
    original, quantised = load(folder), load(write_gguf(config, tensors, quantise=kind))
    errors = jax.tree.map(lambda a, b: float(abs(a - b).max()), original, quantised)
    worst = max(jax.tree.leaves(errors))
    assert 0 < worst < 5 * step
    assert errors["norm"]["weight"] == 0  # norms are not quantised


@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.name)
def test_every_type_is_read_like_the_package_reads_it(tmp_path, kind):
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = max(per_block, 32) * 2
    rng = np.random.default_rng(kind.value)
    # High bytes below 0x3c keep every float16 scale finite and below one.
    shape = (6, 40, columns // per_block * block_bytes)
    stored = rng.integers(0, 0x3C, shape, np.uint8)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("experts", stored, raw_dtype=kind)
    writer.add_tensor("vector", stored[0, 0], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = GGUFReader(path)
    expected = gguf.dequantize(stored, kind).reshape(6, 40, columns)
    assert reader.is_readable(kind.name)
    assert reader.tensors["experts"].shape == (6, 40, columns)
    np.testing.assert_array_equal(reader.read("experts"), expected)
    np.testing.assert_array_equal(reader.read("experts", 2, 5), expected[2:5])
    np.testing.assert_array_equal(reader.read("vector"), expected[0, 0])
    assert np.isfinite(expected).all() and np.ptp(expected) > 0


def test_integers_are_no_weights(make_model, write_gguf):
    _, config, tensors = make_model(8)
    tensors["model.norm.weight"] = np.ones(32, np.int32)
    with pytest.raises(ValueError, match=r"output_norm\.weight is stored as I32, which is not"):
        open_checkpoint(write_gguf(config, tensors))


def test_metadata_of_every_type(tmp_path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "u8": 200, "i8": -5, "u16": 60000, "i16": -300, "u32": 4_000_000_000, "i32": -70000,
        "u64": 1 << 40, "i64": -(1 << 40), "f32": 0.5, "f64": 0.1, "flag": True, "text": "é🔥",
        "ints": [1, 2, 3], "texts": ["a", "", "ü"], "flags": [True, False],
    }  # fmt: skip
    adders = {
        "u8": writer.add_uint8, "i8": writer.add_int8, "u16": writer.add_uint16,
        "i16": writer.add_int16, "u32": writer.add_uint32, "i32": writer.add_int32,
        "u64": writer.add_uint64, "i64": writer.add_int64, "f32": writer.add_float32,
        "f64": writer.add_float64, "flag": writer.add_bool, "text": writer.add_string,
    }  # fmt: skip
    for name, value in values.items():
        adders.get(name, writer.add_array)(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata, tensors = read_header(path)
    assert {name: metadata[name] for name in values} == values
    assert metadata["general.architecture"] == "llama"
    assert tensors == {}


def test_header_agrees_with_the_package(make_model, write_gguf):
    _, config, tensors = make_model(8)
    path = write_gguf(config, tensors, quantise=Kind.Q4_0)
    theirs = gguf.GGUFReader(path)
    metadata, entries = read_header(path)
    assert list(entries) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = entries[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.dtype, entry.offset) == (tensor.tensor_type.name, tensor.data_offset)
        assert entry.num_bytes == tensor.n_bytes
    for name, value in metadata.items():
        assert theirs.fields[name].contents() == value


def test_truncated_file(make_model, write_gguf):
    _, config, tensors = make_model(8)
    path = write_gguf(config, tensors)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.gguf is cut short.*ends at byte"):
        open_checkpoint(path)
    for size in (30, 100, 1000):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="its header goes on past"):
            open_checkpoint(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGUF", "too short"),
        (b"GGML" + bytes(40), "starts with b'GGML'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1;"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "version 50331648;"),
    ],
)
def test_other_files_are_refused(tmp_path, data, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        open_checkpoint(path)


def test_missing_extra_and_misshapen_tensors(make_model, write_gguf):
    _, config, tensors = make_model(8)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.ones(33, np.float32)
    path = write_gguf(config, tensors, extra=[("blk.0.attn_q_norm.weight", np.ones(8, np.float32))])
    with pytest.raises(ValueError) as error:
        open_checkpoint(path)
    assert "missing blk.1.ffn_up.weight" in str(error.value)
    assert "output_norm.weight has shape [33] and needs [32]" in str(error.value)
    assert "unexpected blk.0.attn_q_norm.weight" in str(error.value)


def test_rotary_divisors_become_part_of_the_config(make_model, write_gguf):
    """Llama 3.1 in GGUF carries its rope as divisors, computed by the converter."""
    _, config, tensors = make_model(8)
    divisors = np.array([1.0, 1.5, 4.0, 8.0], np.float32)
    path = write_gguf(config, tensors, extra=[("rope_freqs.weight", divisors)])
    rope = open_checkpoint(path).config.rope
    assert rope.kind == "longrope"
    assert rope.short_factor == rope.long_factor == (1.0, 1.5, 4.0, 8.0)
    assert rope.attention_factor == 1.0
