"""Files of every family: saved as they were, and read whatever else stands in them."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, open_checkpoint, save_huggingface

from ..conftest import TINY, TINY_NAMES


def read(folder):
    return load_params(open_checkpoint(folder), dtype="float32")


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def write(folder, settings, tensors):
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def settings_of(name):
    return json.loads((TINY / name / "config.json").read_text())


@pytest.mark.parametrize("name", TINY_NAMES)
def test_saving_is_the_inverse_of_loading(name, tmp_path):
    checkpoint = open_checkpoint(TINY / name)
    params = load_params(checkpoint, dtype="float32")
    save_huggingface(tmp_path / "saved", checkpoint.config, params)
    assert open_checkpoint(tmp_path / "saved").config == checkpoint.config
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    original = load_file(TINY / name / "model.safetensors")
    assert saved.keys() == original.keys()
    for tensor, array in original.items():
        assert array.tobytes() == saved[tensor].tobytes(), tensor
    assert_equal(read(tmp_path / "saved"), params)


def test_a_tensor_of_three_projections(tmp_path):
    """Query, key and value heads one below the other, each where the tree has it."""
    params = read(TINY / "phi3")
    tensors = load_file(TINY / "phi3" / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    heads = tensors[name].reshape(8, 16, 64)
    qkv = params["layers"][1]["attention"]["qkv"]["weight"]
    for n in range(4):
        np.testing.assert_array_equal(qkv[n // 2, n % 2], heads[n])
    np.testing.assert_array_equal(qkv[:, 2], heads[4:6])
    np.testing.assert_array_equal(qkv[:, 3], heads[6:8])
    gate_up = params["layers"][1]["mlp"]["gate_up"]["weight"]
    np.testing.assert_array_equal(
        gate_up.reshape(-1, 64), tensors["model.layers.1.mlp.gate_up_proj.weight"]
    )

    tensors[name] = tensors[name][:-16].copy()
    folder = write(tmp_path / "short", settings_of("phi3"), tensors)
    with pytest.raises(ValueError, match=r"qkv_proj\.weight has shape \[112, 64\] and needs \[128"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("old", "text", "vision"),
    [
        ("model.", "language_model.model.", ""),
        ("model.", "model.language_model.", "model."),
    ],
)
def test_the_text_part_of_a_checkpoint_that_also_sees(tmp_path, old, text, vision):
    settings = settings_of("gemma3")
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": settings,
        "vision_config": {"hidden_size": 8},
        "mm_tokens_per_image": 4,
    }
    original = load_file(TINY / "gemma3" / "model.safetensors")
    tensors = {name.replace(old, text, 1): array for name, array in original.items()}
    tensors[f"{vision}vision_tower.vision_model.post_layernorm.weight"] = np.ones(8, np.float32)
    tensors[f"{vision}multi_modal_projector.mm_soft_emb_norm.weight"] = np.ones(8, np.float32)
    folder = write(tmp_path / "sees", outer, tensors)
    assert open_checkpoint(folder).config == open_checkpoint(TINY / "gemma3").config
    assert_equal(read(folder), read(TINY / "gemma3"))

    unknown = tensors | {f"{text}layers.0.extra.weight": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"unexpected model\.layers\.0\.extra\.weight"):
        open_checkpoint(write(tmp_path / "more", outer, unknown))


def test_masks_that_old_files_hold_are_no_weights(tmp_path):
    tensors = load_file(TINY / "gpt_neox" / "model.safetensors")
    for i in range(2):
        prefix = f"gpt_neox.layers.{i}.attention"
        tensors[f"{prefix}.bias"] = np.ones((1, 1, 8, 8), bool)
        tensors[f"{prefix}.masked_bias"] = np.array(-1e9, np.float32)
        tensors[f"{prefix}.rotary_emb.inv_freq"] = np.ones(2, np.float32)
    folder = write(tmp_path / "old", settings_of("gpt_neox"), tensors)
    assert_equal(read(folder), read(TINY / "gpt_neox"))


def test_an_unknown_architecture_lists_the_known(tmp_path):
    shutil.copytree(TINY / "llama", tmp_path / "new")
    settings = settings_of("llama") | {"model_type": "llama9"}
    (tmp_path / "new" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="'llama9' is not supported. Known: gemma2, .*stablelm"):
        open_checkpoint(tmp_path / "new")
