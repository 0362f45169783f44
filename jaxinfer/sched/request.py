"""`Request`: one prompt on its way to an output, and how far it is.

Each request has known tokens (prompt, and the output read so far) and computed tokens (those whose
K and V have been dispatched). Scheduling closes the gap between them, whatever opened it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched.logprobs import TokenLogprobs


class Status(enum.Enum):
    """Where a request stands: no row yet, computing its known tokens, generating, or over."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass
class Times:
    """When things happened to a request, in seconds of the caller's clock; no plan reads them."""

    arrival: float | None = None
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """One request; compared by identity. The scheduler alone changes what follows `sample_index`.

    Attributes:
        id: unique among the requests under way.
        seed: what its draws follow from, with the prompt; never None.
        stop_ids: a token of these ends the output and is part of it. See `SamplingParams.stop_ids`.
        sample_index: which of the samples of one prompt it is.
        fork_of: its leader, the sibling of equal prompt that computes the prompt for it; None where
            it does that itself. The scheduler clears it where the leader cannot.
        forks: the siblings that wait for it to compute their prompt, in order of arrival.
        output_ids: tokens generated, as far as they have been read from the device.
        logprobs: of each of them, if asked for; else empty.
        prompt_logprobs: of each prompt token as far as read, if asked for; None for the first.
            All are there when the first output token is.
        num_computed: tokens whose K and V are dispatched. While generating this is an upper bound:
            the device may have stopped earlier, which is known when its tokens are read.
        max_total_len: most tokens, prompt and output; set when the scheduler accepts the request.
        order: arrivals before this one; set then too.
        row: its row of the decode batch, and `pages` its pages in order of position; both only
            between admission and finish.
        finish_reason: "stop", "length", "cancelled" or "error"; None until it is over.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    fork_of: Request | None = field(default=None, repr=False)

    forks: list[Request] = field(default_factory=list, init=False, repr=False)
    status: Status = field(default=Status.WAITING, init=False)
    output_ids: list[int] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    max_total_len: int = field(default=0, init=False)
    order: int = field(default=0, init=False)
    row: int | None = field(default=None, init=False)
    pages: list[int] = field(default_factory=list, init=False)
    finish_reason: str | None = field(default=None, init=False)
    times: Times = field(default_factory=Times, init=False)

    @property
    def num_known(self) -> int:
        """Tokens that the host knows: the prompt and the output read so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def prefill_gap(self) -> int:
        """Known tokens still to compute before the request can generate."""
        return self.num_known - self.num_computed

    @property
    def decode_gap(self) -> int:
        """Most decode steps still to dispatch: the last token of all is never computed itself."""
        return self.max_total_len - 1 - self.num_computed

    def known_ids(self, start: int, length: int) -> list[int]:
        """The known tokens at positions start..start+length-1."""
        end, num_prompt = start + length, len(self.prompt_ids)
        output = self.output_ids[max(start - num_prompt, 0) : max(end - num_prompt, 0)]
        return [*self.prompt_ids[start:end], *output]

    def cut(self, num_output: int) -> None:
        """Returns None; the output ends after `num_output` tokens, at a stop string."""
        assert self.status is Status.FINISHED, f"{self.id} still runs"
        del self.output_ids[num_output:]
        del self.logprobs[num_output:]
        self.finish_reason = "stop"

    def append(self, token: int) -> str | None:
        """The finish reason that `token`, the next of the output, brings; None to go on."""
        self.output_ids.append(token)
        assert self.num_known <= self.num_computed + 1, f"{self.id}: more tokens than were computed"
        if token in self.stop_ids:
            return "stop"
        return "length" if self.num_known == self.max_total_len else None
