"""What a request gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.sched import Request, TokenLogprobs


@dataclass(frozen=True)
class RequestMetrics:
    """How a request went, in seconds; None where it did not come that far.

    Attributes:
        queue_s: from arrival until it was first scheduled.
        ttft_s: time to first token of the first sample, from arrival until the host had it.
        tpot_s: time per output token after the first; of several samples the mean.
        total_s: from arrival until the last token of all so far.
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float | None

    @classmethod
    def of(cls, samples: Sequence[Request]) -> RequestMetrics:
        """Those of the requests of one prompt so far."""
        first, tpots = samples[0].times, [tpot for tpot in map(_tpot_s, samples) if tpot]
        ends = [request.times.last_token for request in samples]
        return cls(
            queue_s=_since(first.arrival, first.first_scheduled),
            ttft_s=_since(first.arrival, first.first_token),
            tpot_s=sum(tpots) / len(tpots) if tpots else None,
            total_s=_since(first.arrival, max((end for end in ends if end), default=None)),
        )


def _since(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _tpot_s(request: Request) -> float | None:
    decoding = _since(request.times.first_token, request.times.last_token)
    num_steps = len(request.output_ids) - 1
    return decoding / num_steps if decoding and num_steps > 0 else None


@dataclass(frozen=True)
class CompletionOutput:
    """One sample of a request.

    Attributes:
        token_ids: all so far, the EOS or stop token that ended them included.
        text: what they say, without it.
        text_delta: what the newest tokens added to the text.
        finish_reason: "stop", "length", "cancelled" or "error"; None while it goes on.
        logprobs: one for each of `token_ids`; None if not asked for.
    """

    token_ids: tuple[int, ...]
    text: str
    text_delta: str
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request so far: a snapshot while it streams, the whole once it is over.

    Attributes:
        prompt: the text that was asked, None if token ids were.
        seed: with the same prompt and parameters it repeats the draws.
        cached_tokens: prompt tokens whose keys and values were not computed anew.
        outputs: one per sample, `SamplingParams.n` of them.
        prompt_logprobs: one for each of `prompt_token_ids`, None for the first; None if not asked
            for.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    seed: int
    cached_tokens: int
    metrics: RequestMetrics
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
