"""`Engine`: continuous batching over token ids. Text belongs to `LLM`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax import Array

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sampling_state import fresh_seed
from jaxinfer.compute.types import DecodeState
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine.batching import decode_batch, prefill_batch, request_row, start_batch
from jaxinfer.engine.executor import Executor
from jaxinfer.engine.programs import Progress
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request, Scheduler, StepPlan


@dataclass(frozen=True)
class TokenOutput:
    """What one step brought one request: its new token ids, and how it ended if it did."""

    request: Request
    new_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class _Underway:
    """Tokens `[B]` or `[B, W]` that the device is computing, and the request of each row."""

    tokens: Array
    requests: tuple[Request, ...]


class Engine:
    """Serves token-id requests of any lengths and parameters, which join and leave as they like.

    Call `add_request`, then `step` until `has_work` is false. Each step dispatches the next prefill
    chunks and the next decode window before it reads the tokens of the last one. Not thread-safe.

    Args:
        model, params: the decoder and its weights, as `jaxinfer.load` returns them; params stay the
            caller's.
        config: sizes of batch, cache and chunks.
        eos_ids: ids that end an output; None: those of the model's config.
        num_valid_ids: ids that the tokenizer has; columns of the head beyond are never sampled.
        logits_hook: pure `(logits_BV, sampling) -> logits_BV`, applied to the raw logits of every
            step.
        compile_ahead: compile every program now, instead of each when it is first needed.
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
        progress: Progress | None = None,
    ):
        require(
            config.max_model_len <= model.config.max_position,
            f"max_model_len={config.max_model_len} exceeds the model's max_position="
            f"{model.config.max_position}. Lower max_model_len.",
        )
        if config.kv_dtype is None:
            config = dataclasses.replace(config, kv_dtype=str(params["embed"]["weight"].dtype))
        self.config = config
        self.vocab_size = model.config.vocab_size
        self.num_valid_ids = self.vocab_size if num_valid_ids is None else num_valid_ids
        self.eos_ids = tuple(model.config.eos_ids if eos_ids is None else eos_ids)
        self.scheduler = Scheduler(config)
        empty = Request(id="", prompt_ids=(), params=SamplingParams(temperature=0.0), seed=0)
        self._executor = Executor(
            model,
            params,
            config,
            self._row_of(empty),
            prefill_shapes=self.scheduler.shapes,
            logits_hook=logits_hook,
        )
        if compile_ahead:
            self._executor.compile(progress)
        self._requests: dict[str, Request] = {}
        self._underway: deque[_Underway] = deque()
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
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> Request:
        """The request, now waiting for its turn.

        Raises ValueError at once, and nothing else changes, if it can never run: a token id that
        the model does not have, an empty prompt, more tokens than `max_model_len` or than the whole
        cache.
        """
        free_names = (name for name in map(str, self._ids) if name not in self._requests)
        name = next(free_names) if request_id is None else request_id
        prompt = self._checked_prompt(name, prompt_ids)
        params.check(self.num_valid_ids, self.eos_ids)
        request = Request(
            id=name,
            prompt_ids=prompt,
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_ids(self.eos_ids)),
        )
        self.scheduler.add(request, time.perf_counter())
        self._requests[name] = request
        return request

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
            self._executor.stop_row(row)

    def step(self) -> list[TokenOutput]:
        """What the device has finished since the last step; empty while the first tokens are under
        way.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"The engine stopped when a step failed ({self._failure!r}). Make a new one."
            )
        num_before = len(self._underway)
        try:
            plan = self.scheduler.schedule(time.perf_counter())
            for request in plan.admitted:
                assert request.row is not None
                self._executor.write_row(request.row, self._row_of(request))
            self._dispatch(plan)
        except BaseException as failure:
            # Host and device may disagree from here on.
            self._failure = failure
            raise
        # What was just dispatched keeps the device busy while the host reads what came before.
        keep = min(1, len(self._underway) - num_before)
        while len(self._underway) > keep:
            self._read()
        ready, self._ready = self._ready, []
        assert ready or self._underway or not self.has_work or not plan.is_empty, "stuck"
        return ready

    def check_integrity(self) -> None:
        """Returns None if every page and row is held exactly once or free; AssertionError
        otherwise.
        """
        self.scheduler.check_integrity()

    def _dispatch(self, plan: StepPlan) -> None:
        executor = self._executor
        if plan.shape is not None:
            x_BD = executor.prefill(prefill_batch(plan.prefill, plan.shape, executor.num_rows))
            if any(chunk.is_last for chunk in plan.prefill):
                starts = start_batch(plan.prefill, executor.num_starts, executor.num_rows)
                requests = tuple(chunk.request for chunk in plan.prefill)
                self._underway.append(_Underway(executor.start(x_BD, starts), requests))
        if plan.num_steps:
            rows = [row for row, _ in plan.decode]
            rows_B = decode_batch(rows, executor.decode_sizes, executor.num_rows)
            tokens_BW = executor.decode(rows_B, plan.num_steps)
            self._underway.append(_Underway(tokens_BW, tuple(r for _, r in plan.decode)))

    def _read(self) -> None:
        """Makes the outputs of the oldest work under way ready; interrupted, it loses nothing."""
        tokens_BW = self._executor.fetch(self._underway[0].tokens)
        requests = self._underway.popleft().requests
        tokens_BW = tokens_BW.reshape(len(tokens_BW), -1)
        now = time.perf_counter()
        for request, tokens_W in zip(requests, tokens_BW, strict=False):
            new_ids = tuple(int(token) for token in tokens_W if token >= 0)
            if not new_ids or request.finish_reason is not None:
                continue
            reason = self.scheduler.update(request, new_ids, now)
            if reason is not None:
                del self._requests[request.id]
            self._ready.append(TokenOutput(request, new_ids, reason))

    def _row_of(self, request: Request) -> DecodeState:
        return request_row(
            request,
            self.config,
            vocab_size=self.vocab_size,
            num_valid_ids=self.num_valid_ids,
            eos_ids=self.eos_ids,
        )

    def _checked_prompt(self, name: str, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        ids = np.asarray(prompt_ids)
        require(
            ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)),
            f"Request {name!r} has a prompt that is not a list of integer token ids.",
        )
        bad = ids[(ids < 0) | (ids >= self.num_valid_ids)]
        require(
            bad.size == 0,
            f"Request {name!r} holds token id {bad[0] if bad.size else 0}; "
            f"the model has ids 0..{self.num_valid_ids - 1}.",
        )
        return tuple(ids.tolist())
