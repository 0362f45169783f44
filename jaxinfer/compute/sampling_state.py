"""`SamplingParams` and prompts of B rows -> the `SamplingState` arrays, on the host in numpy."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxinfer.compute.types import SamplingState
from jaxinfer.config import require
from jaxinfer.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    SamplingParams,
)

_INT16_MAX = np.iinfo(np.int16).max
_INT32_MAX = np.iinfo(np.int32).max


def fresh_seed() -> int:
    """A seed from the operating system's entropy, in 0 .. 2**63 - 1."""
    return secrets.randbits(63)


def request_key(seed: int, prompt_ids: Sequence[int], sample_index: int = 0) -> np.ndarray:
    """Threefry key data of one request, uint32[2]: 64 bits of blake2b over what names its noise.

    The hash covers seed and sample index as little-endian int64, then the prompt as int32: one seed
    over many prompts draws independent noise.
    """
    numbers = np.array([seed, sample_index], "<i8").tobytes()
    digest = hashlib.blake2b(numbers + np.asarray(prompt_ids, "<i4").tobytes()).digest()
    return np.frombuffer(digest[:8], "<u4").astype(np.uint32)


def make_sampling_state(
    params: Sequence[SamplingParams],
    prompts: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    num_valid_ids: int | None = None,
    eos_ids: Iterable[int] = (),
    seeds: Sequence[int] | None = None,
    sample_index: int = 0,
    outputs: Sequence[Sequence[int]] | None = None,
) -> SamplingState:
    """The sampling state of B rows, as numpy arrays: no device is touched.

    `vocab_size` is the number of logits columns V; ids from `num_valid_ids` on are padding of the
    head and never sampled. `seeds` overrides `params[b].seed`; a row with neither takes a fresh
    seed. `outputs` are tokens that a row has produced already, as after preemption. Raises
    ValueError on ids outside the vocabulary.
    """
    num_ids = vocab_size if num_valid_ids is None else num_valid_ids
    require(
        1 <= num_ids <= vocab_size,
        f"num_valid_ids={num_ids} must be in 1 .. vocab_size={vocab_size}.",
    )
    outputs = [()] * len(params) if outputs is None else outputs
    lengths = {len(params), len(prompts), len(outputs), len(params if seeds is None else seeds)}
    require(
        len(lengths) == 1 and len(params) > 0,
        f"{len(params)} params, {len(prompts)} prompts and {len(outputs)} outputs (and seeds, if "
        "given) must be as many and at least one.",
    )
    eos_ids = tuple(eos_ids)
    for row in params:
        row.check(num_ids, eos_ids)
    seeds = [_seed(p) for p in params] if seeds is None else seeds
    bias_ids_BC, bias_BC = _bias_tables(params)

    def per_row(values: Iterable[float], dtype: type) -> np.ndarray:
        return np.array(list(values), dtype)

    arrays: dict[str, Any] = {
        "temperature_B": per_row((p.temperature for p in params), np.float32),
        "top_k_B": per_row((_top_k(p, vocab_size, num_ids) for p in params), np.int32),
        "top_p_B": per_row((p.top_p for p in params), np.float32),
        "min_p_B": per_row((p.min_p for p in params), np.float32),
        "repetition_penalty_B": per_row((p.repetition_penalty for p in params), np.float32),
        "presence_penalty_B": per_row((p.presence_penalty for p in params), np.float32),
        "frequency_penalty_B": per_row((p.frequency_penalty for p in params), np.float32),
        "bias_ids_BC": bias_ids_BC,
        "bias_BC": bias_BC,
        "num_ids_B": np.full(len(params), num_ids, np.int32),
        "has_allowed_B": per_row((p.allowed_token_ids is not None for p in params), np.bool_),
        "allowed_BU": np.stack([_pack_ids(p.allowed_token_ids or (), vocab_size) for p in params]),
        "bad_words_BCR": np.stack([_bad_words(p) for p in params]),
        "stop_ids_BC": _pad([p.stop_ids(eos_ids) for p in params], MAX_STOP_IDS),
        "min_tokens_B": per_row((min(p.min_tokens, _INT32_MAX) for p in params), np.int32),
        "asks_logprobs_B": per_row((p.logprobs is not None for p in params), np.bool_),
        "processed_logprobs_B": per_row((p.logprobs_mode == "processed" for p in params), np.bool_),
        "key_B2": np.stack(
            [request_key(seed, ids, sample_index) for seed, ids in zip(seeds, prompts, strict=True)]
        ),
        "num_output_B": per_row((len(ids) for ids in outputs), np.int32),
        "recent_BR": _pad(
            [ids[-MAX_BAD_WORD_TOKENS:] for ids in outputs], MAX_BAD_WORD_TOKENS, right=True
        ),
        "counts_BV": np.stack(
            [_counts(a, b, vocab_size) for a, b in zip(prompts, outputs, strict=True)]
        ),
    }
    return SamplingState(**arrays)


def _seed(params: SamplingParams) -> int:
    return fresh_seed() if params.seed is None else params.seed


def _top_k(params: SamplingParams, vocab_size: int, num_ids: int) -> int:
    """k in 1 .. V, where V keeps all."""
    return vocab_size if params.top_k <= 0 or params.top_k >= num_ids else params.top_k


def _pad(rows: Sequence[Sequence[int]], width: int, *, right: bool = False) -> np.ndarray:
    """int32 [len(rows), width], filled up with -1 behind each row, or before it when `right`."""
    table = np.full((len(rows), width), -1, np.int32)
    for line, row in zip(table, rows, strict=True):
        start = width - len(row) if right else 0
        line[start : start + len(row)] = row
    return table


def _bias_tables(params: Sequence[SamplingParams]) -> tuple[np.ndarray, np.ndarray]:
    ids_BC = _pad([tuple(p.logit_bias or ()) for p in params], MAX_LOGIT_BIAS)
    bias_BC = np.zeros(ids_BC.shape, np.float32)
    for line, p in zip(bias_BC, params, strict=True):
        biases = tuple((p.logit_bias or {}).values())
        line[: len(biases)] = biases
    return ids_BC, bias_BC


def _bad_words(params: SamplingParams) -> np.ndarray:
    table = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    words = [word for word in params.bad_words or () if not isinstance(word, str)]
    table[: len(words)] = _pad(words, MAX_BAD_WORD_TOKENS, right=True)
    return table


def _pack_ids(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    """uint32 [ceil(V / 32)] with the bits of `ids` set, lowest bit first."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _counts(prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> np.ndarray:
    """int16 [V]: 2 * (times in the output, saturating) + (1 if in the prompt)."""
    seen, produced = np.asarray(prompt, np.int64), np.asarray(output, np.int64)
    for name, ids in (("prompt", seen), ("output", produced)):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        require(
            outside.size == 0,
            f"The {name} holds token ids {outside[:3].tolist()} outside 0 .. {vocab_size - 1}.",
        )
    times = np.minimum(np.bincount(produced, minlength=vocab_size), _INT16_MAX // 2)
    counts = (2 * times).astype(np.int16)
    counts[seen] |= 1
    return counts
