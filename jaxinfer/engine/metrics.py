"""`Metrics`: histograms of what requests experience. `Histogram`: one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.sched import Request

# Seconds: three buckets a decade, from a token's time on an accelerator to a long queue.
SECONDS = (
    *(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0),
)


class Histogram:
    """How many values fell into each bucket: that of the first bound which they do not exceed."""

    def __init__(self, bounds: Sequence[float] = SECONDS):
        self.bounds = tuple(bounds)
        self.count, self.total = 0, 0.0
        self._counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Returns None; `value` is counted."""
        self.count += 1
        self.total += value
        self._counts[bisect_left(self.bounds, value)] += 1

    def quantile(self, q: float) -> float | None:
        """The bound that a share `q` of the values does not exceed; None of no values."""
        if not self.count:
            return None
        seen, bounds = 0, (*self.bounds, float("inf"))
        for bound, count in zip(bounds, self._counts):
            seen += count
            if seen >= q * self.count:
                return bound
        raise AssertionError("a value is in no bucket")

    def snapshot(self) -> dict[str, Any]:
        """`count`, `sum`, upper bounds `p50`, `p90`, `p99`, and `buckets`: cumulative, by bound."""
        cumulative, seen = {}, 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts):
            seen += count
            cumulative[bound] = seen
        quantiles = {f"p{q}": self.quantile(q / 100) for q in (50, 90, 99)}
        return {"count": self.count, "sum": self.total, **quantiles, "buckets": cumulative}


@dataclass
class Metrics:
    """Of all requests since the engine was made; seconds.

    Attributes:
        queue_s: from arrival to a row. ttft_s: to the first token. e2e_s: to the end.
        itl_s: between two deliveries of tokens to a request. tpot_s: of a request that is over, the
            mean time of its tokens after the first.
        output_tokens: read so far.
    """

    queue_s: Histogram = field(default_factory=Histogram)
    ttft_s: Histogram = field(default_factory=Histogram)
    itl_s: Histogram = field(default_factory=Histogram)
    tpot_s: Histogram = field(default_factory=Histogram)
    e2e_s: Histogram = field(default_factory=Histogram)
    output_tokens: int = 0

    def observe(self, request: Request, num_new: int, last_token: float | None) -> None:
        """Returns None; `request` just got `num_new` tokens, and those before at `last_token`."""
        times = request.times
        arrival, first, now = times.arrival, times.first_token, times.last_token
        assert arrival is not None and first is not None and now is not None
        self.output_tokens += num_new
        if last_token is None:
            assert times.first_scheduled is not None
            self.queue_s.add(times.first_scheduled - arrival)
            self.ttft_s.add(first - arrival)
        else:
            self.itl_s.add(now - last_token)
        if request.finish_reason is not None:
            self.e2e_s.add(now - arrival)
            if len(request.output_ids) > 1:
                self.tpot_s.add((now - first) / (len(request.output_ids) - 1))

    def snapshot(self) -> dict[str, Any]:
        """Each by name, histograms as `Histogram.snapshot` gives them."""
        return {
            name: value.snapshot() if isinstance(value, Histogram) else value
            for name, value in vars(self).items()
        }
