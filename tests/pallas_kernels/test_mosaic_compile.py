"""The TPU kernel, compiled by the TPU compiler: what that refuses fails here, not on the slice."""

import functools
import itertools
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer import ParallelConfig
from jaxinfer.bench.compiled import bytes_of, compile_for, tpu_devices
from jaxinfer.compute.sharding import mesh_over
from pallas_kernels.paged_attention import PageSpec, ScaledPages, paged_attention

from ..conftest import needs_tpu_compiler

pytestmark = [pytest.mark.aot, needs_tpu_compiler]

# The smallest slices; one of their devices is compiled for.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}

ROWS, CONTEXT = 8, 2048
# So many that no cache fits into VMEM, where XLA would carry it.
LAYERS = 40
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")


def compile_call(chip, *, H, page_size, K, dtype="bfloat16", G=4, T=1, latent=None, **options):
    """`(what the compiler says, bytes of the cache)` of one call on a stacked, donated cache."""
    mesh = mesh_over(ParallelConfig(), tpu_devices(TOPOLOGIES[chip]))
    everywhere = NamedSharding(mesh, PartitionSpec())
    array = functools.partial(jax.ShapeDtypeStruct, sharding=everywhere)
    M = CONTEXT // page_size
    if latent is None:
        spec, width = PageSpec.of(K, page_size, H, dtype, "tpu"), 2 * H
    else:
        spec, width = PageSpec.of_latent(page_size, H, dtype, "tpu"), H
    shape = (LAYERS, *spec.shape(ROWS * M))
    pages = array(shape, spec.dtype)
    if dtype in ("int8", "float8_e4m3fn"):
        pages = ScaledPages(pages, array((LAYERS, *spec.scales_shape(ROWS * M)), jnp.float32))
    operands = [
        array((ROWS, T, K * G, H), jnp.float32),
        array((ROWS, T, K, width), jnp.float32),
        pages,
        array((ROWS, M), jnp.int32),
        array((ROWS,), jnp.int32),
        array((ROWS,), jnp.int32),
        array((), jnp.int32),
    ]

    def call(*operands):
        *operands, layer = operands
        return paged_attention(*operands, layer=layer, value_dim=latent, **options)

    # Inside a shard_map the device's kind is known.
    everywhere = PartitionSpec()
    sharded = jax.shard_map(
        call, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
    )
    program = compile_for("tpu", jax.jit(sharded, donate_argnums=2), *operands)
    return program, bytes_of(pages)


def assert_in_place(program, cache_bytes):
    """The kernel is there, and the cache is neither copied nor anything like it allocated."""
    assert len(program.kernels()) == 1
    assert program.alias_bytes == cache_bytes
    assert program.temp_bytes <= 2**20
    assert not program.moved(2**20)


def known_sizes(page_size, dtype):
    """Whether pages of this size are whole tiles: of 8-bit types 32 slots, of bfloat16 16."""
    return page_size >= {"int8": 32, "float8_e4m3fn": 32, "bfloat16": 16, "float32": 8}[dtype]


GRID = [
    (chip, H, page_size, K, dtype)
    for chip, H, page_size, K, dtype in itertools.product(
        TOPOLOGIES, (64, 128, 256), (16, 32, 64, 128), (1, 2, 8), DTYPES
    )
    if known_sizes(page_size, dtype)
]
ORDINARY = {
    ("v5e", 128, 32, 1, "bfloat16"),
    ("v5e", 64, 16, 2, "bfloat16"),
    ("v5e", 128, 32, 1, "int8"),
    ("v5p", 128, 128, 1, "bfloat16"),
    ("v6e", 128, 32, 8, "bfloat16"),
    ("v6e", 64, 64, 2, "float8_e4m3fn"),
    ("tpu7x", 256, 32, 1, "bfloat16"),
    ("tpu7x", 128, 16, 2, "float32"),
}


@pytest.mark.parametrize(
    "chip, H, page_size, K, dtype",
    [pytest.param(*row, marks=[pytest.mark.slow] * (row not in ORDINARY)) for row in GRID],
)
def test_decode_compiles(chip, H, page_size, K, dtype, kernel_table):
    """Decode: one query token a row, 4 heads to a kv head, 2048 tokens of context, 8 rows."""
    start = time.perf_counter()
    program, cache_bytes = compile_call(chip, H=H, page_size=page_size, K=K, dtype=dtype)
    seconds = time.perf_counter() - start
    assert_in_place(program, cache_bytes)
    kernel_table.append((chip, dtype, H, page_size, K, program.temp_bytes, seconds))


SHAPES = {
    "verification": dict(H=128, K=1, T=5),
    "window, soft cap": dict(H=80, K=1, G=3, T=1, window=128, soft_cap=30.0),
    "chunk": dict(H=128, K=1, G=4, T=16),
    "group of 1": dict(H=96, K=8, G=1, T=1),
    "group of 16": dict(H=128, K=1, G=16, T=1),
    "many kv heads": dict(H=64, K=32, G=1, T=1),
    "latent": dict(H=576, K=1, G=16, T=1, latent=512),
}
ORDINARY_SHAPES = {("v5e", "window, soft cap"), ("v6e", "chunk"), ("v5e", "latent")}


@pytest.mark.parametrize(
    "chip, shape",
    [
        pytest.param(*row, marks=[pytest.mark.slow] * (row not in ORDINARY_SHAPES))
        for row in itertools.product(TOPOLOGIES, SHAPES)
    ],
)
def test_shape_compiles(chip, shape):
    assert_in_place(*compile_call(chip, page_size=32, **SHAPES[shape]))


@pytest.mark.slow
@pytest.mark.parametrize("chip", TOPOLOGIES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, G", [(1, 4), (8, 2)])
def test_prefill_compiles(chip, dtype, K, G):
    """A chunk of 512 tokens a row: what is allocated are the queries and results, re-laid, and less
    than 1 MiB besides.
    """
    program, cache_bytes = compile_call(
        chip, H=128, page_size=32, K=K, G=G, T=512, dtype=dtype, window=1024
    )
    assert program.alias_bytes == cache_bytes
    results = 4 * ROWS * 512 * K * G * 128
    assert program.temp_bytes <= 3 * results + 2**20


def test_smaller_pages_than_a_tile_go_to_the_reference():
    """Without a name the platform chooses, and 8 slots of bfloat16 are half a tile."""
    program, _ = compile_call("v5e", H=128, page_size=8, K=1)
    assert not program.kernels()
    with pytest.raises(ValueError, match="page_size=8 is no multiple of the 16 slots"):
        compile_call("v5e", H=128, page_size=8, K=1, implementation="mosaic_tpu")
