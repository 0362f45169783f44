"""`Request`: one prompt on its way to an output, and how far it is.

Each request has known tokens (prompt, and the output read so far) and computed tokens (those whose
K and V have been dispatched). Scheduling closes the gap between them, whatever opened it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched.logprobs import TokenLogprobs
from jaxinfer.sched.prefix_cache import Entry


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
    """One request; compared by identity. The scheduler alone changes what follows `priority`.

    Attributes:
        id: unique among the requests under way.
        seed: what its draws follow from, with the prompt; never None.
        stop_ids: a token of these ends the output and is part of it. See `SamplingParams.stop_ids`.
        sample_index: which of the samples of one prompt it is.
        priority: lower goes first, where the policy is "priority".
        output_ids: tokens generated, as far as they have been read from the device.
        logprobs: of each of them, if asked for; else empty.
        prompt_logprobs: of each prompt token as far as read, if asked for; None for the first.
            All are there when the first output token is.
        num_computed: tokens whose K and V are dispatched, 0 while it waits. While generating this
            is an upper bound: the device may have stopped earlier, which is known when its tokens
            are read.
        max_total_len: most tokens, prompt and output; set when the scheduler accepts the request.
        order: arrivals before this one; set then too.
        shard: which of the data shards it runs on, or ran last.
        row: its row of the decode batch there, and `pages` its pages in order of position, None for
            those that no later query sees; both only while it runs.
        num_own: tokens that nobody was to compute for it when it was given its row.
        entry: of the prefix cache, for its last page registered there; None where it registers
            none.
        under_way: decode steps (1 for a first token) of each dispatch that was not read yet.
        num_cached: prompt tokens that needed no computing, as another request had done it, before
            any preemption.
        num_preemptions: how often it had to give back row and pages; num_lost: the most tokens that
            it had computed by then.
        num_overtaken: later arrivals admitted while it waited.
        finish_reason: "stop", "length", "cancelled" or "error"; None until it is over.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    sample_index: int = 0
    priority: int = 0

    status: Status = field(default=Status.WAITING, init=False)
    output_ids: list[int] = field(default_factory=list, init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list, init=False)
    num_computed: int = field(default=0, init=False)
    max_total_len: int = field(default=0, init=False)
    order: int = field(default=0, init=False)
    shard: int = field(default=0, init=False)
    row: int | None = field(default=None, init=False)
    num_own: int = field(default=0, init=False)
    pages: list[int | None] = field(default_factory=list, init=False)
    entry: Entry | None = field(default=None, init=False, repr=False)
    under_way: deque[int] = field(default_factory=deque, init=False)
    num_cached: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    num_lost: int = field(default=0, init=False)
    num_overtaken: int = field(default=0, init=False)
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

    @property
    def must_compute(self) -> bool:
        """Whether it has to compute its whole prompt itself, as each of its tokens is scored."""
        return self.params.prompt_logprobs is not None

    def known_ids(self, start: int, length: int) -> tuple[int, ...]:
        """The known tokens at positions start..start+length-1."""
        end, num_prompt = start + length, len(self.prompt_ids)
        if end <= num_prompt:
            return self.prompt_ids[start:end]
        output = self.output_ids[max(start - num_prompt, 0) : end - num_prompt]
        return (*self.prompt_ids[start:], *output)

    def cut(self, num_output: int) -> None:
        """Returns None; the output ends after `num_output` tokens, at a stop string."""
        assert self.status is Status.FINISHED, f"{self.id} still runs"
        del self.output_ids[num_output:]
        del self.logprobs[num_output:]
        self.finish_reason = "stop"

    def extend(self, new_ids: Sequence[int]) -> str | None:
        """The finish reason that `new_ids`, the next of the output, bring; None to go on."""
        if not new_ids:
            return None
        self.output_ids += new_ids
        assert self.stop_ids.isdisjoint(new_ids[:-1]), f"{self.id}: {new_ids} go on after a stop"
        assert self.num_known <= self.max_total_len, f"{self.id}: {new_ids} go on after the end"
        if new_ids[-1] in self.stop_ids:
            return "stop"
        return "length" if self.num_known == self.max_total_len else None

    def check_integrity(self) -> None:
        """Returns None if what it holds and has computed fits its status."""
        if self.status is Status.WAITING:
            assert self.row is None and not self.pages, f"{self.id} waits with a row"
            assert not self.num_computed and self.entry is None, f"{self.id} waits and has computed"
            return
        assert self.row is not None, f"{self.id} runs without a row"
        assert self.decode_gap >= 0, f"{self.id} computes beyond its end"
        if self.status is Status.PREFILL:
            assert self.num_computed < self.num_known, f"{self.id} has nothing to compute"
            assert not self.under_way, f"{self.id} computes again before all is read"
        else:
            assert self.status is Status.DECODE, f"{self.id} runs as {self.status}"
            assert self.num_known <= self.num_computed + 1, f"{self.id} has lost a token"
