"""The comparison with a peer: both serve the same, and the figures follow from when tokens came."""

import json
import sys
from pathlib import Path

import pytest

from jaxinfer.bench.traces import TracedRequest
from scripts import bench_peers as script

from ..bench.fake_engine import FakeClock, FakeEngine

MODEL = Path(__file__).parents[1] / "data" / "tiny" / "llama"
ROWS = [(9, 4), (30, 2), (12, 9), (5, 3)]
# Stands in for transformers: the first token of each batch after 1 s, then one every 0.5 s.
FAKE = """
import json, pathlib, sys
job = json.load(sys.stdin)
pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(job))
assert (pathlib.Path(job["model"]) / "config.json").exists()
times = [[1 + i / 2 for i in range(count)] for _, count in job["requests"]]
print(json.dumps({"times_s": times, "duration_s": 10.0, "cpu_s": 7.0,
                  "num_threads": job["num_threads"], "version": "fake 1"}))
"""


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"2024-02-28 23:59:59.{i},{a},{b}" for i, (a, b) in enumerate(ROWS)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    return path


class CountingEngine(FakeEngine):
    """Says that of 64 tokens prefill calls computed 46 were some, of 16 decode rows 11."""

    def metrics(self):
        counted = {"prefill_tokens": 46, "padded_tokens": 18, "output_tokens": 11}
        # The clock of the script is a real one, in which the fake waits for nothing.
        found = super().metrics() | counted | {"idle_row_steps": 5, "wait_s": 0.0}
        return {name: self.num_steps * value for name, value in found.items()}


def test_both_serve_the_same_and_each_has_its_line(trace, tmp_path, monkeypatch, capsys):
    engine = CountingEngine(FakeClock())
    monkeypatch.setattr(script, "make_engine", lambda *args: engine)
    peer = tmp_path / "peer.py"
    peer.write_text(FAKE)
    monkeypatch.setattr(script, "PEER", peer)
    monkeypatch.setattr(script, "can_run", lambda python: python == sys.executable)
    argv = ["--trace", str(trace), "--model", str(MODEL), "--dtype", "float32"]
    script.main([*argv, "--clip", "20", "6", "--concurrency", "2"])
    about, _, ours, theirs, aims, version = capsys.readouterr().out.splitlines()
    assert about.endswith("4 requests: 46 tokens in, 15 out, 2 under way")
    job = json.loads(peer.with_suffix(".json").read_text())
    assert [(len(prompt), count) for prompt, count in job["requests"]] == [
        (9, 4),
        (20, 2),
        (12, 6),
        (5, 3),
    ]
    assert (job["batch_size"], job["num_threads"]) == (2, script.num_threads())
    name, *cells = theirs.split()
    # 61 tokens in 10 s; prefill of 2 x 20 and 2 x 12 for 46; 2 x 3 and 2 x 5 decode rows for 11.
    times = ["1,000.0", "1,000.0", "500.0", "500.0"]
    waste = [f"{1 - 46 / 64:.1%}", f"{1 - 11 / 16:.1%}"]
    assert [name, *cells] == ["transformers", "6.1", "1.5", *times, *waste, "-", "7.0"]
    sent = [(request.prompt, request.params.max_tokens) for _, request in engine.sent]
    assert sent == [tuple(request) for request in job["requests"]] and engine.most == 2
    assert ours.split()[0] == "jaxinfer" and len(ours.split()) == len(theirs.split())
    assert ours.split()[7:9] == waste and f"padding {waste[0]} (aim: at most 10%)" in aims
    assert version == "fake 1"


def test_without_the_peer_it_says_so(trace, monkeypatch, capsys):
    engine = type("Engine", (), {"num_valid_ids": 50})()
    monkeypatch.setattr(script, "make_engine", lambda *args: engine)
    found = dict(script.zip_columns([1.0] * len(script.COLUMNS)))
    monkeypatch.setattr(script, "ours", lambda *args: found)
    monkeypatch.setattr(script, "can_run", lambda python: False)
    script.main(["--trace", str(trace), "--model", str(MODEL), "--peer-python", "nowhere/python"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "nowhere/python cannot import torch and transformers: no peer is measured."
    assert [line.split()[0] for line in lines[3:]] == ["jaxinfer", "padding"]


def test_an_interpreter_without_the_peer_cannot_run_it(tmp_path):
    assert not script.can_run(str(tmp_path / "python"))
    wrong = tmp_path / "wrong"
    wrong.write_text("#!/bin/sh\nexit 1\n")
    wrong.chmod(0o755)
    assert not script.can_run(str(wrong))


def test_a_batch_wastes_what_its_longest_takes_more():
    requests = [TracedRequest(0.0, a, b) for a, b in ROWS]
    padding, idle = script.batch_waste(requests, 3)
    assert padding == pytest.approx(1 - 56 / (3 * 30 + 5))
    assert idle == pytest.approx(1 - 14 / (3 * 8 + 2))
    assert script.batch_waste(requests[:1], 3) == (0.0, 0.0)
