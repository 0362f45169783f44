"""Plans of the scheduler -> padded numpy batches of the device programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import jax
import numpy as np

from jaxinfer.compute.sampling_state import make_sampling_state
from jaxinfer.compute.types import DecodeState
from jaxinfer.config import EngineConfig
from jaxinfer.engine.device import Chunks, Scored, Starts
from jaxinfer.sched import Chunk, Request

T = TypeVar("T")


def request_row(
    request: Request,
    config: EngineConfig,
    *,
    vocab_size: int,
    num_valid_ids: int,
    eos_ids: Sequence[int],
) -> DecodeState:
    """The one-row decode state of an admitted request: inactive, its pages mapped, its sampling
    set.
    """
    table_1M = np.full((1, config.pages_per_seq), config.cache.num_pages, np.int32)
    mapped = {index: page for index, page in enumerate(request.pages) if page is not None}
    table_1M[0, list(mapped)] = list(mapped.values())
    # A page id out of range would be clamped by the device and read another request's keys.
    assert all(0 <= page < config.cache.num_pages for page in mapped.values()), request.pages
    none = np.zeros(1, np.int32)
    return DecodeState(
        tokens_B=none,
        context_lens_B=none,
        remaining_B=none,
        page_table_BM=table_1M,
        sampling=make_sampling_state(
            [request.params],
            [request.prompt_ids],
            vocab_size=vocab_size,
            num_valid_ids=num_valid_ids,
            eos_ids=eos_ids,
            seeds=[request.seed],
            sample_index=request.sample_index,
            outputs=[request.output_ids],
        ),
    )


def prefill_batch(chunks: Sequence[Chunk], shape: tuple[int, int], num_rows: int) -> Chunks:
    """The chunks padded to `shape` (rows, tokens); padding rows are out of range, of length 0."""
    rows, tokens = shape
    batch = Chunks(
        tokens_BT=np.zeros((rows, tokens), np.int32),
        rows_B=np.full(rows, num_rows, np.int32),
        query_lens_B=np.zeros(rows, np.int32),
        context_lens_B=np.zeros(rows, np.int32),
    )
    for b, chunk in enumerate(chunks):
        batch.tokens_BT[b, : chunk.length] = chunk.request.known_ids(chunk.start, chunk.length)
        batch.rows_B[b] = chunk.request.row
        batch.query_lens_B[b] = chunk.length
        batch.context_lens_B[b] = chunk.start + chunk.length
    return batch


def start_batch(
    chunks: Sequence[Chunk],
    starts: Sequence[tuple[int, Request]],
    shape: tuple[int, int],
    *,
    num_starts: int,
    num_rows: int,
) -> Starts:
    """The (index into `chunks`, request) of `starts`, padded: each starts where that chunk ends."""
    batch = Starts(
        rows_B=np.full(num_starts, num_rows, np.int32),
        index_B=np.zeros(num_starts, np.int32),
        context_lens_B=np.zeros(num_starts, np.int32),
        max_tokens_B=np.zeros(num_starts, np.int32),
    )
    for b, (at, request) in enumerate(starts):
        chunk = chunks[at]
        batch.rows_B[b] = request.row
        batch.index_B[b] = at * shape[1] + chunk.length - 1
        batch.context_lens_B[b] = chunk.start + chunk.length
        batch.max_tokens_B[b] = request.max_total_len - request.num_known
    return batch


def copy_batch(
    copies: Sequence[tuple[int, int]], num_copies: int, num_pages: int
) -> tuple[np.ndarray, np.ndarray]:
    """`(sources, destinations)` of the pages to copy, padded with destinations out of range."""
    sources_C = np.zeros(num_copies, np.int32)
    destinations_C = np.full(num_copies, num_pages, np.int32)
    for i, (source, destination) in enumerate(copies):
        sources_C[i], destinations_C[i] = source, destination
    return sources_C, destinations_C


def map_batch(mapped: Sequence[tuple[int, int, int]], num_mapped: int, num_rows: int) -> np.ndarray:
    """int32 `[num_mapped, 3]`: the (row, index, page) of `mapped`, padded out of range."""
    entries_C3 = np.full((num_mapped, 3), num_rows, np.int32)
    entries_C3[: len(mapped)] = np.reshape(mapped, (-1, 3))
    return entries_C3


def num_scored(chunk: Chunk) -> int:
    """How many tokens of `chunk` are followed by one of the prompt that is to be scored."""
    if chunk.request.params.prompt_logprobs is None:
        return 0
    return max(min(chunk.length, len(chunk.request.prompt_ids) - 1 - chunk.start), 0)


def score_batch(chunk: Chunk, index: int, max_model_len: int) -> Scored:
    """What scores the tokens that follow those of `chunk`, whose hidden states begin at `index`."""
    prompt_ids = chunk.request.prompt_ids
    tokens_1S = np.full((1, max_model_len), -1, np.int32)
    tokens_1S[0, : len(prompt_ids)] = prompt_ids
    numbers = chunk.request.row, index, chunk.start, num_scored(chunk)
    return Scored(tokens_1S, *(np.array([number], np.int32) for number in numbers))


def no_score(max_model_len: int) -> Scored:
    """What scores nothing."""
    zero = np.zeros(1, np.int32)
    return Scored(np.full((1, max_model_len), -1, np.int32), zero, zero, zero, zero)


def decode_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of rows that decode windows are compiled for: 1, 4, 8, 16, ... `max_num_seqs`.

    A step costs what its rows cost, so a lone request must not pay for all.
    """
    sizes, size = [1], 4
    while size < max_num_seqs:
        sizes.append(size)
        size *= 2
    return (*sizes, max_num_seqs) if max_num_seqs > 1 else (1,)


def decode_batch(rows: Sequence[int], size: int, num_rows: int) -> np.ndarray:
    """The rows to decode, padded out of range to `size`."""
    return np.array([*rows, *[num_rows] * (size - len(rows))], np.int32)


def join(parts: Sequence[T]) -> T:
    """The batches of all shards as one."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
