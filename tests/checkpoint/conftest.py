"""Small checkpoints in both formats."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models.llama import config_to_hf, weights

from . import llama_cpp

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"


@pytest.fixture
def tiny(tmp_path):
    """A copy of the tiny checkpoint's folder, to be damaged."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder / name)
    return folder


@pytest.fixture
def tiny_tensors():
    return load_file(TINY / "model.safetensors")


@pytest.fixture
def tiny_refs():
    """What another library computed with the tiny checkpoint."""
    with np.load(TINY / "refs.npz") as refs:
        return dict(refs)


@pytest.fixture
def edit_settings():
    """Changes keys of a folder's config.json."""

    def edit(folder, **changes):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.fixture
def make_model(tmp_path):
    """Writes a random folder: 4 heads, 2 kv heads, any head_dim; returns it with its tensors."""

    def make(head_dim, **flags):
        config = ModelConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=head_dim,
            rope=RopeConfig(dim=head_dim),
            **flags,
        )
        rng = np.random.default_rng(head_dim)
        tensors = {
            part.name: rng.standard_normal(part.shape, np.float32)
            for leaf in weights(config)
            for part in leaf.parts
        }
        folder = tmp_path / f"hf-{head_dim}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config_to_hf(config)))
        return folder, config, tensors

    return make


@pytest.fixture
def write_gguf(tmp_path):
    """Writes a Llama's config and tensors, with the names of Hugging Face, as llama.cpp does."""

    def write(config, tensors, **options):
        return llama_cpp.write_gguf(
            tmp_path / "model.gguf", config_to_hf(config), tensors, **options
        )

    return write
