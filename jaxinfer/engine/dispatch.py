"""`dispatch`: the plans of all data shards -> work of the devices, none of it waited for.

One call serves all shards: those that have nothing to do in it idle.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax

from jaxinfer.compute.types import DecodeState, Logprobs, StepOutput
from jaxinfer.config import EngineConfig
from jaxinfer.engine.batching import (
    copy_batch,
    decode_batch,
    join,
    map_batch,
    no_score,
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
    """What the device is computing: outputs, each with its rows and their requests, and scores of
    chunks, each with the index of the chunks' first ones.
    """

    outputs: tuple[StepOutput, ...]
    requests: tuple[tuple[tuple[int, Request], ...], ...]
    scores: tuple[Logprobs, ...] = ()
    scored: tuple[tuple[tuple[int, Chunk], ...], ...] = ()


def dispatch(
    executor: Executor,
    plans: Sequence[StepPlan],
    config: EngineConfig,
    row_of: Callable[[Request], DecodeState],
    observer: Observer | None = None,
) -> Iterator[Underway]:
    """The work of the plans that brings results, in the order in which they are to be read."""
    _update_rows(executor, plans, row_of)
    for shape in dict.fromkeys(plan.shape for plan in plans if plan.shape is not None):
        start = time.perf_counter()
        alike = [plan if plan.shape == shape else None for plan in plans]
        x_ND, underway = _prefill(executor, alike, shape, config)
        if underway.outputs or underway.scores:
            yield underway
        if observer is not None:
            chunks = [chunk for plan in alike if plan is not None for chunk in plan.prefill]
            size = executor.num_shards * shape[0], shape[1]
            work = Work("prefill", size, len(chunks), sum(chunk.length for chunk in chunks))
            observer.dispatched(work, (x_ND, underway.scores, underway.outputs), start)
    for copies in _batches([plan.copies for plan in plans], executor.num_starts):
        sizes = executor.num_starts, config.cache.num_pages
        executor.copy_pages(*join([copy_batch(some, *sizes) for some in copies]))
    if any(plan.num_steps for plan in plans):
        yield _decode(executor, plans, observer)


def _decode(executor: Executor, plans: Sequence[StepPlan], observer: Observer | None) -> Underway:
    """The decode window of all shards, as long as the longest; the others' rows end before."""
    start = time.perf_counter()
    num_steps = max(plan.num_steps for plan in plans)
    most_rows = max(len(plan.decode) for plan in plans)
    size = next(size for size in executor.decode_sizes if size >= most_rows)
    rows = [[row for row, _ in plan.decode] for plan in plans]
    rows_B = join([decode_batch(some, size, executor.num_rows) for some in rows])
    requests = _in_batch([enumerate(request for _, request in plan.decode) for plan in plans], size)
    output = _only_asked(executor.decode(rows_B, num_steps), requests)
    if observer is not None:
        work = Work("decode", (len(rows_B), num_steps), len(requests), len(requests) * num_steps)
        observer.dispatched(work, output, start)
    return Underway((output,), (requests,))


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
    executor: Executor, plans: Sequence[StepPlan], row_of: Callable[[Request], DecodeState]
) -> None:
    """Stops the rows that lost their requests, writes those that got one, maps new pages."""
    for shard, plan in enumerate(plans):
        for row, _ in plan.preempted:
            executor.stop_row(shard, row)
        for request in plan.admitted:
            assert request.row is not None
            executor.write_row(shard, request.row, row_of(request))
    for mapped in _batches([plan.mapped for plan in plans], executor.num_starts):
        sizes = executor.num_starts, executor.num_rows
        executor.map_pages(join([map_batch(some, *sizes) for some in mapped]))


def _prefill(
    executor: Executor,
    plans: Sequence[StepPlan | None],
    shape: tuple[int, int],
    config: EngineConfig,
) -> tuple[jax.Array, Underway]:
    """`(x_ND, underway)`: the prefill call, the scores of its chunks, the first tokens after it."""
    chunks = [() if plan is None else plan.prefill for plan in plans]
    x_ND = executor.prefill(join([prefill_batch(c, shape, executor.num_rows) for c in chunks]))
    scored = [
        tuple((at * shape[1], chunk) for at, chunk in enumerate(some) if num_scored(chunk))
        for some in chunks
    ]
    scores, scored_at = [], []
    for ones in _batches(scored, 1):
        batch = [
            score_batch(one[0][1], one[0][0], config.max_model_len)
            if one
            else no_score(config.max_model_len)
            for one in ones
        ]
        scores.append(executor.score(x_ND, join(batch)))
        scored_at.append(_in_batch(ones, executor.num_hidden))
    sizes = dict(num_starts=executor.num_starts, num_rows=executor.num_rows)
    outputs, requests = [], []
    for some in _batches(
        [() if plan is None else plan.starts for plan in plans], executor.num_starts
    ):
        started = [enumerate(request for _, request in starts) for starts in some]
        requests.append(_in_batch(started, executor.num_starts))
        batch = [start_batch(c, starts, shape, **sizes) for c, starts in zip(chunks, some)]
        outputs.append(_only_asked(executor.start(x_ND, join(batch)), requests[-1]))
    return x_ND, Underway(tuple(outputs), tuple(requests), tuple(scores), tuple(scored_at))


def _batches(items: Sequence[tuple[T, ...]], size: int) -> Iterator[list[tuple[T, ...]]]:
    """The items of each shard in order, `size` or fewer of each at a time."""
    longest = max(map(len, items))
    return ([some[start : start + size] for some in items] for start in range(0, longest, size))


def _in_batch(parts: Sequence[Iterable[tuple[int, T]]], size: int) -> tuple[tuple[int, T], ...]:
    """The items of each shard, placed within it, with their places in a batch that has `size` of
    each shard.
    """
    return tuple(
        (shard * size + place, item) for shard, part in enumerate(parts) for place, item in part
    )


def _only_asked(output: StepOutput, requests: Sequence[tuple[int, Request]]) -> StepOutput:
    """What to fetch of `output`: log-probabilities only where a request asks for them."""
    if any(request.params.logprobs is not None for _, request in requests):
        return output
    return dataclasses.replace(output, logprobs=None)
