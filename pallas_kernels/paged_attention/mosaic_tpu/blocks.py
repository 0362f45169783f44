"""How much one step of the kernel takes at once: by what was tuned for the chip and the shape, else
by a rule that fits every chip.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources

import jax.numpy as jnp

MIB = 2**20
# Of one of the two buffers of pages, and of a head's scores of one step: small beside VMEM.
BUFFER_BYTES = 1 * MIB
SCORE_BYTES = 1 * MIB
MAX_KEYS = 2048
MAX_ROWS = 512
# Rows of all kv heads, whose running sums lie in VMEM from the first block to the last.
MAX_ROWS_OF_HEADS = 4096
LANES = 128


@dataclass(frozen=True)
class Blocks:
    """Sizes of one step.

    Attributes:
        pages: of one buffer; a step reads those of them that its queries see.
        queries: tokens of a row that share a step.
    """

    pages: int
    queries: int


def choose_blocks(
    *,
    device_kind: str | None,
    queries: int,
    group: int,
    num_heads: int,
    page_size: int,
    lanes: int,
    table_width: int,
    dtype: jnp.dtype,
) -> Blocks:
    """The sizes for a call of `queries` tokens a row: tuned ones if there are any for this chip."""
    key = tuning_key(
        queries=queries,
        group=group,
        num_heads=num_heads,
        page_size=page_size,
        lanes=lanes,
        table_width=table_width,
        dtype=dtype,
    )
    tuned = _tuned().get(device_kind or "", {}).get(key)
    if tuned is not None:
        return Blocks(**tuned)
    tokens = max(1, min(queries, min(MAX_ROWS, MAX_ROWS_OF_HEADS // num_heads) // group))
    rows = max(8, tokens * group)
    keys = BUFFER_BYTES // (num_heads * lanes * jnp.dtype(dtype).itemsize)
    keys = min(keys, SCORE_BYTES // (4 * rows), MAX_KEYS, table_width * page_size)
    # Whole tiles of scores: a multiple of the lanes of a register.
    keys = max(1, keys // LANES) * LANES
    return Blocks(pages=-(-keys // page_size), queries=tokens)


def tuning_key(
    *,
    queries: int,
    group: int,
    num_heads: int,
    page_size: int,
    lanes: int,
    table_width: int,
    dtype: jnp.dtype,
) -> str:
    """What a row of `tuned.json` goes by: everything of a call's shape that its speed hangs on."""
    shape = f"q{queries} g{group} k{num_heads} p{page_size} l{lanes} m{table_width}"
    return f"{shape} {jnp.dtype(dtype).name}"


@functools.cache
def _tuned() -> dict[str, dict[str, dict[str, int]]]:
    text = (
        resources.files("pallas_kernels.paged_attention.mosaic_tpu")
        .joinpath("tuned.json")
        .read_text(encoding="utf-8")
    )
    return json.loads(text)
