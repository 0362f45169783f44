"""The native form: what was saved comes back, on any number of devices, or is refused by name."""

import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxinfer.checkpoint import load_params, open_checkpoint, save_orbax
from jaxinfer.checkpoint.config_json import config_from_json, config_to_json
from jaxinfer.checkpoint.gguf import read_header
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.text import load_tokenizer, tokenizer_from_gguf

REPOSITORY = Path(__file__).parents[2]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXT = "größe, hello 日本"


def assert_bits_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tiny, tmp_path):
    """The tiny model in float32, in the native form."""
    checkpoint = open_checkpoint(tiny)
    folder = tmp_path / "saved"
    save_orbax(folder, checkpoint.config, load_params(checkpoint, dtype="float32"))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bits_and_config_come_back(tiny, tmp_path, dtype):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint, dtype=dtype)
    save_orbax(tmp_path / "deep" / "saved", checkpoint.config, params)
    again = open_checkpoint(tmp_path / "deep" / "saved")
    assert again.config == checkpoint.config
    assert_bits_equal(load_params(again, dtype=dtype), params)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["saved"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conversion_rounds_as_it_does_from_the_source(tiny, saved, dtype):
    expected = load_params(open_checkpoint(tiny), dtype=dtype)
    checkpoint = open_checkpoint(saved)
    assert_bits_equal(load_params(checkpoint, dtype=dtype), expected)
    shardings = jax.tree.map(lambda x: x.sharding, expected)
    assert_bits_equal(load_params(checkpoint, dtype=dtype, shardings=shardings), expected)


def test_float16_overflow_is_refused_by_name(make_model, tmp_path):
    folder, config, tensors = make_model(8)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = 1e6
    save_file(tensors, folder / "model.safetensors")
    save_orbax(tmp_path / "saved", config, load_params(open_checkpoint(folder), dtype="float32"))
    checkpoint = open_checkpoint(tmp_path / "saved")
    params = load_params(checkpoint, dtype="bfloat16")
    for shardings in (None, jax.tree.map(lambda x: x.sharding, params)):
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down\.weight has values that float"):
            load_params(checkpoint, dtype="float16", shardings=shardings)


@pytest.mark.parametrize("batch_bytes", [1, 40_000, 1 << 28])
def test_leaves_are_placed_in_order_whatever_is_read_together(saved, monkeypatch, batch_bytes):
    monkeypatch.setattr("jaxinfer.checkpoint.orbax._BATCH_BYTES", batch_bytes)
    paths, progress = [], []

    def place(path, array):
        assert isinstance(array, np.ndarray) and array.dtype == "float32"
        paths.append(path)
        return jax.device_put(array)

    checkpoint = open_checkpoint(saved)
    params = load_params(
        checkpoint,
        dtype="float32",
        place=place,
        progress=lambda done, total: progress.append((done, total)),
    )
    assert paths == [leaf.path for leaf in checkpoint.leaves]
    total = sum(x.size for x in jax.tree.leaves(params))
    assert len(progress) == len(paths) and progress[-1] == (total, total)


DEVICES_PROGRAM = """
import hashlib, json, sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxinfer.checkpoint import load_params, open_checkpoint, save_orbax

source, target, axis = sys.argv[1], sys.argv[2], int(sys.argv[3])
mesh = Mesh(np.array(jax.devices()), ("model",))

def sharding(array):
    spec = [None] * array.ndim
    if array.shape[axis] % mesh.size == 0:
        spec[axis] = "model"
    return NamedSharding(mesh, PartitionSpec(*spec))

checkpoint = open_checkpoint(source)
plain = load_params(checkpoint, dtype="float32")
shardings = jax.tree.map(sharding, plain)
params = load_params(checkpoint, dtype="float32", shardings=shardings)
digest = hashlib.sha256()
parts = 0
for array, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(shardings)):
    assert array.sharding == wanted
    parts += array.addressable_shards[0].data.size
    digest.update(np.asarray(array).tobytes())
if target:
    save_orbax(target, checkpoint.config, params)
print(json.dumps([jax.device_count(), parts, digest.hexdigest()]))
"""


def on_devices(count, source, target="", axis=-1):
    """(devices, weights on the first of them, digest of all) of a process with `count` devices."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-W", "error", "-c", DEVICES_PROGRAM, source, target, str(axis)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_saved_on_4_devices_and_restored_on_1_2_and_8(tiny, tmp_path):
    params = load_params(open_checkpoint(tiny), dtype="float32")
    leaves = jax.tree.leaves(params)
    bits = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in leaves)).hexdigest()
    total = sum(x.size for x in leaves)
    folder = str(tmp_path / "saved")

    def share(count, axis):
        return sum(x.size // (1 if x.shape[axis] % count else count) for x in leaves)

    assert on_devices(4, str(tiny), folder, axis=0) == [4, share(4, 0), bits]
    assert total / 4 < share(4, 0) < total
    assert_bits_equal(load_params(open_checkpoint(folder), dtype="float32"), params)
    one = SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: one, params)
    restored = load_params(open_checkpoint(folder), dtype="float32", shardings=shardings)
    assert_bits_equal(restored, params)
    for count in (2, 8):
        assert share(count, -1) == total // count
        assert on_devices(count, folder) == [count, total // count, bits]


def test_heads_lie_apart_on_disk(saved):
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.metadata(saved / "params").item_metadata.tree
    attention = tree["layers"][1]["attention"]
    assert attention["qkv"]["weight"].storage.chunk_shape == (1, 4, 16, 64)


def test_shardings_serve_every_format_and_must_be_complete(tiny, saved):
    mesh = jax.make_mesh((1,), ("model",))
    for folder in (tiny, saved):
        checkpoint = open_checkpoint(folder)
        params = load_params(checkpoint, dtype="float32")
        shardings = jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), params)
        placed = load_params(checkpoint, dtype="float32", shardings=shardings)
        assert_bits_equal(placed, params)
        assert {x.sharding for x in jax.tree.leaves(placed)} == {
            NamedSharding(mesh, PartitionSpec())
        }
        del shardings["layers"][1]["mlp"]["down"]
        with pytest.raises(ValueError, match=r"nothing for layers\.1\.mlp\.down\.weight"):
            load_params(checkpoint, dtype="float32", shardings=shardings)
        with pytest.raises(ValueError, match="More than one of place, shardings and mesh"):
            load_params(checkpoint, shardings=shardings, place=lambda path, array: array)


def test_every_field_of_a_config_comes_back():
    rope = RopeConfig(
        kind="longrope",
        dim=4,
        theta=1e6 / 3,
        mscale=0.1,
        truncate=False,
        short_factor=(1.0, 1 / 3),
        long_factor=(2.5, 64.0),
    )
    config = ModelConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=7,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        norm_eps=1e-6,
        rope=rope,
        bos_id=0,
        eos_ids=(3, 1),
    )
    again = config_from_json(json.loads(json.dumps(config_to_json(config))))
    assert again == config and hash(again) == hash(config)
    for field in dataclasses.fields(config):
        assert type(getattr(again, field.name)) is type(getattr(config, field.name))


def test_a_huggingface_tokenizer_travels(tiny, tmp_path):
    library = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(ALPHABET)}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    files = {
        "tokenizer.json": library.to_str(),
        "tokenizer_config.json": '{"model_max_length": 99}',
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"eos_token_id": [2, 7]}',
    }
    for name, text in files.items():
        (tiny / name).write_text(text, encoding="utf-8")
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint)
    save_orbax(tmp_path / "one", checkpoint.config, params, tiny)
    save_orbax(tmp_path / "two", checkpoint.config, params, tmp_path / "one")
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert {name: (folder / name).read_text(encoding="utf-8") for name in files} == files
        assert not (folder / "config.json").exists()
        assert load_tokenizer(folder).encode(TEXT) == load_tokenizer(tiny).encode(TEXT)
        assert open_checkpoint(folder).config.eos_ids == (2, 7)


def test_a_gguf_tokenizer_travels(tiny, tmp_path):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*(symbol.encode() for symbol in ALPHABET), b"he", b"<|end|>"])
    writer.add_token_types([1] * 257 + [3])
    writer.add_token_merges(["h e"])
    writer.add_token_scores([float("-inf"), 0.1] + [0.0] * 256)
    # Half a character: a GGUF file may hold what is no text.
    writer.add_array("tokenizer.ggml.odd", [b"\xc3"])
    writer.add_eos_token_id(257)
    writer.add_block_count(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    expected, _ = read_header(path)
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint)
    save_orbax(tmp_path / "one", checkpoint.config, params, path)
    save_orbax(tmp_path / "two", checkpoint.config, params, tmp_path / "one")
    for folder in (tmp_path / "one", tmp_path / "two"):
        metadata = open_checkpoint(folder).reader.metadata
        assert metadata == {k: v for k, v in expected.items() if k != "llama.block_count"}
        tokenizer = tokenizer_from_gguf(metadata)
        assert tokenizer.encode(TEXT) == tokenizer_from_gguf(expected).encode(TEXT)
        assert 256 in tokenizer.encode(TEXT) and set(tokenizer.eos_ids) == {257}


def refuse(folder, error, *words):
    with pytest.raises(error) as caught:
        open_checkpoint(folder)
    for word in (str(folder), *words):
        assert word in str(caught.value)


def test_each_missing_or_cut_file_is_named(saved):
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        file.unlink()
        refuse(saved, FileNotFoundError, f"{file} is missing", "Convert the model again")
        if content:
            file.write_bytes(content[: len(content) // 2])
            refuse(saved, ValueError, str(file), "again")
        file.write_bytes(content)
    open_checkpoint(saved)


def test_a_folder_without_its_last_file_is_a_half_written_one(saved):
    (saved / "jaxinfer.json").unlink()
    refuse(saved, FileNotFoundError, "jaxinfer.json is missing")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda m: m.update(version=1), ["version 1", "reads 2"]),
        (lambda m: m.update(files=None), ["lists no files"]),
        (lambda m: m.update(config=[]), ["ModelConfig is not a JSON object"]),
        (lambda m: m["config"].update(colour=1), ["ModelConfig has no field colour"]),
        (lambda m: m["config"]["rope"].update(kind="x"), ["RopeConfig.kind='x'"]),
        (lambda m: m["config"].pop("num_heads"), ["num_heads"]),
        (lambda m: m["config"].update(num_heads=None), ["jaxinfer.json"]),
        (lambda m: m["config"].update(num_layers=3), ["missing layers.2.attention_norm.weight"]),
        (lambda m: m["config"].update(num_layers=1), ["unexpected layers.1.attention.out.weight"]),
        (
            lambda m: m["config"].update(vocab_size=255),
            ["embed.weight has shape [256, 64] and needs [255, 64]"],
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(saved, edit, words):
    path = saved / "jaxinfer.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    refuse(saved, ValueError, *words)


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_damage_inside_orbax_is_an_error_of_ours(saved, name):
    """In a process of its own: Orbax's threads may outlive the read that failed, and complain."""
    path = saved / "params" / name
    path.write_bytes(b"x" * path.stat().st_size)
    code = (
        "from jaxinfer.checkpoint import load_params, open_checkpoint\n"
        "try:\n"
        f"    load_params(open_checkpoint({str(saved)!r}), dtype='float32')\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert re.search("params.*Convert the model again", done.stdout), done.stdout + done.stderr


def test_a_failure_on_the_way_leaves_nothing(tiny, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint)

    def fail(*_):
        raise OSError("disk full")

    (tmp_path / "out").mkdir()
    with pytest.raises(FileNotFoundError, match="'nowhere' is no file or folder here, no alias"):
        save_orbax(tmp_path / "out" / "saved", checkpoint.config, params, "nowhere")
    monkeypatch.setattr("jaxinfer.checkpoint.orbax._copy_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        save_orbax(tmp_path / "out" / "saved", checkpoint.config, params, tiny)
    assert list((tmp_path / "out").iterdir()) == []


def test_what_is_there_is_kept_and_an_empty_folder_filled(saved, tiny, tmp_path):
    checkpoint = open_checkpoint(saved)
    params = load_params(checkpoint, dtype="float32")
    before = sorted((p, p.stat().st_mtime_ns) for p in saved.rglob("*"))
    with pytest.raises(FileExistsError, match="saved already exists"):
        save_orbax(saved, checkpoint.config, params)
    assert sorted((p, p.stat().st_mtime_ns) for p in saved.rglob("*")) == before
    with pytest.raises(FileExistsError, match="model.safetensors already exists"):
        save_orbax(tiny / "model.safetensors", checkpoint.config, params)
    (tmp_path / "empty").mkdir()
    save_orbax(tmp_path / "empty", checkpoint.config, params)
    assert_bits_equal(load_params(open_checkpoint(tmp_path / "empty"), dtype="float32"), params)


def test_wrong_params_are_refused_before_anything_is_written(tiny, tmp_path, monkeypatch):
    checkpoint = open_checkpoint(tiny)
    params = load_params(checkpoint, dtype="float32")
    norm = params["norm"]["weight"]
    for wrong, match in (
        (params | {"norm": {"weight": norm.astype("bfloat16")}}, "dtype bfloat16, float32"),
        (params | {"norm": {"weight": norm[1:]}}, r"norm\.weight has shape \[63\]"),
        (params | {"extra": norm}, "not the tree of a llama model"),
        (jax.tree.map(lambda x: x.astype("int8"), params), "dtype int8"),
    ):
        with pytest.raises(ValueError, match=match):
            save_orbax(tmp_path / "saved", checkpoint.config, wrong)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="2 processes"):
        save_orbax(tmp_path / "saved", checkpoint.config, params)
    assert not (tmp_path / "saved").exists()
