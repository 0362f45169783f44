"""Token ids for traced requests: random, the same in every run, alike where the trace says so."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxinfer.bench.traces import TracedRequest

# What a seed begins with, so that no block of a hash is a prompt of an index.
_ALONE, _SHARED = 0, 1


def make_prompts(
    requests: Iterable[TracedRequest], vocab_size: int, *, seed: int = 0
) -> list[np.ndarray]:
    """The prompt of each request, int32 ids below `vocab_size`.

    With prefix hashes it is the blocks of those hashes, one after the other, each a function of its
    hash alone (and of `seed`): equal hashes give equal tokens.
    """
    return [
        _ids((seed, _ALONE, index), request.num_prompt, vocab_size)
        if request.prefix_hashes is None
        else _from_hashes(request, vocab_size, seed)
        for index, request in enumerate(requests)
    ]


def _from_hashes(request: TracedRequest, vocab_size: int, seed: int) -> np.ndarray:
    assert request.prefix_hashes is not None
    size = request.tokens_per_hash
    blocks = [_ids((seed, _SHARED, one), size, vocab_size) for one in request.prefix_hashes]
    return np.concatenate(blocks)[: request.num_prompt]


def _ids(seed: tuple[int, ...], count: int, vocab_size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(vocab_size, size=count, dtype=np.int32)
