"""Paged attention for TPU, a Pallas kernel (Mosaic): writes the new keys and values into their
pages and attends in one call, in place.

Here its operands are laid out and its buffers sized; `kernel` is what runs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.layout import (
    LANES,
    Pages,
    ScaledPages,
    quantize,
    to_storage,
    values_of,
    whole_lanes,
)
from pallas_kernels.paged_attention.mosaic_tpu.blocks import Blocks, CallShape, choose_blocks
from pallas_kernels.paged_attention.mosaic_tpu.call import Call
from pallas_kernels.paged_attention.mosaic_tpu.kernel import kernel

__all__ = ["Blocks", "attend", "refusal"]

# Half of a core's scalar memory; the rest holds the compiler's own.
TABLE_BYTES = 512 * 1024
STORED = ("float32", "bfloat16", "int8", "float8_e4m3fn")


def refusal(pages: Pages, page_table_BM: Array) -> str | None:
    """Why the compiled kernel does not take this cache, in a sentence; None if it does."""
    values = values_of(pages)
    page_size, lanes = values.shape[-2:]
    if values.dtype.name not in STORED:
        return f"pages of {values.dtype} are none of {', '.join(STORED)}. Ask PageSpec for a TPU's."
    if lanes % LANES:
        return f"{lanes} lanes of a page are no multiple of {LANES}. Ask PageSpec for a TPU's."
    slots = _sublanes(values.dtype)
    if page_size % slots:
        return (
            f"page_size={page_size} is no multiple of the {slots} slots of a tile of "
            f"{values.dtype}. Choose {slots} or a multiple."
        )
    table_bytes = 4 * page_table_BM.shape[0] * page_table_BM.shape[1]
    if table_bytes > TABLE_BYTES:
        return (
            f"a page table of {page_table_BM.shape} takes {table_bytes} bytes of scalar memory, "
            f"where {TABLE_BYTES} are free. Choose larger pages or fewer rows."
        )
    return None


def attend(
    q_BTNH: Array,
    new_kv_BTKL: Array | None,
    pages: Pages,
    page_table_BM: Array,
    context_lens_B: Array,
    query_lens_B: Array,
    *,
    scale: float,
    window: Array | int | None,
    soft_cap: float | None,
    sinks_N: Array | None,
    layer: Array | None,
    value_dim: int | None,
    blocks: Blocks | None = None,
    interpret: Any = False,
) -> tuple[Array, Pages]:
    """`(out_BTNH float32, pages)`, as the reference specifies.

    Args:
        blocks: sizes of one step; None: tuned or by rule.
        interpret: True or `pltpu.InterpretParams` to run without a TPU.

    Raises:
        ValueError: a cache that the compiled kernel does not take.
    """
    why = None if interpret else refusal(pages, page_table_BM)
    if why is not None:
        raise ValueError(f"The mosaic_tpu implementation cannot run: {why}")
    where = (page_table_BM, context_lens_B, query_lens_B)
    values, scales, new_scales_BTK2 = values_of(pages), None, None
    if isinstance(pages, ScaledPages):
        scales = pages.scales
        if new_kv_BTKL is not None:
            new_kv_BTKL, new_scales_BTK2 = quantize(new_kv_BTKL, values.dtype)
    B, T, _, H = q_BTNH.shape
    call = make_call(
        q_BTNH.shape,
        values,
        page_table_BM.shape[1],
        blocks=blocks,
        value_dim=value_dim,
        soft_cap=soft_cap,
        windowed=window is not None,
        stacked=layer is not None,
        writes=new_kv_BTKL is not None,
        sinks=sinks_N is not None,
        scaled=scales is not None,
    )
    J = -(-T // call.queries)
    K, R, key_lanes, value_width = call.num_heads, call.rows, call.key_lanes, call.value_width

    def scalar(x: Array | int | None) -> Array:
        return jnp.asarray(0 if x is None else x, jnp.int32).reshape(1)

    scalars = [scalar(layer), scalar(window), page_table_BM.reshape(-1), *where[1:]]
    in_memory = pl.BlockSpec(memory_space=pl.ANY)

    def an_items(*tile: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, K, None, *tile), lambda b, j, *_: (b, 0, j, 0, 0))

    inputs = [(_query_rows(q_BTNH * scale, call), an_items(R, key_lanes))]
    if sinks_N is not None:
        whole = pl.BlockSpec((K, R, LANES), lambda *_: (0, 0, 0))
        inputs.append((_sink_rows(sinks_N, call), whole))
    if new_kv_BTKL is not None:
        new = _new_rows(new_kv_BTKL, query_lens_B, call)
        inputs.append((new, an_items(*new.shape[-2:])))
    if new_scales_BTK2 is not None:
        new_scales = _new_scale_rows(new_scales_BTK2, query_lens_B, call)
        inputs.append((new_scales, an_items(*new_scales.shape[-2:])))
    memories = [values] if scales is None else [values, scales]
    aliases = {}
    if call.writes:
        aliases = {len(scalars) + len(inputs) + i: 1 + i for i in range(len(memories))}
    inputs += [(memory, in_memory) for memory in memories]
    outputs = [
        (jax.ShapeDtypeStruct((B, K, J, R, value_width), jnp.float32), an_items(R, value_width))
    ]
    if call.writes:
        outputs += [(jax.ShapeDtypeStruct(x.shape, x.dtype), in_memory) for x in memories]

    operands, in_specs = zip(*inputs)
    out_shape, out_specs = zip(*outputs)
    out, *written = pl.pallas_call(
        functools.partial(kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(B, J),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=_scratch(call),
        ),
        out_shape=out_shape,
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=call.vmem_bytes
        ),
        cost_estimate=_cost(call, B, T),
        interpret=interpret,
        name="paged_attention",
    )(*scalars, *operands)
    if written:
        pages = written[0] if scales is None else ScaledPages(*written)
    return _out_of_rows(out, call, T, H if value_dim is None else value_dim, value_dim), pages


def make_call(
    shape_BTNH: tuple[int, ...],
    values: Array,
    table_width: int,
    *,
    blocks: Blocks | None,
    value_dim: int | None,
    **options: Any,
) -> Call:
    """The static part of a call; `options` are the fields of `Call` that shapes do not give."""
    _, T, N, H = shape_BTNH
    P, K, page_size, lanes = values.shape[-4:]
    G = N // K
    shared: dict[str, Any] = dict(
        num_heads=K,
        page_size=page_size,
        lanes=lanes,
        table_width=table_width,
        group=G,
        dtype=jnp.dtype(values.dtype),
    )
    blocks = blocks or choose_blocks(CallShape(queries=T, **shared), _device_kind())
    queries = min(blocks.queries, T)
    value_start, value_stop = (H, 2 * H) if value_dim is None else (0, value_dim)
    dot_dtype = jnp.dtype(jnp.float32 if values.dtype == jnp.float32 else jnp.bfloat16)
    return Call(
        num_pages=P,
        pages_per_block=blocks.pages,
        key_lanes=min(lanes, whole_lanes(H)),
        # Slices begin and end at whole registers; what is too much is cut off the result.
        value_lanes=(value_start // LANES * LANES, min(lanes, whole_lanes(value_stop))),
        queries=queries,
        dot_dtype=dot_dtype,
        **shared,
        **options,
    )


def _query_rows(q_BTNH: Array, call: Call) -> Array:
    """`[B, K, J, R, key_lanes]`: per kv head and item, a row for each token and query head."""
    B, T, _, H = q_BTNH.shape
    K, Q, G = call.num_heads, call.queries, call.group
    q = jnp.pad(q_BTNH, ((0, 0), (0, -T % Q), (0, 0), (0, call.key_lanes - H)))
    q = q.reshape(B, -1, Q, K, G, call.key_lanes).transpose(0, 3, 1, 2, 4, 5)
    return q.reshape(B, K, -1, call.rows, call.key_lanes).astype(call.dot_dtype)


def _out_of_rows(out_BKJRV: Array, call: Call, T: int, dim: int, value_dim: int | None) -> Array:
    """`out_BTNH`: the inverse of `_query_rows`, and the lanes that are the value's."""
    B, K, J = out_BKJRV.shape[:3]
    start = dim - call.value_lanes[0] if value_dim is None else 0
    out = out_BKJRV[..., start : start + dim]
    out = out.reshape(B, K, J, call.queries, call.group, dim).transpose(0, 2, 3, 1, 4, 5)
    return out.reshape(B, J * call.queries, K * call.group, dim)[:, :T]


