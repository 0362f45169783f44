"""One case table that every implementation must pass against a dense float64 softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    IMPLEMENTATIONS,
    PageSpec,
    from_storage,
    paged_attention,
    to_storage,
)

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
HERE = [name for name in IMPLEMENTATIONS if name != "mosaic_tpu"]  # which runs on a TPU alone
# Nothing here is worth the optimising of, and an interpreted kernel is a large program.
QUICKLY = {"xla_backend_optimization_level": 0}


def compiled(implementation, **options):
    """`paged_attention` of one implementation, jitted."""
    call = functools.partial(paged_attention, implementation=implementation, **options)
    return jax.jit(call, compiler_options=QUICKLY)


def platform_of(implementation):
    """The platform whose pages an implementation takes."""
    return "tpu" if implementation.startswith("mosaic_tpu") else "cpu"


def dense(q_TNH, k_SKH, v_SKH, first, *, scale, window, soft_cap, sinks_N):
    """float64 attention of one row's queries, which start at position `first`, over its keys."""
    T, N, _ = q_TNH.shape
    K = k_SKH.shape[1]
    out = np.zeros(q_TNH.shape)
    for t in range(T):
        position = first + t
        low = 0 if window is None else max(0, position - window + 1)
        for n in range(N):
            kv_head = n // (N // K)
            s = k_SKH[low : position + 1, kv_head] @ q_TNH[t, n] * scale
            if soft_cap is not None:
                s = soft_cap * np.tanh(s / soft_cap)
            top = max(s.max(), -np.inf if sinks_N is None else sinks_N[n])
            w = np.exp(s - top)
            total = w.sum() + (0 if sinks_N is None else np.exp(sinks_N[n] - top))
            out[t, n] = w @ v_SKH[low : position + 1, kv_head] / total
    return out


