"""What is the TPU kernel's own: steps of any size, copies that are waited for, rows that meet in a
page, pages of 8 bits, each head dim; interpreted, against the reference.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import (
    PageSpec,
    ScaledPages,
    mosaic_tpu,
    paged_attention,
)
from pallas_kernels.paged_attention.layout import LARGEST, read_pages, write_kv
from pallas_kernels.paged_attention.mosaic_tpu import Blocks, refusal, traffic
from pallas_kernels.paged_attention.mosaic_tpu.blocks import CallShape, choose_blocks

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "int8": 2e-2, "float8_e4m3fn": 2e-2}
QUICKLY = {"xla_backend_optimization_level": 0}
# Copies are made when they are waited for, not when they are started.
ON_WAIT = pltpu.InterpretParams()


def kernel(blocks=None, interpret=True, **options):
    """The kernel, interpreted."""
    given = dict(scale=0.2, window=None, soft_cap=None, sinks_N=None, layer=None, value_dim=None)
    call = functools.partial(
        mosaic_tpu.attend, blocks=blocks, interpret=interpret, **given | options
    )
    return jax.jit(call, compiler_options=QUICKLY)


def make_rows(
    contexts, queries, T, *, N=4, K=2, H=16, page_size=8, dtype="float32", latent=None, scaled=False
):
    """The arguments of a call whose pages hold the earlier keys and values, the rest being NaN."""
    rng = np.random.default_rng(5)
    B, M = len(contexts), max(-(-c // page_size) for c in contexts) + 1
    if latent is None:
        spec = PageSpec.of(K, page_size, H, dtype, "tpu")
    else:
        spec = PageSpec.of_latent(page_size, H, dtype, "tpu")
    P = B * M + 2
    pages = jnp.full(spec.shape(P), 99 if dtype == "int8" else jnp.nan, spec.dtype)
    if scaled:
        pages = ScaledPages(pages, jnp.full(spec.scales_shape(P), jnp.nan))
    order, table = iter(rng.permutation(P)), np.full((B, M), P, np.int32)
    for b, context in enumerate(contexts):
        for m in range(-(-context // page_size)):
            table[b, m] = next(order)
    table, contexts, queries = (jnp.asarray(x, jnp.int32) for x in (table, contexts, queries))
    rounded = "float32" if dtype == "float32" else "bfloat16"
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), rounded)  # noqa: E731
    L = 2 * H if latent is None else H
    before = contexts - queries
    pages = write_kv(pages, normal(B, int(max(before)), K, L), table, before, before)
    return normal(B, T, N, H), normal(B, T, K, L), pages, table, contexts, queries


def assert_equals_reference(call, rows, dtype="float32", **options):
    """Results within the tolerance; pages bit by bit, what nothing writes included."""
    out, pages = call(*rows)
    reference = functools.partial(paged_attention, implementation="reference", scale=0.2, **options)
    want, want_pages = jax.jit(reference, compiler_options=QUICKLY)(*rows)
    assert np.isfinite(want).all()
    np.testing.assert_allclose(out, want, atol=TOLERANCE[dtype], rtol=0)
    for got, wanted in zip(jax.tree.leaves(pages), jax.tree.leaves(want_pages), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(
            np.asarray(got).view(np.uint8), np.asarray(wanted).view(np.uint8)
        )


MIXED = dict(contexts=(41, 8, 0, 30, 21, 9), queries=(17, 8, 0, 3, 1, 0), T=17)


def test_steps_of_any_size():
    """Items of 5 queries over blocks of 2 pages: pages between two items, and between two rows."""
    assert_equals_reference(
        kernel(Blocks(pages=2, queries=5), window=11), make_rows(**MIXED), window=11
    )


@pytest.mark.slow
@pytest.mark.parametrize("pages", [1, 2, 3])
@pytest.mark.parametrize("queries", [1, 3, 8, 17])
def test_steps_of_every_size(pages, queries):
    assert_equals_reference(kernel(Blocks(pages, queries)), make_rows(**MIXED))


@pytest.fixture(scope="module")
def on_wait_rows():
    return make_rows((41, 8, 0, 30), (9, 8, 0, 3), 9)


def test_every_copy_is_waited_for(on_wait_rows):
    call = kernel(Blocks(pages=2, queries=5), interpret=ON_WAIT)
    assert_equals_reference(call, on_wait_rows)


@pytest.mark.parametrize("lost", ["arrival", "write"])
def test_a_lost_wait_is_seen(on_wait_rows, monkeypatch, lost):
    """The kernel less one wait: the check above must fail, or it would prove nothing."""
    name = {"arrival": "await_fetch", "write": "await_sent"}[lost]
    monkeypatch.setattr(traffic.Traffic, name, without_wait(name))
    call = kernel(Blocks(pages=2, queries=5), interpret=ON_WAIT)
    with pytest.raises(AssertionError):
        assert_equals_reference(call, on_wait_rows)


def without_wait(name):
    """The method `name` of `Traffic`, compiled from its source without its `copy.wait()`."""
    source = inspect.getsource(getattr(traffic.Traffic, name))
    assert source.count("copy.wait()") == 1
    scope = dict(vars(traffic))
    body = inspect.cleandoc("\n" + source).replace("copy.wait()", "None")
    exec(body, scope)
    return scope[name]


@pytest.mark.parametrize("interpret", [True, pytest.param(ON_WAIT, marks=pytest.mark.slow)])
def test_rows_may_meet_in_a_page(interpret):
    """Tokens of one sequence as rows of their own: each reads, and writes beside, what the last
    one wrote.
    """
    q, new_kv, pages, table, _, _ = make_rows((21,), (7,), 7)
    contexts = jnp.arange(15, 22, dtype=jnp.int32)
    rows = (q[0][:, None], new_kv[0][:, None], pages, jnp.repeat(table, 7, axis=0))
    rows = (*rows, contexts, jnp.ones(7, jnp.int32))
    for blocks in (Blocks(1, 1), Blocks(4, 1)):
        assert_equals_reference(kernel(blocks, interpret=interpret), rows)


HEAD_DIMS = {64: 128, 80: 256, 96: 256, 128: 256, 256: 512}
OF_16_BITS = [pytest.param(H, marks=[pytest.mark.slow] * (H not in (80, 128))) for H in HEAD_DIMS]


@pytest.mark.parametrize("H", OF_16_BITS)
def test_each_head_dim(H):
    """q.[k|v] = q.k where the value shares registers with the key, a slice where it does not."""
    rows = make_rows((33, 1, 16), (2, 1, 2), 2, H=H, page_size=16, dtype="bfloat16")
    assert rows[2].shape[-1] == HEAD_DIMS[H]
    assert_equals_reference(kernel(), rows, "bfloat16")


@pytest.mark.parametrize(
    "dtype, scaled",
    [
        ("int8", True),
        pytest.param("float8_e4m3fn", True, marks=pytest.mark.slow),
        pytest.param("float8_e4m3fn", False, marks=pytest.mark.slow),
    ],
)
def test_pages_of_8_bits(dtype, scaled):
    rows = make_rows((70, 1, 32), (4, 1, 2), 4, page_size=32, dtype=dtype, scaled=scaled)
    assert_equals_reference(kernel(Blocks(2, 3), window=40), rows, dtype, window=40)


def test_a_latent_is_key_and_value():
    """Of lanes 0:40 the key is all, the value the first 32."""
    rows = make_rows((41, 1, 16), (2, 1, 2), 2, N=8, K=1, H=40, latent=32)
    assert rows[2].shape[-1] == 128
    assert_equals_reference(kernel(value_dim=32), rows, value_dim=32)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("magnitude", [4.0, 1e-3, 1e4])
def test_scales_follow_the_values(dtype, magnitude):
    """Each key and value to half a step of its own largest number; the value's scale is its own."""
    rng = np.random.default_rng(0)
    kv = rng.standard_normal((1, 8, 2, 32)) * magnitude
    kv[..., 16:] *= 100
    table = jnp.zeros((1, 1), jnp.int32)
    empty = ScaledPages(jnp.zeros((1, 2, 8, 32), dtype), jnp.zeros((1, 2, 1, 128)))
    lens = jnp.full(1, 8, jnp.int32)
    pages = write_kv(empty, jnp.asarray(kv, jnp.float32), table, lens, lens)
    got = np.asarray(read_pages(pages, table, head_dim=16))[0, 0].transpose(1, 0, 2)
    halves = np.stack([kv[0, ..., :16], kv[0, ..., 16:]])
    largest = np.abs(halves).max(-1, keepdims=True)
    step = (
        largest / LARGEST["int8"] / 2 if dtype == "int8" else np.abs(halves) / 16 + largest / 2**16
    )
    error = np.abs(np.stack([got[..., :16], got[..., 16:]]) - halves)
    assert (error <= 1.01 * step).all()


