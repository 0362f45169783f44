"""`Engine`: continuous batching over token ids. Text belongs to `LLM`."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.types import DecodeState, Logprobs, StepOutput
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine.batching import (
    copy_batch,
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
from jaxinfer.engine.requests import make_requests
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Chunk, Request, Scheduler, StepPlan, TokenLogprobs

T = TypeVar("T")


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
    """What the device is computing: outputs, each with the requests of its rows, and scores of
    chunks, each with the index of its first hidden state.
    """

    outputs: tuple[StepOutput, ...]
    requests: tuple[tuple[Request, ...], ...]
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
        # What the rotary embedding is chosen for: the longest context that there can be.
        longest = dataclasses.replace(model.config, max_position=config.max_model_len)
        model = dataclasses.replace(model, config=longest)
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
        cache, more log-probabilities than `max_logprobs`; or if `params.n` is not 1.
        """
        require(
            params.n == 1,
            f"SamplingParams.n={params.n} asks for several requests. Use add_samples.",
        )
        return self.add_samples(prompt_ids, params, request_id=request_id)[0]

    def add_samples(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, request_id: str | None = None
    ) -> tuple[Request, ...]:
        """The `params.n` requests of one prompt, which the first computes for all of them.

        Each draws by its own sample index, and ends or is cancelled by itself. They are named
        `request_id`, `request_id.1` and so on; the first alone has prompt log-probabilities. Raises
        as `add_request` does.
        """
        free_names = (name for name in map(str, self._ids) if name not in self._requests)
        samples = make_requests(
            next(free_names) if request_id is None else request_id,
            prompt_ids,
            params,
            num_valid_ids=self.num_valid_ids,
            eos_ids=self.eos_ids,
            max_logprobs=self.config.max_logprobs,
        )
        taken = [request.id for request in samples if request.id in self._requests]
        require(
            not taken,
            f"A request {', '.join(taken)} was added before. Give each an id of its own.",
        )
        for request in samples:
            self.scheduler.add(request, time.perf_counter())
            self._requests[request.id] = request
        return samples

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
            self._underway.append(_Underway((output,), (requests,)))

    def _prefill(self, plan: StepPlan, shape: tuple[int, int]) -> None:
        """Dispatches the prefill call, the scores of its chunks and the first tokens after it."""
        executor, chunks = self._executor, plan.prefill
        x_ND = executor.prefill(prefill_batch(chunks, shape, executor.num_rows))
        scored = tuple((at * shape[1], c) for at, c in enumerate(chunks) if num_scored(c))
        scores = tuple(
            executor.score(x_ND, score_batch(chunk, index, self.config.max_model_len))
            for index, chunk in scored
        )
        sizes = dict(num_starts=executor.num_starts, num_rows=executor.num_rows)
        outputs, requests = [], []
        for starts in _batches(plan.starts, executor.num_starts):
            requests.append(tuple(request for _, request in starts))
            output = executor.start(x_ND, start_batch(chunks, starts, shape, **sizes))
            outputs.append(_only_asked(output, requests[-1]))
        if outputs or scored:
            self._underway.append(_Underway(tuple(outputs), tuple(requests), scores, scored))
        for copies in _batches(plan.copies, executor.num_starts):
            num_pages = self.config.cache.num_pages
            executor.copy_pages(*copy_batch(copies, executor.num_starts, num_pages))

    def _read(self) -> None:
        """Makes the outputs of the oldest work under way ready; interrupted, it loses nothing."""
        first = self._underway[0]
        outputs, scores = self._executor.fetch((first.outputs, first.scores))
        underway = self._underway.popleft()
        for (index, chunk), found in zip(underway.scored, scores, strict=True):
            if chunk.request.finish_reason is None:
                _take_scores(chunk, index, found)
        for requests, output in zip(underway.requests, outputs, strict=True):
            self._take_tokens(requests, output)

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


def _batches(items: tuple[T, ...], size: int) -> Iterator[tuple[T, ...]]:
    """The items in order, `size` or fewer at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


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
