"""Small checkpoints in both formats."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models.llama import config_to_hf, weights

TINY = Path(__file__).parents[1] / "data" / "tiny" / "llama"

GGUF_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    for ours, theirs in GGUF_MODULES.items():
        name = name.replace(ours, theirs)
    return name.replace("model.layers.", "blk.")


def permute(array, num_heads):
    """Rows of each head from two halves to pairs, as converters to GGUF do for Llama."""
    halves = array.reshape(num_heads, 2, -1, *array.shape[1:])
    return halves.swapaxes(1, 2).reshape(array.shape)


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
    """Writes Hugging Face tensors as GGUF of architecture llama, with the gguf package's writer."""

    def write(config, tensors, quantise=None, extra=()):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_vocab_size(config.vocab_size)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_block_count(config.num_layers)
        writer.add_context_length(config.max_position)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_token_list([f"token {i}".encode() for i in range(config.vocab_size)])
        heads = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
        for name, original in [*tensors.items(), *extra]:
            count = next((count for module, count in heads.items() if module in name), None)
            array = original if count is None else permute(original, count)
            if quantise is not None and array.ndim == 2:
                data = gguf.quantize(array, quantise)
                writer.add_tensor(gguf_name(name), data, raw_dtype=quantise)
            else:
                writer.add_tensor(gguf_name(name), array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
