"""What a replay comes to: latencies, rates, goodput, how well the device was used; as text too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jaxinfer.bench.replay import Record, Replay

PERCENTILES = (50, 90, 99)

# Name -> how it follows from the counters that it takes.
RATIOS: dict[str, tuple[tuple[str, str], Callable[[float, float], float]]] = {
    "prefill_padding": (("prefill_tokens", "prefill_slots"), lambda used, all: 1 - used / all),
    "idle_decode_rows": (("output_tokens", "decode_slots"), lambda used, all: 1 - used / all),
    "cache_hit_rate": (("cached_tokens", "prompt_tokens"), lambda hit, all: hit / all),
}


def summary(
    replay: Replay, *, slo_ttft: float | None = None, slo_tpot: float | None = None
) -> dict[str, Any]:
    """Numbers and dicts of numbers, ready for JSON; None where there is nothing to measure.

    `ttft_ms` (from arrival to first token), `tpot_ms` (mean time per later token of a request),
    `itl_ms` (between two deliveries of tokens to a request; the tokens of one decode window are one
    delivery) and `queue_ms` (from arrival to a row) each have p50, p90 and p99.

    `goodput` counts the complete requests whose TTFT and TPOT are within `slo_ttft` and `slo_tpot`
    seconds; a request of one token has no TPOT to miss. None without either.

    `device_share` is the share of the time with work in which the host waited for the device: the
    device was busy for that long at least. The rest, the host was busy itself.

    `engine` holds the engine's counters, and the ratios that follow from them: prefill_padding (of
    the tokens that prefill calls computed, those that were none), idle_decode_rows (of the rows
    that decode steps computed), cache_hit_rate (of prompt tokens).
    """
    records, seconds = replay.records, replay.duration_s
    num_prompt = sum(record.num_prompt for record in records)
    num_output = sum(len(record.token_times_s) for record in records)
    return {
        "num_requests": len(records),
        "num_incomplete": sum(not record.is_complete for record in records),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "duration_s": seconds,
        "idle_s": replay.idle_s,
        "requests_per_s": len(records) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_prompt + num_output) / seconds,
        "ttft_ms": percentiles(record.ttft_s for record in records),
        "tpot_ms": percentiles(record.tpot_s for record in records),
        "itl_ms": percentiles(gap for record in records for gap in record.itl_s),
        "queue_ms": percentiles(record.queue_s for record in records),
        "goodput": goodput(records, seconds, slo_ttft, slo_tpot),
        "device_share": replay.wait_s / max(seconds - replay.idle_s, 1e-9),
        "engine": {**replay.counters, **_ratios(replay.counters)},
    }


def percentiles(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """p50, p90 and p99 of those that are not None, in ms, linear between two; None if all are."""
    known = [one for one in seconds if one is not None]
    if not known:
        return None
    found = np.percentile(known, PERCENTILES) * 1e3
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


def goodput(
    records: Iterable[Record], duration_s: float, slo_ttft: float | None, slo_tpot: float | None
) -> dict[str, float | None] | None:
    """Share and rate of the complete requests within the limits; None if no limit is given."""
    if slo_ttft is None and slo_tpot is None:
        return None

    def is_good(record: Record) -> bool:
        times = (record.ttft_s, slo_ttft), (record.tpot_s, slo_tpot)
        return record.is_complete and all(
            time is None or limit is None or time <= limit for time, limit in times
        )

    good = [is_good(record) for record in records]
    return {
        "slo_ttft_s": slo_ttft,
        "slo_tpot_s": slo_tpot,
        "share": sum(good) / len(good),
        "requests_per_s": sum(good) / duration_s,
    }


def _ratios(counters: dict[str, float]) -> dict[str, float]:
    """Those of `RATIOS` whose counters are there and have counted something."""
    found = {}
    for name, ((part, whole), ratio) in RATIOS.items():
        if part in counters and counters.get(whole):
            found[name] = ratio(counters[part], counters[whole])
    return found


def table(found: dict[str, Any]) -> str:
    """A `summary` as lines for a person."""
    f = found
    failed = f", {f['num_incomplete']} of them cut short" if f["num_incomplete"] else ""
    lines = [
        f"requests  {f['num_requests']:,}{failed}, in {f['duration_s']:.2f} s: "
        f"{f['requests_per_s']:.2f} per s",
        f"tokens    {f['prompt_tokens']:,} in, {f['output_tokens']:,} out: "
        f"{f['output_tokens_per_s']:,.1f} out per s, {f['total_tokens_per_s']:,.1f} in all per s",
        "",
        f"{'ms':<9}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES),
    ]
    for label in ("ttft", "tpot", "itl", "queue"):
        spread = f[f"{label}_ms"] or {}
        cells = (f"{spread[f'p{p}']:>12,.1f}" if spread else f"{'-':>12}" for p in PERCENTILES)
        lines.append(f"{label.upper() if label != 'queue' else label:<9}" + "".join(cells))
    lines.append("")
    if f["goodput"] is not None:
        lines.append(_goodput_line(f["goodput"]))
    lines.append(
        f"device    busy {f['device_share']:.1%} of the time at least, the host the rest; "
        f"{f['idle_s']:.2f} s without work"
    )
    for name, value in f["engine"].items():
        text = f"{value:.1%}" if name in RATIOS else f"{value:,}"
        lines.append(f"engine    {name.replace('_', ' ')} {text}")
    return "\n".join(lines)


def _goodput_line(found: dict[str, float | None]) -> str:
    limits = [
        f"{name} <= {found[key]:g} s"
        for name, key in (("TTFT", "slo_ttft_s"), ("TPOT", "slo_tpot_s"))
        if found[key] is not None
    ]
    return (
        f"goodput   {found['share']:.1%} of requests, {found['requests_per_s']:.2f} per s "
        f"({', '.join(limits)})"
    )
