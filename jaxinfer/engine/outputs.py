"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.sched import Request, TokenLogprobs


@dataclass(frozen=True)
class RequestMetrics:
    """How a request went, in seconds; None where it did not come that far.

    Attributes:
        queue_s: from arrival until it was first scheduled.
        ttft_s: time to first token, from arrival until the host had it.
        tpot_s: time per output token after the first.
        total_s: from arrival until the last token so far.
    """

    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    total_s: float | None

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        """Those of `request` so far."""
        times, num_output = request.times, len(request.output_ids)

        def since(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else end - start

        decoding = since(times.first_token, times.last_token)
        return cls(
            queue_s=since(times.arrival, times.first_scheduled),
            ttft_s=since(times.arrival, times.first_token),
            tpot_s=decoding / (num_output - 1) if decoding and num_output > 1 else None,
            total_s=since(times.arrival, times.last_token),
        )


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
        outputs: one per sample.
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
