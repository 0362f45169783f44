"""Whole steps of the shape of Llama 3 8B over 8 chips, compiled by the TPU compiler: in place, the
weights and the cache once each, two sums over the chips a layer.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.compute import Decoder, init_cache
from jaxinfer.compute.decoder import stack_layers
from jaxinfer.compute.sharding import cache_spec, param_shardings, shardings
from jaxinfer.config import CacheConfig
from jaxinfer.models import NAMED_SHAPES

from ..pallas_kernels.tpu_compiler import bytes_of, compile_for, mesh_of, needs_compiler

pytestmark = [pytest.mark.aot, needs_compiler]

CHIPS, PAGE, CONTEXT, ROWS = 8, 32, 2048, 32
CACHE_BYTES = 1_073_741_824  # a chip's: 32 rows x 2048 tokens x 32 layers x 256 lanes x 2 bytes


def compile_step(topology, *, num_rows, num_tokens, stacked=True):
    """`(what the compiler says, bytes of a chip's weights and cache)`: new hidden states, the cache
    written, and each row's next token.
    """
    mesh = mesh_of(topology, (1, CHIPS), ("data", "model"))
    config = NAMED_SHAPES["llama-3-8b"]
    model = Decoder(config, mesh=mesh)
    # All layers are as the first.
    first = Decoder(dataclasses.replace(config, num_layers=1))
    params = jax.eval_shape(lambda key: first.init(key, "bfloat16"), jax.random.key(0))
    params["layers"] *= config.num_layers
    params = jax.eval_shape(stack_layers, params) if stacked else params
    pages = CacheConfig(num_pages=ROWS * CONTEXT // PAGE, page_size=PAGE, dtype="bfloat16")
    cache = jax.eval_shape(lambda: init_cache(config, pages, stacked=stacked, platform="tpu"))
    placed = param_shardings(mesh, params), shardings(mesh, cache_spec(cache))
    everywhere = NamedSharding(mesh, PartitionSpec())
    shapes = [(num_rows, num_tokens), (num_rows, CONTEXT // PAGE), (num_rows,), (num_rows,)]
    batch = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]

    def step(params, cache, tokens_BT, page_table_BM, context_lens_B, query_lens_B):
        where = (page_table_BM, context_lens_B, query_lens_B)
        cache, x_BTD = model(params, cache, tokens_BT, *where)
        logits_BV = model.unembed(params, x_BTD[:, -1])
        return cache, jnp.argmax(logits_BV, axis=-1)

    jitted = jax.jit(
        step,
        donate_argnums=1,
        in_shardings=(*placed, *[everywhere] * len(batch)),
        out_shardings=(placed[1], everywhere),
    )
    held = bytes_of(jax.tree.map(a_chips, (params, cache), placed))
    return compile_for(jitted, params, cache, *batch), held


def a_chips(leaf, sharding):
    """The part of an array that one chip holds."""
    return jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)


def assert_lean(compiled, held, temp):
    assert compiled.kernels == 1
    assert compiled.alias == CACHE_BYTES
    assert compiled.temp <= temp
    sums = sum(compiled.beside_kernel[name] for name in ("all-reduce", "all-reduce-start"))
    assert sums == 2
    # Those that the compiler starts ahead are activations, from memory to VMEM or back.
    copies = [size for operation, size in compiled.moved if operation != "copy-start"]
    assert max(copies, default=0) < 8 * 2**20
    assert compiled.arguments <= 1.02 * held


@pytest.mark.parametrize("topology", ["v5e:2x4", pytest.param("v6e:2x4", marks=pytest.mark.slow)])
def test_decode(topology):
    """32 rows of one token with 2048 tokens of context."""
    assert_lean(*compile_step(topology, num_rows=ROWS, num_tokens=1), temp=2 * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_prefill(topology):
    """A chunk of 512 tokens of one prompt."""
    assert_lean(*compile_step(topology, num_rows=1, num_tokens=512), temp=10 * 2**20)


@pytest.mark.slow
def test_unrolled_layers_are_what_a_tpu7x_wants():
    """Scanned, it re-lays the stacked weights each step, 1.6 GB of them; unrolled, no weight."""
    compiled, held = compile_step("tpu7x:2x2x1", num_rows=ROWS, num_tokens=1, stacked=False)
    assert compiled.kernels == NAMED_SHAPES["llama-3-8b"].num_layers
    assert compiled.alias == CACHE_BYTES
    assert compiled.temp <= 32 * 2**20
    assert compiled.arguments <= 1.02 * held
