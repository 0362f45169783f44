"""Paged attention: write the new keys and values into their pages, then attend over the pages of
each row.

One file a backend; `reference` is the specification that every other is tested against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.paged_attention import cpu, mosaic_tpu, reference
from pallas_kernels.paged_attention.layout import (
    Pages,
    PageSpec,
    ScaledPages,
    copy_pages,
    from_storage,
    to_storage,
    values_of,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "PageSpec",
    "Pages",
    "ScaledPages",
    "copy_pages",
    "from_storage",
    "paged_attention",
    "to_storage",
]


def _writing_first(attend: Callable[..., Array]) -> Callable[..., tuple[Array, Pages]]:
    """The implementation that writes the new keys and values and then attends over the pages."""

    def run(q_BTNH, new_kv_BTKL, pages, *where, layer, **options):
        if new_kv_BTKL is not None:
            pages = write_kv(pages, new_kv_BTKL, *where, layer=layer)
        return attend(q_BTNH, pages, *where, layer=layer, **options), pages

    return run


# Each takes what `paged_attention` does, all of it, and returns the same.
IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Pages]]] = {
    "reference": _writing_first(reference.attend),
    "cpu": _writing_first(cpu.attend),
    "mosaic_tpu": mosaic_tpu.attend,
    # The same kernel on any platform, step by step in plain JAX: right, and slow.
    "mosaic_tpu_interpreted": functools.partial(mosaic_tpu.attend, interpret=True),
}


def paged_attention(
    q_BTNH: Array,
    new_kv_BTKL: Array | None,
    pages: Pages,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    scale: float | None = None,
    window: Array | int | None = None,
    soft_cap: float | None = None,
    sinks_N: Array | None = None,
    layer: Array | None = None,
    value_dim: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Pages]:
    """`(out_BTNH float32, pages)`: causal attention over a paged cache that first takes in the new
    tokens.

    Query t of row b stands at position `context_lens[b] - query_lens[b] + t` and sees the keys at
    positions up to its own, the last `window` of them if given. `context_lens` count the new
    tokens. Rows share nothing but the pages that their tables share; a row may read what an earlier
    row of the call writes, and not what a later one does.

    Args:
        q_BTNH: queries; query head n reads kv head n // (N / K). Those from `query_lens[b]` on are
            padding, whose output is zero.
        new_kv_BTKL: key in lanes 0:H, value in H:2H; None if the pages hold everything already.
        pages: `[P, K, p, lanes]`, or `[L, P, K, p, lanes]` with `layer`; those of int8 are
            `ScaledPages`, those of float8 may be. Donate it: it is updated in place.
        page_table_BM: int32 page ids; `num_pages` where nothing is mapped, never a negative number.
        context_lens_B, query_lens_B: int32; a row of query length 0 is left alone.
        scale: of the scores; 1/sqrt(H) if None.
        window: keys that a query sees, itself included; traced, so it may differ from layer to
            layer. Pages before the window of a row's first query may be unmapped or another's.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        sinks_N: per head, a logit that joins the softmax and takes its share to nowhere.
        layer: which of the stacked layers.
        value_dim: of a latent attention (MLA), where a slot holds one vector of H lanes that is the
            key, and whose first `value_dim` lanes are the value; `new_kv` has H lanes then, `out`
            has `value_dim`.
        implementation: a name of `IMPLEMENTATIONS`, which then runs or raises; None lets the
            platform that the program is lowered for choose.

    Raises:
        ValueError: an unknown implementation, or shapes that do not fit each other.
    """
    _check_shapes(q_BTNH, new_kv_BTKL, pages, page_table_BM, layer, value_dim)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"paged_attention implementation={implementation!r} is unknown. "
            f"Choose one of {', '.join(IMPLEMENTATIONS)}, or None."
        )
    options = dict(
        scale=q_BTNH.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        sinks_N=sinks_N,
        layer=layer,
        value_dim=value_dim,
    )
    operands = (q_BTNH, new_kv_BTKL, pages, page_table_BM, context_lens_B, query_lens_B)

    def run(name: str) -> Callable[..., tuple[Array, Pages]]:
        return functools.partial(IMPLEMENTATIONS[name], **options)

    if implementation is not None:
        return run(implementation)(*operands)
    branches = {"cpu": run("cpu"), "default": run("reference")}
    if mosaic_tpu.refusal(pages, page_table_BM) is None:
        branches["tpu"] = run("mosaic_tpu")
    return jax.lax.platform_dependent(*operands, **branches)


def _check_shapes(q_BTNH, new_kv_BTKL, pages, page_table_BM, layer, value_dim) -> None:
    B, T, N, H = q_BTNH.shape
    values = values_of(pages)
    K, lanes = values.shape[-3], values.shape[-1]
    if values.ndim != (4 if layer is None else 5):
        raise ValueError(
            f"pages has {values.ndim} axes; [P, K, p, lanes] is wanted, "
            "or [L, P, K, p, lanes] with layer."
        )
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of the {K} kv heads of the pages.")
    wanted = 2 * H if value_dim is None else H
    if lanes < wanted:
        raise ValueError(f"pages have {lanes} lanes; a head dim of {H} needs at least {wanted}.")
    if isinstance(pages, ScaledPages):
        if value_dim is not None:
            raise ValueError("ScaledPages hold a key and a value, no latent. Leave value_dim away.")
    elif values.dtype == jnp.int8:
        raise ValueError("Pages of int8 need scales. Give ScaledPages.")
    if page_table_BM.shape[0] != B:
        raise ValueError(f"page_table has {page_table_BM.shape[0]} rows; the queries have {B}.")
    if new_kv_BTKL is not None and new_kv_BTKL.shape != (B, T, K, wanted):
        raise ValueError(f"new_kv has shape {new_kv_BTKL.shape}; {(B, T, K, wanted)} is wanted.")