def make_case(
    *,
    contexts,
    queries,
    T,
    N=4,
    K=2,
    H=16,
    page_size=4,
    dtype="float32",
    seed=0,
    implementation="reference",
):
    """Random rows in permuted pages, everything unused poisoned with NaN."""
    rng = np.random.default_rng(seed)
    B, M = len(contexts), max(-(-c // page_size) for c in contexts) + 1
    num_pages = B * M + 3
    spec = PageSpec.of(K, page_size, H, dtype, platform_of(implementation))
    round_ = lambda a: np.asarray(jnp.asarray(a, dtype)).astype(np.float64)  # noqa: E731
    kv = [round_(rng.standard_normal((c, K, 2 * H))) for c in contexts]
    q = round_(rng.standard_normal((B, T, N, H)))
    order = iter(rng.permutation(num_pages))
    table = np.full((B, M), num_pages, np.int32)
    pages = np.full(spec.shape(num_pages), np.nan)
    new_kv = np.full((B, T, K, 2 * H), np.nan)
    for b, (context, query) in enumerate(zip(contexts, queries)):
        for m in range(-(-context // page_size)):
            table[b, m] = next(order)
        for s in range(context - query):
            pages[table[b, s // page_size], :, s % page_size] = 0
            pages[table[b, s // page_size], :, s % page_size, : 2 * H] = kv[b][s]
        new_kv[b, :query] = kv[b][context - query :]
    stored = to_storage(jnp.asarray(pages, jnp.float32), spec.dtype)
    arrays = (
        jnp.asarray(q, dtype),
        jnp.asarray(new_kv, dtype),
        stored,
        jnp.asarray(table),
        jnp.asarray(contexts, jnp.int32),
        jnp.asarray(queries, jnp.int32),
    )
    return arrays, q, kv


CASES = {
    "decode": dict(contexts=(1, 3, 0, 4, 5, 8, 17), queries=(1, 1, 0, 1, 1, 1, 1), T=1),
    "chunks": dict(contexts=(5, 16, 1, 9, 33, 20), queries=(5, 16, 1, 4, 16, 0), T=16),
    "few": dict(contexts=(9, 33, 20), queries=(5, 2, 1), T=5),
    "group of 1": dict(contexts=(6, 2), queries=(1, 1), T=1, N=2, K=2),
    "group of 3": dict(contexts=(6, 2), queries=(2, 2), T=2, N=9, K=3),
    "group of 16": dict(contexts=(6, 21), queries=(1, 1), T=1, N=16, K=1),
    "page of 1": dict(contexts=(6, 2), queries=(1, 2), T=2, page_size=1),
    "tiles": dict(contexts=(300, 140), queries=(200, 130), T=200, H=8, page_size=16),
    "groups": dict(contexts=(700, 512, 513), queries=(1, 1, 1), T=1, H=8, page_size=32),
}
OPTIONS = {
    "plain": {},
    "scale": dict(scale=0.3),
    "window": dict(window=5),
    "soft cap": dict(soft_cap=2.0),
    "sinks": dict(sinks=True),
    "everything": dict(scale=0.4, window=4, soft_cap=3.0, sinks=True),
}


# Every case with everything, and the telling ones with each option by itself.
PAIRS = [(case, "everything") for case in CASES] + [("chunks", "plain")]
MORE = [("decode", "plain"), ("tiles", "plain"), ("groups", "plain")]
MORE += [("chunks", option) for option in OPTIONS if option not in ("everything", "plain")]


def each_here(ordinary, more):
    """The parameters (implementation, *case): interpreted kernels, which compile for seconds, take
    those of `more` only in the slow sweep.
    """
    marked = []
    for name in HERE:
        for case in (*ordinary, *more):
            slow = name.endswith("interpreted") and case in more
            parts = case if isinstance(case, tuple) else (case,)
            marked.append(pytest.param(name, *parts, marks=[pytest.mark.slow] * slow))
    return marked


@pytest.mark.parametrize("implementation, case, option", each_here(PAIRS, MORE))
def test_equals_dense(implementation, case, option):
    options = dict(OPTIONS[option])
    arrays, q, kv = make_case(**CASES[case], implementation=implementation)
    N = q.shape[2]
    sinks = np.linspace(-1, 2, N) if options.pop("sinks", False) else None
    sinks_N = None if sinks is None else jnp.asarray(sinks, jnp.float32)
    out, _ = compiled(implementation, **options, sinks_N=sinks_N)(*arrays)
    spec = dict(scale=q.shape[-1] ** -0.5, window=None, soft_cap=None) | options
    for b, (context, query) in enumerate(
        zip(CASES[case]["contexts"], CASES[case]["queries"], strict=True)
    ):
        H = q.shape[-1]
        want = dense(
            q[b, :query], kv[b][..., :H], kv[b][..., H:], context - query, sinks_N=sinks, **spec
        )
        np.testing.assert_allclose(out[b, :query], want, atol=TOLERANCE["float32"], rtol=0)
        assert not np.asarray(out[b, query:]).any()


@pytest.mark.parametrize("implementation, case", each_here(["decode"], ["chunks", "tiles"]))
def test_bfloat16(implementation, case):
    arrays, q, kv = make_case(**CASES[case], dtype="bfloat16", implementation=implementation)
    as_bits = platform_of(implementation) == "cpu"
    assert arrays[2].dtype == (jnp.uint16 if as_bits else jnp.bfloat16)
    out, _ = compiled(implementation)(*arrays)
    H = q.shape[-1]
    for b, (context, query) in enumerate(
        zip(CASES[case]["contexts"], CASES[case]["queries"], strict=True)
    ):
        want = dense(
            q[b, :query],
            kv[b][..., :H],
            kv[b][..., H:],
            context - query,
            scale=H**-0.5,
            window=None,
            soft_cap=None,
            sinks_N=None,
        )
        np.testing.assert_allclose(out[b, :query], want, atol=TOLERANCE["bfloat16"], rtol=0)


@pytest.mark.parametrize("implementation, dtype", each_here(["bfloat16"], ["float32"]))
def test_writes_only_the_new_slots(dtype, implementation):
    lens = dict(contexts=(9, 33, 20), queries=(4, 16, 0), T=16)
    arrays, q, kv = make_case(**lens, dtype=dtype, implementation=implementation)
    before, table, lanes = np.asarray(arrays[2]), np.asarray(arrays[3]), 2 * q.shape[-1]
    _, pages = compiled(implementation)(*arrays)
    written = np.zeros(before.shape[:3], bool)
    values = np.asarray(from_storage(pages)).astype(np.float64)
    for b, (context, query) in enumerate(((9, 4), (33, 16), (20, 0))):
        for s in range(context - query, context):
            written[table[b, s // 4], :, s % 4] = True
            np.testing.assert_array_equal(values[table[b, s // 4], :, s % 4, :lanes], kv[b][s])
    after = np.asarray(pages)
    bits = np.uint16 if dtype == "bfloat16" else np.uint32
    np.testing.assert_array_equal(after.view(bits)[~written], before.view(bits)[~written])


@pytest.mark.parametrize("implementation", HERE)
def test_unmapped_entries_never_change_a_page(implementation):
    """An entry of `num_pages` is dropped; -1 would have written the last page."""
    arrays, *_ = make_case(contexts=(9,), queries=(4,), T=4, implementation=implementation)
    q, new_kv, pages, table, contexts, queries = arrays
    unmapped = jnp.full_like(table, pages.shape[0])
    _, after = compiled(implementation)(q, new_kv, pages, unmapped, contexts, queries)
    np.testing.assert_array_equal(
        np.asarray(after).view(np.uint32), np.asarray(pages).view(np.uint32)
    )


@pytest.mark.parametrize("implementation", HERE)
def test_a_stacked_cache_gives_the_layer_asked_for(implementation):
    lens = dict(contexts=(9, 33), queries=(4, 16), T=16)
    arrays, *_ = make_case(**lens, implementation=implementation)
    q, new_kv, pages, *rest = arrays
    attend = compiled(implementation)
    out, alone = attend(*arrays)
    stacked = jnp.stack([jnp.full_like(pages, jnp.nan), pages, jnp.zeros_like(pages)])
    got, after = attend(q, new_kv, stacked, *rest, layer=jnp.int32(1))
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(after[1], alone)
    assert np.isnan(after[0]).all() and not np.asarray(after[2]).any()


@pytest.mark.parametrize("implementation, window", each_here([5], [4]))
def test_window_is_exact_in_every_phase(implementation, window):
    """Query i sees keys max(0, i - W + 1)..i: whole, in chunks and one by one, at every length
    1..40.
    """
    lens = dict(contexts=(40,), queries=(40,), T=40)
    arrays, q, kv = make_case(**lens, seed=3, implementation=implementation)
    _, new_kv, pages, table, *_ = arrays
    H = q.shape[-1]
    want = dense(
        q[0],
        kv[0][..., :H],
        kv[0][..., H:],
        0,
        scale=H**-0.5,
        window=window,
        soft_cap=None,
        sinks_N=None,
    )
    attend = compiled(implementation)

    def cut(array, start, n, width):
        return jnp.pad(array[:, start : start + n], ((0, 0), (0, width - n), (0, 0), (0, 0)))

    for chunk in (40, 7, 1):
        cache = pages
        for start in range(0, 40, chunk):
            n = min(chunk, 40 - start)
            q, kv_part = (cut(array, start, n, chunk) for array in (arrays[0], new_kv))
            lens = jnp.array([start + n]), jnp.array([n])
            out, cache = attend(q, kv_part, cache, table, *lens, window=jnp.int32(window))
            np.testing.assert_allclose(out[0, :n], want[start : start + n], atol=2e-5)


@pytest.mark.parametrize("implementation", HERE)
@pytest.mark.parametrize("mapped", [True, False])
def test_pages_behind_the_window_may_be_gone(implementation, mapped):
    """Unmapped, or in the hands of another row that has filled them with NaN."""
    lens = dict(contexts=(33, 20), queries=(4, 1), T=4)
    arrays, *_ = make_case(**lens, implementation=implementation)
    q, new_kv, pages, table, contexts, queries = arrays
    attend = compiled(implementation, window=6)
    want, _ = attend(*arrays)
    # The first queries stand at 29 and 19 and see keys from 24 and 14 on, of pages 6 and 3.
    gone = np.zeros(table.shape, bool)
    gone[0, :6] = gone[1, :3] = True
    pages = pages.at[np.asarray(table)[gone]].set(jnp.nan)
    if not mapped:
        table = jnp.where(gone, pages.shape[0], table)
    got, _ = attend(q, new_kv, pages, table, contexts, queries)
    np.testing.assert_array_equal(got, want)


def test_the_platform_chooses_when_nothing_is_named():
    arrays, *_ = make_case(**CASES["chunks"])
    out, pages = jax.jit(paged_attention)(*arrays)
    named = functools.partial(paged_attention, implementation="cpu")
    want, want_pages = jax.jit(named)(*arrays)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(pages, want_pages)


def test_wrong_use_is_refused_with_the_reason():
    arrays, *_ = make_case(contexts=(3,), queries=(1,), T=1)
    with pytest.raises(ValueError, match="'cuda' is unknown. Choose one of reference, cpu, m"):
        paged_attention(*arrays, implementation="cuda")
    with pytest.raises(ValueError, match="4 axes"):
        paged_attention(*arrays, layer=jnp.int32(0))
    with pytest.raises(ValueError, match="32 lanes; a head dim of 32 needs at least 64"):
        paged_attention(jnp.zeros((1, 1, 4, 32)), *arrays[1:])
    with pytest.raises(ValueError, match="3 query heads are not a multiple of the 2 kv heads"):
        paged_attention(jnp.zeros((1, 1, 3, 16)), *arrays[1:])
