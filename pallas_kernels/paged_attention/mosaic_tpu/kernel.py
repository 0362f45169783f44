"""The kernel: one row's block of queries per grid step, its pages streamed through two slots.

Work is a sequence of steps; a step is one block of pages of one item. While a step computes, the
pages of the next one, of the same item or of a later one, are on their way into the other slot.
New keys and values are put into their pages in VMEM before a step computes, and the pages go back
to memory while it does.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention.mosaic_tpu.call import Call
from pallas_kernels.paged_attention.mosaic_tpu.schedule import Item, Scalar, Schedule
from pallas_kernels.paged_attention.mosaic_tpu.traffic import Traffic

MASKED = -1e30
# The running maximum starts above what is masked, so that exp(MASKED - maximum) is zero.
LOWEST = -1e29
UNROLLED_HEADS = 8


def kernel(*refs, call: Call) -> None:
    """One item: the queries `j * queries ...` of row b, over as many blocks as they see."""
    r = SimpleNamespace(**dict(zip(call.refs, refs, strict=True)))
    per_row = pl.num_programs(1)
    index, num_items = pl.program_id(0) * per_row + pl.program_id(1), pl.num_programs(0) * per_row
    schedule = Schedule(call, r.contexts, r.query_lens, r.window, per_row, num_items)
    traffic = Traffic(call, r, schedule)

    @pl.when(index == 0)
    def _():
        _begin(call, r)
        first = schedule.next_item(index)

        @pl.when(first < num_items)
        def _():
            item = schedule.item(first)
            traffic.fetch(item, item.first_block, 0)

    busy = schedule.has_queries(index)

    @pl.when(~busy)
    def _():
        r.out[...] = jnp.zeros_like(r.out)

    @pl.when(busy)
    def _():
        item, following = schedule.item(index), schedule.next_item(index + 1)
        is_last, after = following == num_items, schedule.item(following)
        first_slot = r.slot[0]
        _start_softmax(call, r)

        @pl.loop(item.first_block, item.end_block)
        def _(block):
            slot = lax.rem(first_slot + block - item.first_block, 2)
            other = 1 - slot
            ends = block + 1 == item.end_block
            coming = item.or_else(after, ends)
            coming_block = jnp.where(ends, after.first_block, block + 1)
            comes, clash = ~(ends & is_last), jnp.bool_(False)
            if call.writes:
                traffic.await_sent(other)
                clash = ends & comes & traffic.clash(item, block, after)

            @pl.when(comes & ~clash)
            def _():
                traffic.fetch(coming, coming_block, other)

            traffic.await_fetch(item, block, slot)
            if call.writes:
                _patch(call, r, traffic, item, block, slot)

                @pl.when(clash)
                def _():
                    traffic.await_sent(slot)
                    traffic.fetch(coming, coming_block, other)

            _clean(call, r, item, block, slot)
            _attend(call, r, item, block, slot)

        r.slot[0] = lax.rem(first_slot + item.end_block - item.first_block, 2)
        if call.writes:

            @pl.when(is_last)
            def _():
                traffic.await_sent(1 - r.slot[0])

        def finish(h) -> None:
            total = r.total[h][:, :1]
            r.out[h] = r.sum[h] / jnp.where(total == 0, 1.0, total)

        _each_head(call, finish)


def _begin(call: Call, r: SimpleNamespace) -> None:
    """Before the first item: nothing is in flight, and no NaN is in what no page will fill."""
    r.kv[...] = jnp.zeros_like(r.kv)
    if call.scaled:
        r.kv_scales[...] = jnp.zeros_like(r.kv_scales)
    r.slot[0] = 0
    if call.writes:
        r.in_flight[0] = r.in_flight[1] = 0


def _start_softmax(call: Call, r: SimpleNamespace) -> None:
    """Before the first block: nothing seen, or the sinks alone."""
    if call.sinks:
        r.top[...] = r.sinks[...]
        r.total[...] = jnp.ones_like(r.total)
    else:
        r.top[...] = jnp.full_like(r.top, LOWEST)
        r.total[...] = jnp.zeros_like(r.total)
    r.sum[...] = jnp.zeros_like(r.sum)


def _positions(call: Call, page: Scalar, shape: tuple[int, ...], axis: int) -> jax.Array:
    return page * call.page_size + lax.broadcasted_iota(jnp.int32, shape, axis)


def _patch(call: Call, r, traffic: Traffic, item: Item, block: Scalar, slot: Scalar) -> None:
    """Puts the new tokens of a block into its pages, and sends those to memory."""
    low, high = traffic.schedule.pages_written(item, block)

    @pl.loop(low, high)
    def _(page):
        place, number = page - block * call.pages_per_block, page - low
        # Row s of the product is the new token that belongs into slot s of the page.
        shape = (call.page_size, r.new.shape[-2])
        token = _positions(call, page, shape, 0) - item.start
        select = token == lax.broadcasted_iota(jnp.int32, shape, 1)
        position = _positions(call, page, (call.page_size, call.lanes), 0)
        is_new = (position >= item.start) & (position < item.stop)
        is_seen = (position >= item.low) & (position < item.stop)

        def one_head(h) -> None:
            fresh = _dot(select.astype(call.dot_dtype), r.new[h], (1, 0))
            page_SL = jnp.where(is_new, fresh, r.kv[slot, place, h].astype(jnp.float32))
            r.patched[slot, number, h] = page_SL.astype(call.dtype)
            r.kv[slot, place, h] = jnp.where(is_seen, page_SL, 0.0).astype(call.dtype)

        _each_head(call, one_head)
        if call.scaled:
            _patch_scales(
                call, r, item, page, r.kv_scales.at[slot, place], r.patched_scales.at[slot, number]
            )
        traffic.send(item, page, slot, number)


def _patch_scales(call: Call, r, item: Item, page: Scalar, kept, patched) -> None:
    """Puts the new tokens' scales into those of a page: of slot s in lanes s and p + s."""
    p, shape = call.page_size, (r.new_scales.shape[-1], call.scale_lanes)
    slot = item.start - page * p + lax.broadcasted_iota(jnp.int32, shape, 0)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    inside = (slot >= 0) & (slot < p)
    to_key, to_value = [(inside & (lane == at)).astype(jnp.float32) for at in (slot, p + slot)]
    lane = lax.broadcasted_iota(jnp.int32, (1, call.scale_lanes), 1)
    position = page * p + jnp.where(lane < p, lane, lane - p)
    is_new = (position >= item.start) & (position < item.stop) & (lane < 2 * p)

    def one_head(h) -> None:
        new = r.new_scales[h]
        fresh = _dot(new, to_key, (1, 0))[:1] + _dot(new, to_value, (1, 0))[1:2]
        kept[h] = patched[h] = jnp.where(is_new, fresh, kept[h])

    _each_head(call, one_head)


