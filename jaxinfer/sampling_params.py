"""`SamplingParams`: what one request asks of the sampler. Every field is applied or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxinfer.config import require

# Widths of the per-row tables on the device. A request that needs more is refused, never cut.
MAX_LOGIT_BIAS = 512
MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8
MAX_STOP_IDS = 32


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples; each field may differ from row to row of a batch at no cost.

    The order is fixed: logit_bias and allowed/bad tokens -> penalties -> min_tokens -> temperature ->
    top_k -> top_p (of what top_k left, renormalised) -> min_p -> draw.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (lowest id on ties).
        top_k: keep the k most likely; 0, -1 and anything from the vocabulary's size up keep all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens with at least min_p times the probability of the most likely one.
        repetition_penalty: tokens of prompt or output: positive logits divided by it, others multiplied.
        presence_penalty: subtracted once from the logit of each token of the output.
        frequency_penalty: subtracted from it once per occurrence in the output.
        logit_bias: token id -> number added to its logit.
        allowed_token_ids: only these may be sampled.
        bad_words: words that may not be completed in the output: strings, or token-id sequences.
        max_tokens: most tokens to generate. A request also ends when max_model_len is reached.
        min_tokens: tokens to generate before one of the stop ids may be sampled.
        stop: strings that end the text (reserved: refused so far).
        stop_token_ids: ids that end the output, besides the model's own EOS.
        ignore_eos: go on past the model's own EOS.
        seed: makes the draws a function of (seed, prompt, sample index, position); None takes a fresh one.
        n, logprobs, prompt_logprobs, logprobs_mode: reserved: refused so far unless at their defaults.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"

    # __post_init__ validates: to be completed with the sampling part.
