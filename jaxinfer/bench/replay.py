"""Requests of a trace, sent to an engine as they arrive, and when each of their tokens came."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxinfer.bench.counters import Occupancy, engine_counters, occupancy
from jaxinfer.bench.prompts import make_prompts
from jaxinfer.bench.traces import TracedRequest
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine.engine import Engine, TokenOutput
from jaxinfer.sampling_params import SamplingParams

Clock = Callable[[], float]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Record:
    """How one request went, in seconds since the replay began.

    Attributes:
        num_prompt, num_output: tokens that it came with, and that it asked for.
        arrival_s: when it was due; in a closed loop, when it was sent.
        scheduled_s: when it got its row; None if it never did.
        token_times_s: when the host had each token. Those of one decode window come together.
        end_s: when the host knew that it was over.
    """

    num_prompt: int
    num_output: int
    arrival_s: float
    scheduled_s: float | None
    token_times_s: tuple[float, ...]
    end_s: float

    @property
    def is_complete(self) -> bool:
        """Whether every token that was asked for came."""
        return len(self.token_times_s) == self.num_output

    @property
    def queue_s(self) -> float | None:
        """From arrival until it got its row."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from arrival."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None if there is none."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Each time between two deliveries of tokens: what comes together is one delivery."""
        times = self.token_times_s
        return tuple(later - time for time, later in itertools.pairwise(times) if later > time)


@dataclass(frozen=True)
class Replay:
    """What a replay brought.

    Attributes:
        records: one per request, in order of their ends.
        samples: what was in use after each step.
        start_s: by the clock, when it began.
        duration_s: from then until the last request was over.
        idle_s: of that, how long there was nothing to do.
        wait_s: of that, how long the host waited for the device.
        counters: what `engine_counters` counted meanwhile.
    """

    records: tuple[Record, ...]
    samples: tuple[Occupancy, ...]
    start_s: float
    duration_s: float
    idle_s: float
    wait_s: float
    counters: dict[str, float]


@dataclass
class _UnderWay:
    """A request that is not over: what was asked, since when, and its tokens' times so far."""

    traced: TracedRequest
    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)

    def take(self, output: TokenOutput, start_s: float, now_s: float) -> Record | None:
        """The record of the request if `output`, which came at `now_s`, is its last."""
        self.token_times_s += [now_s] * len(output.new_ids)
        if output.finish_reason is None:
            return None
        scheduled = output.request.times.first_scheduled
        return Record(
            self.traced.num_prompt,
            self.traced.num_output,
            self.arrival_s,
            None if scheduled is None else scheduled - start_s,
            tuple(self.token_times_s),
            now_s,
        )


def needed_len(requests: Sequence[TracedRequest], page_size: int) -> int:
    """The `max_model_len` that the longest request needs, whole pages."""
    require(page_size >= 1, f"page_size={page_size} must be at least 1.")
    longest = _longest(requests)
    return longest + -longest % page_size


def fitting_len(requests: Sequence[TracedRequest], page_size: int, max_position: int) -> int:
    """What `needed_len` gives; ValueError if a model of `max_position` cannot hold it."""
    needed = needed_len(requests, page_size)
    most = max_position - max_position % page_size
    require(
        needed <= most,
        f"The longest request has {_longest(requests)} tokens, prompt and output; the model can "
        f"hold {most}, in whole pages of {page_size}. Use --clip or --divide.",
    )
    return needed


def check_fits(requests: Sequence[TracedRequest], config: EngineConfig) -> None:
    """Returns None if an engine of `config` can serve each of the requests to its end."""
    longest = _longest(requests)
    require(
        longest <= _room(config),
        f"The longest request has {longest} tokens, prompt and output; max_model_len="
        f"{config.max_model_len} and num_pages={config.cache.num_pages} leave room for "
        f"{_room(config)}. Raise them, or clip or divide the requests.",
    )


def _longest(requests: Sequence[TracedRequest]) -> int:
    """Tokens of the longest request, prompt and output."""
    return max(request.num_prompt + request.num_output for request in requests)


def _room(config: EngineConfig) -> int:
    """The most tokens, prompt and output, that one request can hold."""
    return min(config.max_model_len, config.cache.num_pages * config.page_size)


def warm_up(engine: Engine) -> Replay:
    """What this brought: the engine has run a whole prefill chunk, many short ones, and windows of
    every number of rows, on prompts that no trace has.
    """
    config = engine.config
    num_tokens = _room(config)
    requests = []
    for index in range(config.max_num_seqs):
        # Half the rows end after the first window, half of what is left after the second, ...
        num_windows = config.max_num_seqs.bit_length() - index.bit_length() + 1
        num_output = min(num_windows * config.max_window + 1, num_tokens - 1)
        num_prompt = min(config.prefill_chunk if index == 0 else 16, num_tokens - num_output)
        requests.append(TracedRequest(0.0, num_prompt, num_output))
    return replay(engine, requests, make_prompts(requests, engine.num_valid_ids, seed=1))


def replay(
    engine: Engine,
    requests: Sequence[TracedRequest],
    prompts: Sequence[np.ndarray],
    *,
    concurrency: int | None = None,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    progress: Progress | None = None,
) -> Replay:
    """What serving the requests brought, each with its prompt and with exactly as many output
    tokens as the trace says, greedily.

    Open loop: each is sent when it is due, whatever the others do; what comes due during a step is
    sent after it, yet its time runs from when it was due. With `concurrency` closed loop: in their
    order, as many under way at all times as that, until none is left to send.

    `clock` must be that of the engine, `time.perf_counter`. Raises ValueError before anything is
    sent if a request is too long for the engine.
    """
    require(
        concurrency is None or concurrency >= 1, f"concurrency={concurrency} must be at least 1."
    )
    check_fits(requests, engine.config)
    pending = deque(zip(requests, prompts, strict=True))
    under_way: dict[str, _UnderWay] = {}
    records, samples, idle_s = [], [], 0.0
    before, waited_s, start_s = engine_counters(engine), engine.wait_s, clock()

    def is_due(now_s: float) -> bool:
        if concurrency is None:
            return pending[0][0].arrival_s <= now_s
        return len(under_way) < concurrency

    while pending or under_way:
        now_s = clock() - start_s
        while pending and is_due(now_s):
            traced, prompt = pending.popleft()
            arrival_s = traced.arrival_s if concurrency is None else now_s
            under_way[_send(engine, traced, prompt)] = _UnderWay(traced, arrival_s)
        if not under_way:
            sleep(pending[0][0].arrival_s - now_s)
            idle_s += clock() - start_s - now_s
            continue
        outputs = engine.step()
        now_s = clock() - start_s
        for output in outputs:
            record = under_way[output.request.id].take(output, start_s, now_s)
            if record is not None:
                del under_way[output.request.id]
                records.append(record)
        samples.append(occupancy(engine, now_s, len(under_way)))
        if progress is not None:
            progress(len(records), len(requests))
    counters = {name: total - before[name] for name, total in engine_counters(engine).items()}
    return Replay(
        records=tuple(records),
        samples=tuple(samples),
        start_s=start_s,
        duration_s=clock() - start_s,
        idle_s=idle_s,
        wait_s=engine.wait_s - waited_s,
        counters=counters,
    )


def _send(engine: Engine, traced: TracedRequest, prompt: np.ndarray) -> str:
    """The id of the request that is now the engine's."""
    params = SamplingParams(temperature=0.0, max_tokens=traced.num_output, ignore_eos=True, seed=0)
    return engine.add_request(prompt.tolist(), params, priority=traced.priority).id
