"""A replay as a picture: its latencies, and what was in use over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.bench.replay import Replay

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """Returns None; ValueError with the remedy if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401, PLC0415  (optional)
    except ImportError as error:
        raise ValueError(
            "A plot needs matplotlib, which is not installed. Run: pip install 'jaxinfer[plot]'."
        ) from error


def save_plot(replay: Replay, path: str | Path) -> None:
    """Returns None; `path` is a picture with the distributions of TTFT and ITL, and with running
    and waiting requests and pages in use over time.
    """
    require_matplotlib()
    from matplotlib.figure import Figure  # noqa: PLC0415  (optional)

    figure = Figure(figsize=(11, 7), layout="constrained")
    ttft_axes, itl_axes, row_axes, page_axes = figure.subplots(2, 2).flat
    ttft = [record.ttft_s for record in replay.records if record.ttft_s is not None]
    _distribution(ttft_axes, "TTFT", ttft)
    _distribution(itl_axes, "ITL", [gap for record in replay.records for gap in record.itl_s])
    times = [sample.time_s for sample in replay.samples]
    for name in ("running", "waiting"):
        counts = [getattr(sample, f"num_{name}") for sample in replay.samples]
        row_axes.step(times, counts, where="post", label=name)
    row_axes.set(title="requests", xlabel="s", ylim=(0, None))
    row_axes.legend()
    pages = [sample.num_pages for sample in replay.samples]
    page_axes.step(times, pages, where="post")
    page_axes.set(title="pages in use", xlabel="s", ylim=(0, None))
    figure.savefig(path)


def _distribution(axes: Axes, title: str, seconds: list[float]) -> None:
    """Draws which share of `seconds` is at most how long."""
    if seconds:
        axes.ecdf([one * 1e3 for one in seconds])
    axes.set(title=title, xlabel="ms", ylabel="share that took at most that long")