def _sink_rows(sinks_N: Array, call: Call) -> Array:
    """`[K, R, LANES]`: the sink of each row's query head, in every lane."""
    K, Q, G = call.num_heads, call.queries, call.group
    sinks = jnp.broadcast_to(sinks_N.astype(jnp.float32).reshape(K, 1, G), (K, Q, G))
    return jnp.broadcast_to(sinks.reshape(K, call.rows, 1), (K, call.rows, LANES))


def _new_rows(new_kv_BTKL: Array, query_lens_B: Array, call: Call) -> Array:
    """`[B, K, J, Q, lanes]`: the new slots, rounded as the pages round them."""
    new = to_storage(new_kv_BTKL, call.dtype).astype(call.dot_dtype)
    new_BJQKL = _new_of_items(new, query_lens_B, call)
    lanes = call.lanes - new_BJQKL.shape[-1]
    return jnp.pad(new_BJQKL, [(0, 0)] * 4 + [(0, lanes)]).transpose(0, 3, 1, 2, 4)


def _new_scale_rows(new_BTK2: Array, query_lens_B: Array, call: Call) -> Array:
    """`[B, K, J, 8, Q]`: the scales of the new keys and, below them, of the new values."""
    new_BKJ2Q = _new_of_items(new_BTK2, query_lens_B, call).transpose(0, 3, 1, 4, 2)
    return jnp.pad(new_BKJ2Q, [(0, 0)] * 3 + [(0, 8 - 2), (0, 0)])


