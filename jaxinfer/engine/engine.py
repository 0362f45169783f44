"""`Engine`: continuous batching over token ids. Text belongs to `LLM`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sharding import num_data_shards
from jaxinfer.compute.types import DecodeState, StepOutput
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine.batching import request_row
from jaxinfer.engine.compiles import CompileCounter
from jaxinfer.engine.dispatch import Underway, dispatch, take_scores
from jaxinfer.engine.executor import Executor
from jaxinfer.engine.logprobs import token_logprobs
from jaxinfer.engine.metrics import Metrics
from jaxinfer.engine.observer import Observer
from jaxinfer.engine.programs import Progress
from jaxinfer.engine.requests import make_requests, require_new
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Scheduler, TokenLogprobs


@dataclass(frozen=True)
class TokenOutput:
    """What one step brought one request: its new token ids, and how it ended if it did.

    With as many `logprobs` if it asks for them. Those of its prompt, if it asks for them, are all
    in `request.prompt_logprobs` when its first token comes.
    """

    request: Request
    new_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[TokenLogprobs, ...] = ()


class Engine:
    """Serves token-id requests of any lengths and parameters, which join and leave as they like.

    Call `add_request`, then `step` until `has_work` is false. Each step dispatches the next prefill
    chunks and the next decode window before it reads the tokens of the last one. Not thread-safe.

    Args:
        model, params: the decoder and its weights, as `jaxinfer.load` returns them; params stay the
            caller's. A model with a mesh serves on its devices.
        config: sizes of batch, cache and chunks; of each data shard, where there are several.
        eos_ids: ids that end an output; None: those of the model's config.
        num_valid_ids: ids that the tokenizer has; columns of the head beyond are never sampled.
        logits_hook: pure `(logits_BV, sampling) -> logits_BV`, applied to the raw logits of every
            step.
        compile_ahead: compile every program now, instead of each when it is first needed.
        strict_compile: with `compile_ahead`, a step that compiles anything raises RuntimeError.
        progress: called with (programs compiled, of how many).
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        config: EngineConfig,
        *,
        eos_ids: Sequence[int] | None = None,
        num_valid_ids: int | None = None,
        logits_hook: LogitsHook | None = None,
        compile_ahead: bool = False,
        strict_compile: bool = False,
        progress: Progress | None = None,
    ):
        require(
            compile_ahead or not strict_compile,
            "strict_compile=True allows no program that is not compiled ahead. "
            "Use compile_ahead=True too.",
        )
        require(
            config.max_model_len <= model.config.max_position,
            f"max_model_len={config.max_model_len} exceeds the model's max_position="
            f"{model.config.max_position}. Lower max_model_len.",
        )
        # What the rotary embedding is chosen for: the longest context that there can be.
        longest = dataclasses.replace(model.config, max_position=config.max_model_len)
        model = dataclasses.replace(model, config=longest)
        if config.kv_dtype is None:
            config = dataclasses.replace(config, kv_dtype=str(params["embed"]["weight"].dtype))
        self.config = config
        self.vocab_size = model.config.vocab_size
        self.num_valid_ids = self.vocab_size if num_valid_ids is None else num_valid_ids
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        windows = model.config.windows
        window = max((w for w in windows if w), default=None) if all(windows) else None
        num_data = num_data_shards(model.mesh)
        self.scheduler = Scheduler(config, window, num_data)
        self.observer: Observer | None = None  # told of all work from then on, once it is set
        empty = Request(id="", prompt_ids=(), params=SamplingParams(temperature=0.0), seed=0)
        self._executor = Executor(
            model,
            params,
            config,
            self._row_of(empty),
            prefill_shapes=self.scheduler.shards[0].shapes,
            logits_hook=logits_hook,
        )
        if compile_ahead:
            self._executor.compile(progress)
        self._compiles, self._is_strict = CompileCounter(), strict_compile
        self._metrics = Metrics()
        self._requests: dict[str, Request] = {}
        self._underway: deque[Underway] = deque()
        self._ready: list[TokenOutput] = []
        self._failure: BaseException | None = None
        self._ids = itertools.count()

    @property
    def wait_s(self) -> float:
        """Seconds that the host has waited for the device; in the rest it was busy itself."""
        return self._executor.wait_s

    @property
    def has_work(self) -> bool:
        """Whether a request is not over yet."""
        return bool(self._requests)

    def add_request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Request:
        """The request, now waiting for its turn; by policy "priority" a lower one goes first.

        Raises ValueError at once, and nothing else changes, if it can never run: a token id that
        the model does not have, an empty prompt, more tokens than `max_model_len` or than the whole
        cache, more log-probabilities than `max_logprobs`; or if `params.n` is not 1.
        """
        require(
            params.n == 1,
            f"SamplingParams.n={params.n} asks for several requests. Use add_samples.",
        )
        return self.add_samples(prompt_ids, params, request_id=request_id, priority=priority)[0]

    def add_samples(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> tuple[Request, ...]:
        """The `params.n` requests of one prompt, which the first computes for all of them.

        Each draws by its own sample index, and ends or is cancelled by itself. They are named
        `request_id`, `request_id.1` and so on; the first alone has prompt log-probabilities. Raises
        as `add_request` does.
        """
        samples = self.make_samples(prompt_ids, params, request_id=request_id, priority=priority)
        self.add(samples)
        return samples

    def make_samples(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> tuple[Request, ...]:
        """What `add_samples` would add, checked as it does but for the name; they have arrived now.

        It reads nothing that a step changes: with a `request_id`, any thread may call it.
        """
        free_names = (name for name in map(str, self._ids) if name not in self._requests)
        samples = make_requests(
            next(free_names) if request_id is None else request_id,
            prompt_ids,
            params,
            num_valid_ids=self.num_valid_ids,
            eos_ids=self.eos_ids,
            max_logprobs=self.config.max_logprobs,
            priority=priority,
        )
        self.scheduler.check(samples[0])
        now = time.perf_counter()
        for request in samples:
            request.times.arrival = now
        return samples

    def add(self, samples: Sequence[Request]) -> None:
        """Returns None; `samples`, of `make_samples`, wait for their turn. ValueError, and nothing
        changes, if one of their names is that of a request under way.
        """
        require_new(samples, self._requests)
        for request in samples:
            self.scheduler.add(request, request.times.arrival)
            self._requests[request.id] = request

    def cancel(self, request_id: str) -> None:
        """Returns None; the request, if not over, ends as "cancelled"; its pages are free."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, "cancelled")

    def stop(self, request: Request, num_output: int) -> None:
        """Returns None; the request is over as "stop", with the first `num_output` of its tokens.

        For an end that only its text shows. It may have ended by itself meanwhile.
        """
        self._end(request, "stop")
        request.cut(num_output)

    def _end(self, request: Request, reason: str) -> None:
        self._requests.pop(request.id, None)
        row = self.scheduler.finish(request, reason)
        if row is not None and self._failure is None:
            self._executor.stop_row(request.shard, row)

    def step(self) -> list[TokenOutput]:
        """What the device has finished since the last step; empty while the first tokens are under
        way.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"The engine stopped when a step failed ({self._failure!r}). Make a new one."
            )
        self._executor.check_params()
        num_before = len(self._underway)
        try:
            plans = self.scheduler.schedule(time.perf_counter())
            with self._compiles.watching():
                work = dispatch(self._executor, plans, self.config, self._row_of, self.observer)
                self._underway.extend(work)
            if self._is_strict and self._compiles.count:
                raise RuntimeError(
                    f"A step compiled {self._compiles.count} programs, and strict_compile=True "
                    "allows none. Report what it was given, or use strict_compile=False."
                )
        except BaseException as failure:
            # Host and device may disagree from here on.
            self._failure = failure
            raise
        # What was just dispatched keeps the device busy while the host reads what came before.
        keep = min(1, len(self._underway) - num_before)
        while len(self._underway) > keep:
            self._read()
        ready, self._ready = self._ready, []
        is_empty = all(plan.is_empty for plan in plans)
        assert ready or self._underway or not self.has_work or not is_empty, "stuck"
        return ready

    def metrics(self) -> dict[str, Any]:
        """Numbers since the engine was made, by name; those of `Counters`, `Metrics`, and:

        num_running, num_waiting: requests with and without a row. pages_total, pages_held,
        pages_cached, pages_free. fetches: reads of results. wait_s: seconds that the host waited
        for the device. compiles_after_warmup: programs that a step compiled; counted from the
        first step on if nothing was compiled ahead. programs: all that there are; cached_programs:
        those of them that JAX's persistent cache had; compile_s: seconds of compiling ahead.
        """
        scheduler = self.scheduler
        pools = [shard.pool for shard in scheduler.shards]
        programs, cached_programs = self._executor.num_programs
        return {
            **vars(scheduler.counters),
            "finished": dict(scheduler.counters.finished),
            **self._metrics.snapshot(),
            "num_running": scheduler.num_running,
            "num_waiting": scheduler.num_waiting,
            "pages_total": sum(pool.num_pages for pool in pools),
            "pages_held": sum(pool.num_held for pool in pools),
            "pages_cached": sum(pool.num_cached for pool in pools),
            "pages_free": sum(pool.num_free for pool in pools),
            "fetches": self._executor.num_fetches,
            "wait_s": self._executor.wait_s,
            "compiles_after_warmup": self._compiles.count,
            "programs": programs,
            "cached_programs": cached_programs,
            "compile_s": self._executor.compile_s,
        }

    def update_params(self, params: Params) -> None:
        """Returns None; every later step uses `params`, which stay the caller's: nothing is copied
        or compiled.

        They must have the tree, shapes, dtypes and shardings of the ones before; ValueError names
        what differs, and nothing changes. Requests under way go on with the keys and values that
        the old weights gave them; what begins after this shares none of those.
        """
        self._executor.update_params(params)
        self.scheduler.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Returns None if every page and row is held exactly once or free; AssertionError
        otherwise.
        """
        self.scheduler.check_integrity()

    def _read(self) -> None:
        """Makes the outputs of the oldest work under way ready; interrupted, it loses nothing."""
        first, start = self._underway[0], time.perf_counter()
        outputs, scores = self._executor.fetch((first.outputs, first.scores))
        if self.observer is not None:
            self.observer.fetched(start)
        underway = self._underway.popleft()
        for scored, found in zip(underway.scored, scores, strict=True):
            for index, chunk in scored:
                if chunk.request.finish_reason is None:
                    take_scores(chunk, index, found)
        for requests, output in zip(underway.requests, outputs, strict=True):
            self._take_tokens(requests, output)

    def _take_tokens(self, requests: Sequence[tuple[int, Request]], output: StepOutput) -> None:
        """Makes the tokens ready that a step has produced, by row for the requests."""
        now = time.perf_counter()
        for b, request in requests:
            new_ids = tuple(int(token) for token in output.tokens_BW[b] if token >= 0)
            was_over, last_token = request.finish_reason is not None, request.times.last_token
            reason = self.scheduler.update(request, new_ids, now)
            if was_over or not new_ids:
                continue
            self._metrics.observe(request, len(new_ids), last_token)
            num_top, logprobs = request.params.logprobs, []
            if num_top is not None:
                assert output.logprobs is not None
                logprobs = token_logprobs(output.logprobs, b, new_ids, num_top)
                request.logprobs.extend(logprobs)
            if reason is not None:
                del self._requests[request.id]
            self._ready.append(TokenOutput(request, new_ids, reason, tuple(logprobs)))

    def _row_of(self, request: Request) -> DecodeState:
        return request_row(
            request,
            self.config,
            vocab_size=self.vocab_size,
            num_valid_ids=self.num_valid_ids,
            eos_ids=self.eos_ids,
        )
