"""What an engine counts, read in one place."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.engine.engine import Engine


def engine_counters(engine: Engine) -> dict[str, float]:
    """The running totals of `engine` since it was made, by name; only those that it keeps.

    fetches: reads of results from the device. compiles: programs compiled. `report` also knows:
    prefill_tokens and prefill_slots (tokens of prefill calls without and with padding),
    decode_rows and decode_slots (rows of decode steps without and with idle ones),
    prompt_tokens and cached_tokens (of admitted requests; found in the cache), preemptions.
    """
    executor = engine._executor
    return {"fetches": executor.num_fetches, "compiles": len(executor._programs._compiled)}


@dataclass(frozen=True)
class Occupancy:
    """What was in use at `time_s`: requests with a row, requests without one yet, pages."""

    time_s: float
    num_running: int
    num_waiting: int
    num_pages: int


def occupancy(engine: Engine, time_s: float, num_under_way: int) -> Occupancy:
    """That of `engine`, which has `num_under_way` requests, at `time_s`."""
    num_waiting, pool = engine.scheduler.num_waiting, engine.scheduler.pool
    num_pages = pool.num_pages - pool.num_free
    return Occupancy(time_s, num_under_way - num_waiting, num_waiting, num_pages)
