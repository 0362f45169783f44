"""Prompts -> the `PrefillBatch` arrays of whole prompts, on the host in numpy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.compute.types import PrefillBatch
from jaxinfer.config import require


def make_prefill_batch(
    prompts: Sequence[Sequence[int]], *, max_tokens: int, page_size: int = 32
) -> PrefillBatch:
    """The prompts as one prefill, each on pages of its own with room for `max_tokens` more.

    The arrays are numpy's: no device is touched. Row b has pages `b * M .. b * M + M - 1`, so a
    cache of `page_table_BM.size` pages of `page_size` holds them all. Raises ValueError on an empty
    prompt.
    """
    lens_B = np.array([len(prompt) for prompt in prompts], np.int32)
    require(
        lens_B.size > 0 and lens_B.min() > 0,
        f"The prompts have {lens_B.tolist()} tokens; at least one prompt is needed, "
        "and a token in each.",
    )
    require(max_tokens >= 1, f"max_tokens={max_tokens} must be at least 1.")
    rows, longest = lens_B.size, int(lens_B.max())
    tokens_BT = np.zeros((rows, longest), np.int32)
    for line, prompt in zip(tokens_BT, prompts, strict=True):
        line[: len(prompt)] = prompt
    pages_per_row = -(-(longest + max_tokens) // page_size)
    table_BM = np.arange(rows * pages_per_row, dtype=np.int32).reshape(rows, pages_per_row)
    return PrefillBatch(tokens_BT, lens_B, lens_B, table_BM)
