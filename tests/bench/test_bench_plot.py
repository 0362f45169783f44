"""The picture of a replay: the figures are in it; where it cannot be drawn, the remedy is said."""

import sys

import pytest
from matplotlib.figure import Figure

from jaxinfer.bench.counters import Occupancy
from jaxinfer.bench.plot import save_plot
from jaxinfer.bench.replay import Record, Replay

REPLAY = Replay(
    records=(Record(5, 3, 1.0, 1.0, (1.25, 1.5, 2.0), 2.0), Record(5, 1, 0.0, 0.5, (0.5,), 0.5)),
    samples=(Occupancy(0.5, 2, 1, 9), Occupancy(2.0, 0, 3, 4)),
    start_s=0.0,
    duration_s=2.0,
    idle_s=0.0,
    wait_s=1.0,
    counters={},
)


def test_the_picture_holds_the_numbers(tmp_path, monkeypatch):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, path: (drawn.append(figure), save(figure, path))
    )
    path = tmp_path / "replay.png"
    save_plot(REPLAY, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    ttft, itl, rows, pages = drawn[0].axes
    assert ttft.lines[0].get_xdata()[1:].tolist() == [250.0, 500.0]
    assert itl.lines[0].get_xdata()[1:].tolist() == [250.0, 500.0]
    running, waiting = rows.lines
    assert (list(running.get_ydata()), list(waiting.get_ydata())) == ([2, 0], [1, 3])
    assert [list(xy) for xy in pages.lines[0].get_data()] == [[0.5, 2.0], [9, 4]]


def test_without_matplotlib_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'jaxinfer\[plot\]'"):
        save_plot(REPLAY, tmp_path / "replay.png")
