"""`TokenLogprobs`: how likely one token was, and what else was likely in its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of one token of a prompt or an output.

    Attributes:
        logprob: natural logarithm, given the tokens before; -inf if it could not be sampled.
        top: token id -> log-probability of as many of the most likely tokens as were asked for, the
            most likely first, of equals the lower id.
    """

    token_id: int
    logprob: float
    top: dict[int, float]
