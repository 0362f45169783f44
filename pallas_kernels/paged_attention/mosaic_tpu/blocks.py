"""How much one step of the kernel takes at once: by what was tuned for the chip and the shape, else
by a rule that fits every chip.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import LANES

MIB = 2**20
# Of one of the two buffers of pages, and of a head's scores of one step: small beside VMEM.
BUFFER_BYTES = 1 * MIB
SCORE_BYTES = 1 * MIB
MAX_KEYS = 2048
MAX_ROWS = 512
# Rows of all kv heads, whose running sums lie in VMEM from the first block to the last.
MAX_ROWS_OF_HEADS = 4096


@dataclass(frozen=True)
class Blocks:
    """Sizes of one step.

    Attributes:
        pages: of one buffer; a step reads those of them that its queries see.
        queries: tokens of a row that share a step.
    """

    pages: int
    queries: int


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """Everything of a call's shape that its speed hangs on.

    Attributes:
        queries: tokens of a row; group: query heads of a kv head.
        table_width: pages of a row at most.
        dtype: of the pages.
    """

    queries: int
    group: int
    num_heads: int
    page_size: int
    lanes: int
    table_width: int
    dtype: jnp.dtype

    @property
    def key(self) -> str:
        """What a row of `tuned.json` goes by."""
        return (
            f"q{self.queries} g{self.group} k{self.num_heads} p{self.page_size} l{self.lanes} "
            f"m{self.table_width} {jnp.dtype(self.dtype).name}"
        )


def choose_blocks(shape: CallShape, device_kind: str | None) -> Blocks:
    """The sizes for a call of that shape: tuned ones if there are any for this chip."""
    tuned = _tuned().get(device_kind or "", {}).get(shape.key)
    if tuned is not None:
        return Blocks(**tuned)
    most_rows = min(MAX_ROWS, MAX_ROWS_OF_HEADS // shape.num_heads)
    tokens = max(1, min(shape.queries, most_rows // shape.group))
    rows = max(8, tokens * shape.group)
    keys = BUFFER_BYTES // (shape.num_heads * shape.lanes * jnp.dtype(shape.dtype).itemsize)
    keys = min(keys, SCORE_BYTES // (4 * rows), MAX_KEYS, shape.table_width * shape.page_size)
    # Whole tiles of scores: a multiple of the lanes of a register.
    keys = max(1, keys // LANES) * LANES
    return Blocks(pages=-(-keys // shape.page_size), queries=tokens)


@functools.cache
def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    text = (
        resources.files("pallas_kernels.paged_attention.mosaic_tpu")
        .joinpath("tuned.json")
        .read_text(encoding="utf-8")
    )
    return json.loads(text)
