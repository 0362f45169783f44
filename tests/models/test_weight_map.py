"""The weight map: every element of every leaf is filled exactly once, and the moves are inverse."""

import itertools
import math

import jax
import numpy as np
import pytest

from jaxinfer.compute import Decoder
from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.models import NAMED_SHAPES, family_of, named_shape, num_parameters
from jaxinfer.models.layout import GGUF_NAMES, Layout
from jaxinfer.models.llama import gguf_weights, weights
from jaxinfer.models.weights import Part, from_view, leaf_at, stacked, to_view, unflatten

from .small_configs import VARIANTS, read


def make_config(**changes):
    fields = {
        "vocab_size": 20,
        "hidden_size": 12,
        "intermediate_size": 10,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 4,
        "rope": RopeConfig(dim=4),
    }
    return ModelConfig(**(fields | changes))


FLAGS = [
    dict(zip(("qkv_bias", "out_bias", "mlp_bias", "tie_embeddings"), values))
    for values in itertools.product((False, True), repeat=4)
]


SMALL = [
    read(name, **{"num_hidden_layers": 2, "head_dim": 8, **settings}) for name, settings in VARIANTS
]

# Leaves of every family with the names of Hugging Face, and of those that have them, of GGUF.
MAPS = [
    *((weights, make_config(**flags)) for flags in FLAGS),
    *((gguf_weights, make_config(**flags)) for flags in FLAGS),
    *((family_of(config).weights, config) for config in SMALL),
    *((leaves, config) for config in SMALL if (leaves := family_of(config).gguf_weights)),
]
every_map = pytest.mark.parametrize(
    ("leaves_of", "config"), MAPS, ids=[config.family for _, config in MAPS]
)


@every_map
def test_parts_cover_each_leaf_and_each_tensor_exactly_once(leaves_of, config):
    leaves = leaves_of(config)
    assert len({leaf.path for leaf in leaves}) == len(leaves)
    tensors = {}
    for leaf in leaves:
        filled = np.zeros(leaf.shape, np.int8)
        for part in leaf.parts:
            assert filled[part.index].shape == part.view
            filled[part.index] += 1
            read_rows = tensors.setdefault(part.name, np.zeros(part.shape, np.int8))
            assert read_rows.shape == part.shape
            start, stop = part.span(0, part.view[0])
            assert read_rows[start:stop].size == math.prod(part.view)
            read_rows[start:stop] += 1
        assert (filled == 1).all(), leaf.path
    for name, read_rows in tensors.items():
        assert (read_rows == 1).all(), name


@every_map
def test_leaves_are_the_decoders_own(leaves_of, config):
    """The weight map and `Decoder.init` describe one and the same tree."""
    tree = jax.eval_shape(Decoder(config).init, jax.random.key(0))
    leaves = leaves_of(config)
    assert len(jax.tree.leaves(tree)) == len(leaves)
    for leaf in leaves:
        assert leaf_at(tree, leaf.path).shape == leaf.shape, leaf.path


def test_optional_leaves_follow_the_config():
    paths = {leaf.path for leaf in weights(make_config())}
    assert ("head", "weight") in paths
    assert not any("bias" in path for path in paths)
    tied = {leaf.path: leaf for leaf in weights(make_config(tie_embeddings=True))}
    assert ("head", "weight") not in tied
    assert tied["embed", "weight"].parts[0].copies == ("lm_head.weight",)
    biased = {
        leaf.path: leaf.shape
        for leaf in weights(make_config(qkv_bias=True, out_bias=True, mlp_bias=True))
    }
    layer = ("layers", 1)
    assert biased[*layer, "attention", "qkv", "bias"] == (2, 5, 4)
    assert biased[*layer, "attention", "out", "bias"] == (12,)
    assert biased[*layer, "mlp", "gate_up", "bias"] == (2, 10)
    assert biased[*layer, "mlp", "down", "bias"] == (12,)