def _new_of_items(new_BTKX: Array, query_lens_B: Array, call: Call) -> Array:
    """`[B, J, Q, K, X]`: what is new, by item.

    What is no new token is zero: in the product that moves them to their slots, NaN would spread.
    """
    B, T, *rest = new_BTKX.shape
    is_new_BT = jnp.arange(T) < query_lens_B[:, None]
    new = jnp.where(is_new_BT[..., None, None], new_BTKX, jnp.zeros((), new_BTKX.dtype))
    new = jnp.pad(new, ((0, 0), (0, -T % call.queries), (0, 0), (0, 0)))
    return new.reshape(B, -1, call.queries, *rest)


def _scratch(call: Call) -> list[Any]:
    """The buffers of the kernel, in the order of `Call.refs`."""
    K, R, page_size = call.num_heads, call.rows, call.page_size
    page = (K, page_size, call.lanes)
    scratch = [
        pltpu.VMEM((K, R, LANES), jnp.float32),
        pltpu.VMEM((K, R, LANES), jnp.float32),
        pltpu.VMEM((K, R, call.value_width), jnp.float32),
        pltpu.VMEM((2, call.pages_per_block, *page), call.dtype),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
    ]
    if call.scaled:
        scratch.append(pltpu.VMEM((2, call.pages_per_block, K, 1, call.scale_lanes), jnp.float32))
    if call.writes:
        scratch += [
            pltpu.VMEM((2, call.pages_written, *page), call.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((2,), jnp.int32),
        ]
    if call.writes and call.scaled:
        scratch.append(pltpu.VMEM((2, call.pages_written, K, 1, call.scale_lanes), jnp.float32))
    return scratch


def _cost(call: Call, B: int, T: int) -> pl.CostEstimate:
    """What the compiler is told: as if every row were as long as its page table."""
    keys = call.table_width * call.page_size
    scores = B * T * call.num_heads * call.group * keys
    lanes = call.key_lanes + call.value_width
    items = B * -(-T // call.queries)
    cache = items * keys * call.num_heads * call.lanes * call.dtype.itemsize
    ends = 4 * B * T * call.num_heads * call.group * lanes
    return pl.CostEstimate(
        flops=2 * scores * lanes, bytes_accessed=cache + ends, transcendentals=scores
    )


def _device_kind() -> str | None:
    """Of the mesh that the program is traced for; None outside of one."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.device_kind


def _sublanes(dtype: Any) -> int:
    """Rows of a whole tile of `dtype`."""
    return 32 // jnp.dtype(dtype).itemsize
