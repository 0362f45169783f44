"""Progress: on a terminal a bar per piece of work, or a line; elsewhere nothing."""

import io

from jaxinfer.cli.progress import progress_bars, under_way


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_no_bars():
    stream = io.StringIO()
    with progress_bars(stream) as report:
        assert report is None
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_per_piece_of_work():
    stream = Terminal()
    with progress_bars(stream) as report:
        assert report is not None
        report("weights", 0, 10)
        report("weights", 10, 10)
        report("programs", 1, 2)
    drawn = stream.getvalue()
    assert "weights" in drawn
    assert "10.0/10.0" in drawn
    assert "programs" in drawn


def test_work_of_unknown_length_has_a_line_on_a_terminal_only():
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with under_way("Fetching ...", stream):
            pass
    assert (terminal.getvalue(), pipe.getvalue()) == ("Fetching ...\r\x1b[K", "")