def test_queries_and_keys_of_different_number():
    """4 to 16 queries against 4 to 64 keys, each with each, in one call."""
    pairs = [(c, q) for q in (4, 8, 13, 16) for c in (4, 8, 15, 16, 17, 33, 64) if c >= q]
    assert_equals_reference(kernel(Blocks(2, 8)), make_rows(*zip(*pairs), 16, page_size=16))


def test_refuses_what_the_compiler_would_not_take():
    def refused(dtype, page_size=32, H=64, rows=4, width=8):
        spec = PageSpec(2, page_size, 2 * H, jnp.dtype(dtype))
        pages = jax.ShapeDtypeStruct(spec.shape(8), spec.dtype)
        return refusal(pages, jax.ShapeDtypeStruct((rows, width), jnp.int32))

    assert refused("bfloat16") is None
    assert "uint16 are none of" in refused("uint16")
    assert "160 lanes of a page are no multiple of 128" in refused("bfloat16", H=80)
    assert "page_size=8 is no multiple of the 16 slots" in refused("bfloat16", page_size=8)
    assert "page_size=16 is no multiple of the 32 slots" in refused("int8", page_size=16)
    assert "Choose larger pages or fewer rows" in refused("bfloat16", rows=256, width=1024)
    rows = make_rows((9,), (4,), 4, page_size=4)
    with pytest.raises(ValueError, match="mosaic_tpu implementation cannot run: page_size=4"):
        paged_attention(*rows, implementation="mosaic_tpu")


