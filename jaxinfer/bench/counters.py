"""What an engine counts, read in one place."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.engine.engine import Engine

TOTALS = (
    "prompt_tokens",
    "cached_tokens",
    "prefill_tokens",
    "recomputed_tokens",
    "padded_tokens",
    "output_tokens",
    "idle_row_steps",
    "preempted",
    "evicted_pages",
    "fetches",
    "compiles_after_warmup",
)


def engine_counters(engine: Engine) -> dict[str, float]:
    """The `TOTALS` of `Engine.metrics`, and two sums of them for `report`.

    prefill_slots and decode_slots: what prefill calls and rows of decode steps could have given;
    prefill_tokens and output_tokens are what they gave.
    """
    metrics = engine.metrics()
    counters = {name: metrics[name] for name in TOTALS}
    counters["prefill_slots"] = counters["prefill_tokens"] + counters["padded_tokens"]
    counters["decode_slots"] = counters["output_tokens"] + counters["idle_row_steps"]
    return counters


@dataclass(frozen=True)
class Occupancy:
    """What was in use at `time_s`: requests with a row, requests without one yet, pages."""

    time_s: float
    num_running: int
    num_waiting: int
    num_pages: int


def occupancy(engine: Engine, time_s: float, num_under_way: int) -> Occupancy:
    """That of `engine`, which has `num_under_way` requests, at `time_s`."""
    scheduler = engine.scheduler
    num_waiting = scheduler.num_waiting
    num_pages = sum(shard.pool.num_held for shard in scheduler.shards)
    return Occupancy(time_s, num_under_way - num_waiting, num_waiting, num_pages)
