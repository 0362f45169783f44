"""The copies between memory and VMEM: pages come into one of two slots, patched ones go back."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.mosaic_tpu.call import Call
from pallas_kernels.paged_attention.mosaic_tpu.schedule import Item, Ref, Scalar, Schedule


@dataclass(frozen=True)
class Traffic:
    """The copies of a call; `refs` are the kernel's, by name."""

    call: Call
    refs: SimpleNamespace
    schedule: Schedule

    @property
    def _streams(self) -> list[tuple[Ref, Ref, Ref]]:
        """`(memory, its two slots, pages to send)`, of the pages and of their scales.

        In and out are one memory, but interpreted, only the output changes.
        """
        r, c = self.refs, self.call
        if not c.writes:
            streams = [(r.pages, r.kv, None)]
            return [*streams, (r.scales, r.kv_scales, None)] if c.scaled else streams
        streams = [(r.written, r.kv, r.patched)]
        return (
            [*streams, (r.written_scales, r.kv_scales, r.patched_scales)] if c.scaled else streams
        )

    def page_id(self, item: Item, page: Scalar) -> Scalar:
        """What the page table has for an item's page."""
        return self.refs.table[item.row * self.call.table_width + page]

    def _place(self, ref: Ref, page_id: Scalar) -> Ref:
        return ref.at[self.refs.layer[0], page_id] if self.call.stacked else ref.at[page_id]

    def _arrivals(self, item: Item, page: Scalar, place: Scalar, slot: Scalar) -> list:
        """The copies that bring one page; an unmapped entry brings any, as in the reference."""
        page_id = jnp.minimum(self.page_id(item, page), self.call.num_pages - 1)
        arrived = self.refs.arrived.at[slot]
        return [
            pltpu.make_async_copy(self._place(memory, page_id), slots.at[slot, place], arrived)
            for memory, slots, _ in self._streams
        ]

    def _sends(self, page_id: Scalar, slot: Scalar, number: Scalar) -> list:
        """The copies that write back patched page `number` of a slot."""
        sent = self.refs.sent.at[slot]
        return [
            pltpu.make_async_copy(patched.at[slot, number], self._place(memory, page_id), sent)
            for memory, _, patched in self._streams
        ]

    def fetch(self, item: Item, block: Scalar, slot: Scalar) -> None:
        """Starts to bring those pages of a block that the item sees."""

        @pl.loop(*self.schedule.pages_read(item, block))
        def _(page):
            place = page - block * self.call.pages_per_block
            for copy in self._arrivals(item, page, place, slot):
                copy.start()

    def await_fetch(self, item: Item, block: Scalar, slot: Scalar) -> None:
        """Waits for what `fetch` started."""

        @pl.loop(*self.schedule.pages_read(item, block))
        def _(page):
            place = page - block * self.call.pages_per_block
            for copy in self._arrivals(item, page, place, slot):
                copy.wait()

    def send(self, item: Item, page: Scalar, slot: Scalar, number: Scalar) -> None:
        """Starts to write back patched page `number` of a slot; drops it if it is not mapped."""
        page_id = self.page_id(item, page)

        @pl.when(page_id < self.call.num_pages)
        def _():
            for copy in self._sends(page_id, slot, number):
                copy.start()
            self.refs.in_flight[slot] += 1

    def await_sent(self, slot: Scalar) -> None:
        """Waits for all that was sent from a slot."""

        @pl.loop(0, self.refs.in_flight[slot])
        def _(_):
            # A wait goes by the size, and all pages have one.
            for copy in self._sends(0, slot, 0):
                copy.wait()

        self.refs.in_flight[slot] = 0

    def clash(self, item: Item, block: Scalar, after: Item) -> Scalar:
        """Whether the first block of the later item `after` reads what this step writes."""

        def compare(page, found):
            mine = self.page_id(item, page)
            same = lambda other, found: found | (self.page_id(after, other) == mine)  # noqa: E731
            read = self.schedule.pages_read(after, after.first_block)
            return lax.fori_loop(*read, same, found)

        written = self.schedule.pages_written(item, block)
        return lax.fori_loop(*written, compare, jnp.bool_(False))