def test_scales_are_asked_for():
    rows = make_rows((3,), (1,), 1, page_size=32, dtype="int8", scaled=True)
    q, new_kv, pages, *where = rows
    with pytest.raises(ValueError, match="Give ScaledPages"):
        paged_attention(q, new_kv, pages.values, *where)
    with pytest.raises(ValueError, match="Leave value_dim away"):
        paged_attention(q, new_kv, pages, *where, value_dim=8)


def test_tuned_sizes_come_before_the_rule(monkeypatch):
    shape = CallShape(
        queries=1,
        group=4,
        num_heads=8,
        page_size=32,
        lanes=256,
        table_width=64,
        dtype=jnp.dtype("bfloat16"),
    )
    by_rule = choose_blocks(shape, None)
    assert by_rule == choose_blocks(shape, "TPU v5 lite")
    # 1 MiB of pages: 8 heads x 256 lanes x 2 bytes x 256 slots.
    assert by_rule == Blocks(pages=8, queries=1)
    table = {"TPU v5 lite": {"q1 g4 k8 p32 l256 m64 bfloat16": {"pages": 16, "queries": 1}}}
    monkeypatch.setattr(mosaic_tpu.blocks, "_tuned", lambda: table)
    assert choose_blocks(shape, "TPU v5 lite") == Blocks(16, 1)
    assert choose_blocks(shape, "TPU v6 lite") == by_rule


@pytest.mark.slow
def test_equals_the_kernel_that_jax_ships():
    """A second oracle, by other hands: decode over whole pages of key and value apart."""
    oracle = pytest.importorskip("jax.experimental.pallas.ops.tpu.paged_attention")
    q, new_kv, pages, table, contexts, _ = make_rows(
        (33, 1, 64), (1, 1, 1), 1, H=128, K=2, N=8, page_size=16
    )
    rows = (q, new_kv, pages, table, contexts, jnp.ones(3, jnp.int32))
    out, after = kernel(scale=0.2)(*rows)
    k_KPSH, v_KPSH = (
        jnp.nan_to_num(after[..., lanes]).swapaxes(0, 1) for lanes in (slice(128), slice(128, 256))
    )
    mapped = jnp.minimum(table, pages.shape[0] - 1)
    with pltpu.force_tpu_interpret_mode():
        want = oracle.paged_attention(
            0.2 * q[:, 0],
            k_KPSH,
            v_KPSH,
            contexts,
            mapped[:, : table.shape[1] // 2 * 2],
            pages_per_compute_block=2,
        )
    # It rounds what it multiplies to bfloat16.
    np.testing.assert_allclose(out[:, 0], want, atol=2e-2)
