"""README.md keeps what a first reader needs, and its example answers."""

from __future__ import annotations

import re

import numpy as np

from .documents import DOCS, NAME, README, blocks, commands, run_python, write_model

TEXT = README.read_text(encoding="utf-8")


def test_text_in_text_out(tmp_path, monkeypatch, capsys):
    write_model(tmp_path / NAME)
    monkeypatch.chdir(tmp_path)
    names = run_python(README)
    answer = names["output"].outputs[0]
    printed = capsys.readouterr().out
    assert answer.text and printed.endswith(answer.text)
    assert len(answer.token_ids) == 64 or answer.finish_reason == "stop"
    # Two answers before it: text (which may hold line ends), reason and TTFT.
    assert len(re.findall(r" (?:length|stop) [\d.e-]+\n", printed[: -len(answer.text)])) == 2


def test_what_a_first_reader_needs_is_there():
    assert [block.text.count("LLM(") for block in blocks(README, "python")] == [1]
    lines = [command.line for command in commands(README)]
    assert [line.split()[1] for line in lines if line.startswith("make ")] == ["demo", "test"]
    named = {line.split()[1] for line in lines if line.startswith("jaxinfer ")}
    assert named >= {"fetch", "generate", "chat", "convert", "info"}
    assert [page.name for page in DOCS if f"](docs/{page.name})" not in TEXT] == []


def test_the_parts_are_folders():
    tree = next(block.text for block in blocks(README, "") if block.text.startswith("jaxinfer/"))
    parts = re.findall(r"^(?:  )?(\w+)/ ", tree, re.MULTILINE)
    folder = README.parent
    expected = {path.name for path in (folder / "jaxinfer").iterdir() if path.is_dir()}
    assert set(parts) >= expected - {"__pycache__"}


def test_the_measured_bound_follows_from_its_columns():
    """MB per step over ms per step, as a share of the bandwidth that the page names."""
    bandwidth = float(re.findall(r"read ([\d.]+) GB/s", TEXT)[0])
    rows = re.findall(
        r"^\| \w+ \| \d+ \| [\d.]+ \| ([\d.]+) \| (\d+) \| ([\d.]+) \|", TEXT, re.MULTILINE
    )
    assert len(rows) == 6
    for ms, megabytes, share in rows:
        np.testing.assert_allclose(
            float(megabytes) / float(ms) / bandwidth, float(share), atol=0.01
        )