def test_fused_projection_groups_queries_with_their_key_and_value():
    """Query head n stands at [n // G, n % G]; the key follows the G queries, then the value."""
    leaf = next(leaf for leaf in weights(make_config()) if "qkv" in leaf.path)
    assert leaf.shape == (2, 5, 4, 12)
    array = np.empty(leaf.shape)
    files = {
        part.name: np.random.default_rng(len(part.name)).random(part.shape) for part in leaf.parts
    }
    for part in leaf.parts:
        array[part.index] = to_view(part, files[part.name])
    query, key, value = (files[part.name] for part in leaf.parts)
    for n in range(6):
        np.testing.assert_array_equal(array[n // 3, n % 3], query[4 * n : 4 * n + 4])
    for k in range(2):
        np.testing.assert_array_equal(array[k, 3], key[4 * k : 4 * k + 4])
        np.testing.assert_array_equal(array[k, 4], value[4 * k : 4 * k + 4])


def test_interleaved_rows_become_two_halves():
    part = Part("q", (8, 1), (1, 1, 8, 1), interleaved_axis=2)
    file = np.array([0, 4, 1, 5, 2, 6, 3, 7])[:, None]
    view = to_view(part, file)
    assert view.ravel().tolist() == list(range(8))
    np.testing.assert_array_equal(from_view(part, view), file)


@every_map
def test_moves_are_inverse_for_any_rows(leaves_of, config):
    for part in (part for leaf in leaves_of(config) for part in leaf.parts):
        start, stop = part.span(0, part.view[0])
        file = np.arange(math.prod(part.shape)).reshape(part.shape)[start:stop]
        whole = to_view(part, file)
        assert whole.shape == part.view
        np.testing.assert_array_equal(from_view(part, whole), file)
        rows = [
            to_view(part, file[i * part.rows : (i + 1) * part.rows]) for i in range(part.view[0])
        ]
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_parts_of_one_name_are_rows_of_one_tensor():
    parts = [Part("a", (4, 3), (2, 2, 3)), Part("b", (5, 3), (5, 3)), Part("a", (6, 3), (2, 9))]
    first, alone, second = stacked(parts)
    assert alone == parts[1]
    assert (first.shape, second.shape) == ((10, 3), (10, 3))
    assert (first.rows, second.rows) == (2, 3)
    assert (first.span(0, 2), second.span(0, 2), second.span(1, 2)) == ((0, 4), (4, 10), (7, 10))
    file = np.arange(30.0).reshape(10, 3)
    np.testing.assert_array_equal(to_view(second, file[7:10]), [np.arange(21.0, 30.0)])
    np.testing.assert_array_equal(from_view(second, to_view(second, file[4:])), file[4:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_offset_is_what_the_file_adds(dtype):
    """Exact where the values are, and rounded once from float32 otherwise."""
    part = Part("norm", (4,), (4,), offset=1.0)
    file = np.array([1.25, 0.5, -1.0, 1.0078125], np.float32).astype(dtype)
    view = to_view(part, file)
    np.testing.assert_array_equal(view, np.array([0.25, -0.5, -2.0, 0.0078125], np.float32))
    again = from_view(part, view.astype(dtype))
    assert again.dtype == file.dtype
    np.testing.assert_array_equal(again, file)


def test_norms_alone_can_have_an_offset():
    """The files of some converters hold 1 + weight of every norm."""
    layout = Layout(names=GGUF_NAMES, norm_offset=1.0)
    parts = [part for leaf in layout(read("gemma3", num_hidden_layers=2)) for part in leaf.parts]
    shifted = {part.name for part in parts if part.offset == 1.0}
    assert shifted == {part.name for part in parts if part.name.endswith("norm.weight")}
    assert len(shifted) == 2 * 6 + 1


def test_gguf_permutes_queries_and_keys_only():
    parts = {part.name: part for leaf in gguf_weights(make_config()) for part in leaf.parts}
    permuted = {name for name, part in parts.items() if part.interleaved_axis is not None}
    assert permuted == {f"blk.{i}.attn_{x}.weight" for i in range(2) for x in "qk"}


def test_gguf_permutes_in_some_families():
    permuting = {
        config.family
        for config in SMALL
        if (leaves := family_of(config).gguf_weights)
        and any(part.interleaved_axis is not None for leaf in leaves(config) for part in leaf.parts)
    }
    assert permuting == {"llama", "granite", "smollm3"}


def test_unflatten_makes_tuples_of_numbered_levels():
    tree = unflatten({("a", 0, "w"): 1, ("a", 1, "w"): 2, ("b",): 3})
    assert tree == {"a": ({"w": 1}, {"w": 2}), "b": 3}
    assert leaf_at(tree, ("a", 1, "w")) == 2
    many = unflatten({("a", i): i for i in reversed(range(12))})
    assert many["a"] == tuple(range(12))


@pytest.mark.parametrize(
    ("name", "parameters", "kv_bytes"),
    [
        ("smollm2-135m", 134_515_008, 23_040),
        ("llama-3-8b", 8_030_261_248, 131_072),
        ("llama-3-70b", 70_553_706_496, 327_680),
        ("qwen3-0.6b", 596_049_920, 114_688),
        ("qwen3-8b", 8_190_735_360, 147_456),
        ("gemma-3-27b", 27_009_346_304, 507_904),
    ],
)
def test_named_shapes_have_the_published_sizes(name, parameters, kv_bytes):
    config = named_shape(name)
    assert num_parameters(config) == parameters
    assert config.kv_bytes_per_token("bfloat16") == kv_bytes


def test_unknown_shape_lists_the_known():
    with pytest.raises(ValueError, match=r"'llama-9'.*smollm2-135m.*llama-3-70b"):
        named_shape("llama-9")
    assert len(NAMED_SHAPES) == 6


def test_gemma_without_its_embedding_has_the_published_size():
    """The Gemma 3 report, table 1: 25,600 million parameters."""
    config = named_shape("gemma-3-27b")
    rest = num_parameters(config) - config.vocab_size * config.hidden_size
    assert round(rest / 1e6) == 25_600
