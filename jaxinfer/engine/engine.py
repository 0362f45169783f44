"""`Engine`: continuous batching over token ids. Text belongs to `LLM`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sampling_state import fresh_seed
from jaxinfer.compute.types import DecodeState, Logprobs, StepOutput
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine.batching import (
    decode_batch,
    num_scored,
    prefill_batch,
    request_row,
    score_batch,
    start_batch,
)
from jaxinfer.engine.executor import Executor
from jaxinfer.engine.logprobs import token_logprobs
from jaxinfer.engine.programs import Progress
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Chunk, Request, Scheduler, StepPlan, TokenLogprobs


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


@dataclass(frozen=True)
class _Underway:
    """What the device is computing: the tokens of `requests`, a row each, and scores of chunks.

    A chunk that is scored comes with the index of its first hidden state.
    """

    output: StepOutput | None
    requests: tuple[Request, ...]
    scores: tuple[Logprobs, ...] = ()
    scored: tuple[tuple[int, Chunk], ...] = ()


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
        cache, more log-probabilities than `max_logprobs`.
        """
        free_names = (name for name in map(str, self._ids) if name not in self._requests)
        name = next(free_names) if request_id is None else request_id
        prompt = self._checked_prompt(name, prompt_ids)
        params.check(self.num_valid_ids, self.eos_ids)
        self._check_logprobs(name, params)
        request = Request(
            id=name,
            prompt_ids=prompt,
            params=params,
            seed=fresh_seed() if params.seed is None else params.seed,
            stop_ids=frozenset(params.stop_ids(self.eos_ids)),
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs.append(None)  # nothing comes before the first token
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
            self._prefill(plan, plan.shape)
        if plan.num_steps:
            rows = [row for row, _ in plan.decode]
            rows_B = decode_batch(rows, executor.decode_sizes, executor.num_rows)
            requests = tuple(request for _, request in plan.decode)
            output = _only_asked(executor.decode(rows_B, plan.num_steps), requests)
            self._underway.append(_Underway(output, requests))

    def _prefill(self, plan: StepPlan, shape: tuple[int, int]) -> None:
        """Dispatches the prefill call, the scores of its chunks and the first tokens after it."""
        executor, chunks = self._executor, plan.prefill
        x_ND = executor.prefill(prefill_batch(chunks, shape, executor.num_rows))
        scored = tuple((at * shape[1], c) for at, c in enumerate(chunks) if num_scored(c))
        scores = tuple(
            executor.score(x_ND, score_batch(chunk, index, self.config.max_model_len))
            for index, chunk in scored
        )
        requests = tuple(request for _, request in plan.starts)
        output = None
        if requests:
            sizes = dict(num_starts=executor.num_starts, num_rows=executor.num_rows)
            batch = start_batch(chunks, plan.starts, shape, **sizes)
            output = _only_asked(executor.start(x_ND, batch), requests)
        if requests or scored:
            self._underway.append(_Underway(output, requests, scores, scored))

    def _read(self) -> None:
        """Makes the outputs of the oldest work under way ready; interrupted, it loses nothing."""
        first = self._underway[0]
        output, scores = self._executor.fetch((first.output, first.scores))
        underway = self._underway.popleft()
        for (index, chunk), found in zip(underway.scored, scores, strict=True):
            if chunk.request.finish_reason is None:
                _take_scores(chunk, index, found)
        if output is not None:
            self._take_tokens(underway.requests, output)

    def _take_tokens(self, requests: Sequence[Request], output: StepOutput) -> None:
        """Makes the tokens ready that a step has produced for `requests`, a row each."""
        now = time.perf_counter()
        for b, request in enumerate(requests):
            new_ids = tuple(int(token) for token in output.tokens_BW[b] if token >= 0)
            if not new_ids or request.finish_reason is not None:
                continue
            num_top, logprobs = request.params.logprobs, []
            if num_top is not None:
                assert output.logprobs is not None
                logprobs = token_logprobs(output.logprobs, b, new_ids, num_top)
                request.logprobs.extend(logprobs)
            reason = self.scheduler.update(request, new_ids, now)
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

    def _check_logprobs(self, name: str, params: SamplingParams) -> None:
        most = self.config.max_logprobs
        for field in ("logprobs", "prompt_logprobs"):
            count = getattr(params, field)
            require(
                count is None or count <= most,
                f"Request {name!r} asks for {field}={count}, more than max_logprobs={most}. "
                "Ask for fewer or raise max_logprobs.",
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


def _only_asked(output: StepOutput, requests: Sequence[Request]) -> StepOutput:
    """What to fetch of `output`: log-probabilities only where a request asks for them."""
    if any(request.params.logprobs is not None for request in requests):
        return output
    return dataclasses.replace(output, logprobs=None)


def _take_scores(chunk: Chunk, index: int, found: Logprobs) -> None:
    """Adds to the request what was found of the prompt tokens that follow those of `chunk`."""
    request, first = chunk.request, chunk.start + 1
    assert len(request.prompt_logprobs) >= first, f"{request.id}: scores before {first} are missing"
    ids = request.prompt_ids[first : first + chunk.length]
    num_top = request.params.prompt_logprobs
    assert num_top is not None
    scores = token_logprobs(found, slice(index, None), ids, num_top)
    request.prompt_logprobs[first : first + len(ids)] = scores