def _clean(call: Call, r, item: Item, block: Scalar, slot: Scalar) -> None:
    """Zeroes the slots that nothing sees in pages that are partly seen: 0 * NaN is NaN."""
    edges = []
    if call.windowed:
        edges.append((item.first_page, lax.rem(item.low, call.page_size) != 0))
    if not call.writes:
        edges.append((item.end_page - 1, lax.rem(item.stop, call.page_size) != 0))
    for page, partly in edges:

        @pl.when(partly & (lax.div(page, call.pages_per_block) == block))
        def _(page=page):
            place = page - block * call.pages_per_block
            page_KSL = r.kv[slot, place].astype(jnp.float32)
            position = _positions(call, page, page_KSL.shape, 1)
            is_seen = (position >= item.low) & (position < item.stop)
            r.kv[slot, place] = jnp.where(is_seen, page_KSL, 0.0).astype(call.dtype)


def _attend(call: Call, r, item: Item, block: Scalar, slot: Scalar) -> None:
    """Takes a block of pages into the running softmax of the item."""
    shape, p = (call.rows, call.keys), call.page_size
    key = block * call.keys + lax.broadcasted_iota(jnp.int32, shape, 1)
    query = item.start
    if call.queries > 1:
        query += lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(call.group))
    seen = (key <= query) & (query < item.stop)
    if call.windowed:
        seen &= key > query - r.window[0]

    def one_head(h) -> None:
        kv = r.kv[slot, :, h].reshape(call.keys, call.lanes).astype(call.dot_dtype)
        scores = _dot(r.q[h], kv[:, : call.key_lanes], (1, 1))
        if call.scaled:
            scores *= _in_a_row(r.kv_scales[slot, :, h, 0, :p])
        if call.soft_cap is not None:
            scores = call.soft_cap * jnp.tanh(scores / call.soft_cap)
        scores = jnp.where(seen, scores, MASKED)
        old_top = r.top[h][:, :1]
        top = jnp.maximum(old_top, scores.max(-1, keepdims=True))
        weights, shrink = jnp.exp(scores - top), jnp.exp(old_top - top)
        total = r.total[h][:, :1] * shrink + weights.sum(-1, keepdims=True)
        r.top[h] = jnp.broadcast_to(top, r.top.shape[1:])
        r.total[h] = jnp.broadcast_to(total, r.total.shape[1:])
        if call.scaled:  # and where nothing is seen, the scale too may be NaN
            weights = jnp.where(
                seen, weights * _in_a_row(r.kv_scales[slot, :, h, 0, p : 2 * p]), 0.0
            )
        values = kv[:, slice(*call.value_lanes)]
        r.sum[h] = r.sum[h] * shrink + _dot(weights.astype(call.dot_dtype), values, (1, 0))

    _each_head(call, one_head)


def _each_head(call: Call, do) -> None:
    """Calls `do(h)` for every kv head: in a loop if there are many, which compiles sooner."""
    if call.num_heads > UNROLLED_HEADS:
        pl.loop(0, call.num_heads)(do)
    else:
        for h in range(call.num_heads):
            do(h)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """`a` times `b` over one axis of each, float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _in_a_row(scales: jax.Array) -> jax.Array:
    """`[1, keys]` of the scales `[pages, p]` of a block."""
    return jnp.concatenate([scales[i : i + 1] for i in range(scales.shape[0])], axis=1)
