"""Paged attention: write the new keys and values into their pages, then attend over the pages of
each row.

One file a backend; `reference` is the specification that every other is tested against.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import Array

from pallas_kernels.paged_attention import cpu, reference
from pallas_kernels.paged_attention.layout import (
    PageSpec,
    copy_pages,
    from_storage,
    to_storage,
    write_kv,
)

__all__ = [
    "IMPLEMENTATIONS",
    "PageSpec",
    "copy_pages",
    "from_storage",
    "paged_attention",
    "to_storage",
]

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": reference.attend,
    "cpu": cpu.attend,
}


def paged_attention(
    q_BTNH: Array,
    new_kv_BTKL: Array | None,
    pages: Array,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    scale: float | None = None,
    window: Array | int | None = None,
    soft_cap: float | None = None,
    sinks_N: Array | None = None,
    layer: Array | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array]:
    """`(out_BTNH float32, pages)`: causal attention over a paged cache that first takes in the new
    tokens.

    Query t of row b stands at position `context_lens[b] - query_lens[b] + t` and sees the keys at
    positions up to its own, the last `window` of them if given. `context_lens` count the new
    tokens. Rows share nothing but the pages that their tables share.

    Args:
        q_BTNH: queries; query head n reads kv head n // (N / K). Those from `query_lens[b]` on are
            padding, whose output is zero.
        new_kv_BTKL: key in lanes 0:H, value in H:2H; None if the pages hold everything already.
        pages: `[P, K, p, lanes]`, or `[L, P, K, p, lanes]` with `layer`. Donate it: it is updated
            in place.
        page_table_BM: int32 page ids; `num_pages` where nothing is mapped, never a negative number.
        context_lens_B, query_lens_B: int32; a row of query length 0 is left alone.
        scale: of the scores; 1/sqrt(H) if None.
        window: keys that a query sees, itself included; traced, so it may differ from layer to
            layer. Pages before the window of a row's first query may be unmapped or another's.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        sinks_N: per head, a logit that joins the softmax and takes its share to nowhere.
        layer: which of the stacked layers.
        implementation: a name of `IMPLEMENTATIONS`, which then runs or raises; None lets the
            platform that the program is lowered for choose.

    Raises:
        ValueError: an unknown implementation, or shapes that do not fit each other.
    """
    _check_shapes(q_BTNH, new_kv_BTKL, pages, page_table_BM, layer)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"paged_attention implementation={implementation!r} is unknown. "
            f"Choose one of {', '.join(IMPLEMENTATIONS)}, or None."
        )
    if new_kv_BTKL is not None:
        pages = write_kv(
            pages, new_kv_BTKL, page_table_BM, context_lens_B, query_lens_B, layer=layer
        )
    options = dict(
        scale=q_BTNH.shape[-1] ** -0.5 if scale is None else scale,
        window=window,
        soft_cap=soft_cap,
        sinks_N=sinks_N,
        layer=layer,
    )
    operands = (q_BTNH, pages, page_table_BM, context_lens_B, query_lens_B)
    if implementation is not None:
        return IMPLEMENTATIONS[implementation](*operands, **options), pages
    out = jax.lax.platform_dependent(
        *operands,
        cpu=functools.partial(cpu.attend, **options),
        default=functools.partial(reference.attend, **options),
    )
    return out, pages


def _check_shapes(q_BTNH, new_kv_BTKL, pages, page_table_BM, layer) -> None:
    B, T, N, H = q_BTNH.shape
    K, lanes = pages.shape[-3], pages.shape[-1]
    if pages.ndim != (4 if layer is None else 5):
        raise ValueError(
            f"pages has {pages.ndim} axes; [P, K, p, lanes] is wanted, "
            "or [L, P, K, p, lanes] with layer."
        )
    if N % K:
        raise ValueError(f"{N} query heads are not a multiple of the {K} kv heads of the pages.")
    if lanes < 2 * H:
        raise ValueError(f"pages have {lanes} lanes; a head dim of {H} needs at least {2 * H}.")
    if page_table_BM.shape[0] != B:
        raise ValueError(f"page_table has {page_table_BM.shape[0]} rows; the queries have {B}.")
    if new_kv_BTKL is not None and new_kv_BTKL.shape != (B, T, K, 2 * H):
        raise ValueError(f"new_kv has shape {new_kv_BTKL.shape}; {(B, T, K, 2 * H)} is wanted.")
