"""Log-probabilities as arrays, once read -> those of single tokens."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxinfer.compute.types import Logprobs
from jaxinfer.sched import TokenLogprobs


def token_logprobs(
    found: Logprobs, where: int | slice, token_ids: Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """One for each of `token_ids`, of numpy's `found[where]`, with the `num_top` most likely."""
    found = jax.tree.map(lambda leaf: leaf[where][: len(token_ids)], found)
    rows = zip(
        token_ids,
        found.chosen.tolist(),
        found.top_ids[:, :num_top].tolist(),
        found.top[:, :num_top].tolist(),
        strict=True,
    )
    return [TokenLogprobs(token, chosen, dict(zip(ids, top))) for token, chosen, ids, top in rows]
