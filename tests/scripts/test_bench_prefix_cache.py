"""What the prefix cache saves of a trace is what its hashes allow, to the token."""

import json

import pytest

from jaxinfer.bench.traces import TracedRequest
from scripts import bench_prefix_cache as script

# Prompt tokens in blocks of 512, output tokens, hashes; with `divide=64` a block is 8 tokens.
ROWS = [
    (1300, 200, [0, 1, 2]),  # 21 tokens: pages 0 and 01
    (1536, 64, [0, 1, 3]),  # 24: shares both
    (700, 64, [5, 6]),  # 11: nothing
    (1024, 64, [0, 1]),  # 16: all its pages are there, but its last token is to be computed
    (2048, 128, [0, 1, 3, 7]),  # 32: three pages
    (1100, 64, [5, 1, 2]),  # 18: page 5 is there; 1 and 2 never came behind it
]
SHAREABLE = [0, 16, 0, 8, 24, 8]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text(
        "\n".join(json.dumps(dict(zip(names, (i, *row)))) for i, row in enumerate(ROWS))
    )
    return path


def test_the_bound_is_what_was_counted_by_hand():
    requests = [TracedRequest(0.0, -(-n // 64), 1, tuple(hashes), 8) for n, _, hashes in ROWS]
    for count in range(1, len(ROWS) + 1):
        assert script.num_shareable(requests[:count], 8) == sum(SHAREABLE[:count])
    # Pages of 4: of 21, 24, 11, 16, 32 and 18 tokens what is full, begins alike, and is not last.
    assert script.num_shareable(requests, 4) == 0 + 16 + 0 + 12 + 24 + 8
    with pytest.raises(ValueError, match="page_size=16 does not divide the 8 tokens"):
        script.num_shareable(requests, 16)
    with pytest.raises(ValueError, match="no prefix hashes"):
        script.num_shareable([TracedRequest(0.0, 9, 1)], 8)


def test_the_engine_reaches_the_bound(trace, capsys):
    argv = ["--trace", str(trace), "--divide", "64", "--page-size", "8", "--concurrency", "2"]
    script.main([*argv, "--pools"])
    first, bound, _, whole = capsys.readouterr().out.splitlines()
    assert first == "6 requests, 122 prompt tokens; the hashes let 56 be shared:"
    assert bound.startswith(f"{56 / 122:.4%}, ")
    _, _, used, cached, rate, of_bound, evicted, preempted, _ = whole.split()
    assert (cached, rate, of_bound) == ("56", f"{56 / 122:.4%}", "100.00%")
    assert (evicted, preempted) == ("0", "0")
    assert int(used) == 7, "distinct full pages of prompts and outputs"
