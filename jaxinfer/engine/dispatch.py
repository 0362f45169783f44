"""`dispatch`: a plan of the scheduler -> work of the device, none of it waited for."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from jaxinfer.compute.types import DecodeState, Logprobs, StepOutput
from jaxinfer.config import EngineConfig
from jaxinfer.engine.batching import (
    copy_batch,
    decode_batch,
    map_batch,
    num_scored,
    prefill_batch,
    score_batch,
    start_batch,
)
from jaxinfer.engine.executor import Executor
from jaxinfer.engine.logprobs import token_logprobs
from jaxinfer.engine.observer import Observer, Work
from jaxinfer.sched import Chunk, Request, StepPlan

T = TypeVar("T")


@dataclass(frozen=True)
class Underway:
    """What the device is computing: outputs, each with the requests of its rows, and scores of
    chunks, each with the index of its first hidden state.
    """

    outputs: tuple[StepOutput, ...]
    requests: tuple[tuple[Request, ...], ...]
    scores: tuple[Logprobs, ...] = ()
    scored: tuple[tuple[int, Chunk], ...] = ()


def dispatch(
    executor: Executor,
    plan: StepPlan,
    config: EngineConfig,
    row_of: Callable[[Request], DecodeState],
    observer: Observer | None = None,
) -> Iterator[Underway]:
    """The work of `plan` that brings results, in the order in which they are to be read."""
    _update_rows(executor, plan, row_of)
    if plan.shape is not None:
        start = time.perf_counter()
        x_ND, underway = _prefill(executor, plan, plan.shape, config)
        if underway.outputs or underway.scores:
            yield underway
        if observer is not None:
            tokens = sum(chunk.length for chunk in plan.prefill)
            work = Work("prefill", plan.shape, len(plan.prefill), tokens)
            observer.dispatched(work, (x_ND, underway.scores, underway.outputs), start)
    for copies in _batches(plan.copies, executor.num_starts):
        executor.copy_pages(*copy_batch(copies, executor.num_starts, config.cache.num_pages))
    if plan.num_steps:
        start = time.perf_counter()
        rows = [row for row, _ in plan.decode]
        rows_B = decode_batch(rows, executor.decode_sizes, executor.num_rows)
        requests = tuple(request for _, request in plan.decode)
        output = _only_asked(executor.decode(rows_B, plan.num_steps), requests)
        yield Underway((output,), (requests,))
        if observer is not None:
            shape = len(rows_B), plan.num_steps
            work = Work("decode", shape, len(rows), len(rows) * plan.num_steps)
            observer.dispatched(work, output, start)


def take_scores(chunk: Chunk, index: int, found: Logprobs) -> None:
    """Adds to the request what was found of the prompt tokens that follow those of `chunk`."""
    request, first = chunk.request, chunk.start + 1
    assert len(request.prompt_logprobs) >= first, f"{request.id}: scores before {first} are missing"
    ids = request.prompt_ids[first : first + chunk.length]
    num_top = request.params.prompt_logprobs
    assert num_top is not None
    scores = token_logprobs(found, slice(index, None), ids, num_top)
    request.prompt_logprobs[first : first + len(ids)] = scores


def _update_rows(
    executor: Executor, plan: StepPlan, row_of: Callable[[Request], DecodeState]
) -> None:
    """Stops the rows that lost their requests, writes those that got one, maps new pages."""
    for row, _ in plan.preempted:
        executor.stop_row(row)
    for request in plan.admitted:
        assert request.row is not None
        executor.write_row(request.row, row_of(request))
    for mapped in _batches(plan.mapped, executor.num_starts):
        executor.map_pages(map_batch(mapped, executor.num_starts, executor.num_rows))


def _prefill(
    executor: Executor, plan: StepPlan, shape: tuple[int, int], config: EngineConfig
) -> tuple[jax.Array, Underway]:
    """`(x_ND, underway)`: the prefill call, the scores of its chunks, the first tokens after it."""
    chunks = plan.prefill
    x_ND = executor.prefill(prefill_batch(chunks, shape, executor.num_rows))
    scored = tuple((at * shape[1], c) for at, c in enumerate(chunks) if num_scored(c))
    scores = tuple(
        executor.score(x_ND, score_batch(chunk, index, config.max_model_len))
        for index, chunk in scored
    )
    sizes = dict(num_starts=executor.num_starts, num_rows=executor.num_rows)
    outputs, requests = [], []
    for starts in _batches(plan.starts, executor.num_starts):
        requests.append(tuple(request for _, request in starts))
        output = executor.start(x_ND, start_batch(chunks, starts, shape, **sizes))
        outputs.append(_only_asked(output, requests[-1]))
    return x_ND, Underway(tuple(outputs), tuple(requests), scores, scored)


def _batches(items: tuple[T, ...], size: int) -> Iterator[tuple[T, ...]]:
    """The items in order, `size` or fewer at a time."""
    return (items[start : start + size] for start in range(0, len(items), size))


def _only_asked(output: StepOutput, requests: Sequence[Request]) -> StepOutput:
    """What to fetch of `output`: log-probabilities only where a request asks for them."""
    if any(request.params.logprobs is not None for request in requests):
        return output
    return dataclasses.replace(output, logprobs=None)
