"""The pytrees that the steps take and return.

Dimension key: B sequences, T query tokens, S key/value tokens, N query heads, K kv heads, G = N/K,
H head dim, D model, F ffn, V vocabulary, L layers, P pages, p slots per page, M pages per sequence,
W steps of a window, C entries of a capped table, R newest output ids, U = ceil(V / 32) words of
bits, X some of V.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")
# On the device or traced; or numpy's, on its way there.
Array = Any


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """The frozen dataclass `cls` registered as a pytree, every field of it data."""
    cls = dataclass(frozen=True)(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])


@pytree
class KVCache:
    """The pages of every layer.

    `pages` is a tuple of L arrays `[P, K, p, lanes]` (layers unrolled) or one `[L, P, K, p, lanes]`
    (layers scanned). The layout of a page belongs to `pallas_kernels.paged_attention`.
    """

    pages: tuple[Array, ...] | Array


@pytree
class PrefillBatch:
    """One chunk of the prompt of each of B sequences, padded to T tokens.

    Row b holds tokens `context_lens_B[b] - query_lens_B[b] .. context_lens_B[b] - 1` of its
    sequence; a row with `query_lens_B[b] == 0` is padding. Entries of the page table that no token
    reaches hold `num_pages`.
    """

    tokens_BT: Array  # int32
    query_lens_B: Array  # int32
    context_lens_B: Array  # int32
    page_table_BM: Array  # int32


@pytree
class SamplingState:
    """What the sampler knows of B rows: their parameters and what they have produced.

    Unused entries of id tables hold -1. `allowed_BU` packs the vocabulary 32 ids to a word, lowest
    bit first, and counts only where `has_allowed_B`. Columns of the head from `num_ids_B` on are
    padding and are never sampled.
    """

    temperature_B: Array  # float32; 0 is greedy
    top_k_B: Array  # int32 in 1..V; V is off
    top_p_B: Array  # float32
    min_p_B: Array  # float32
    repetition_penalty_B: Array  # float32
    presence_penalty_B: Array  # float32
    frequency_penalty_B: Array  # float32
    bias_ids_BC: Array  # int32
    bias_BC: Array  # float32
    num_ids_B: Array  # int32 in 1..V, ids that the tokenizer has
    has_allowed_B: Array  # bool
    allowed_BU: Array  # uint32, U = ceil(V / 32)
    bad_words_BCR: Array  # int32; right-aligned: the last id of each word stands last
    stop_ids_BC: Array  # int32
    min_tokens_B: Array  # int32
    asks_logprobs_B: Array  # bool
    processed_logprobs_B: Array  # bool; of the distribution that is sampled from, not of raw logits
    key_B2: Array  # uint32, threefry key data of (seed, prompt, sample index)
    num_output_B: Array  # int32, tokens generated so far
    recent_BR: Array  # int32, the last R output ids, the newest last; -1 before the first
    counts_BV: Array  # int16: 2 * (times in the output, saturating) + (1 if in the prompt)


@pytree
class DecodeState:
    """Everything that decoding B rows needs; stays on the device, donated from step to step.

    A row is active while `remaining_B > 0`. `tokens_B` is the newest token, not yet in the cache,
    at position `context_lens_B`.
    """

    tokens_B: Array  # int32
    context_lens_B: Array  # int32, tokens in the cache
    remaining_B: Array  # int32, tokens still to generate
    page_table_BM: Array  # int32
    sampling: SamplingState


@pytree
class Logprobs:
    """Log-probabilities of tokens `[...]`, and the C most likely ones in the place of each.

    C is the static `max_logprobs`; the most likely comes first, of equals the lower id.
    """

    chosen: Array  # float32 [...]
    top_ids: Array  # int32 [..., C]
    top: Array  # float32 [..., C]


@pytree
class StepOutput:
    """What a step sampled.

    `tokens_BW` holds -1 where a row produced nothing. `logits_BV` (float32, raw) and `logprobs`
    ([B, W], which mean nothing for rows that did not ask) are None unless asked for.
    """

    tokens_BW: Array  # int32
    logits_BV: Array | None = None
    logprobs: Logprobs | None = None
