"""The benchmark and the tuner of kernels at toy size, interpreted: what they print and keep."""

import json

import pytest

from pallas_kernels.paged_attention.measure import Shape
from scripts import bench_kernels, tune_kernels

TOY = ["--rows", "2", "--kv-heads", "1", "--group", "2", "--head-dim", "16", "--calls", "2"]


def test_the_benchmark_checks_and_counts(capsys):
    here = ["--implementation", "mosaic_tpu_interpreted", "--bound-size", "64"]
    size = ["--context", "24", "--chunk", "8", "--page-sizes", "8", "--dtypes", "float32"]
    assert bench_kernels.main([*TOY, *here, *size]) == 0
    _, _, decode, prefill, verdict = capsys.readouterr().out.splitlines()
    assert decode.startswith("decode 2 x 1 of 24, float32, page 8")
    assert prefill.startswith("prefill 1 x 8 of 24, float32, page 8")
    assert verdict == "All results are right."
    for line in (decode, prefill):
        microseconds, gigabytes = (float(line.split("|")[i].split()[0]) for i in (2, 3))
        rows = 2 if line is decode else 1
        # Keys and values of 24 tokens, 16 numbers of 4 bytes each; printed to a tenth.
        assert abs(rows * 24 * 2 * 16 * 4 / microseconds / 1e3 - gigabytes) <= 0.06


def test_a_wrong_result_fails(capsys, monkeypatch):
    monkeypatch.setattr(bench_kernels, "error_of", lambda *args: 0.5)
    monkeypatch.setattr(bench_kernels, "seconds_per_call", lambda *args: 1.0)
    size = ["--context", "8", "--chunk", "4", "--page-sizes", "8", "--dtypes", "bfloat16"]
    assert bench_kernels.main([*TOY, *size, "--bound-size", "64"]) == 1
    assert capsys.readouterr().out.endswith("A RESULT IS WRONG.\n")


def test_the_work_of_a_shape():
    shape = Shape(3, 10, 4, kv_heads=2, group=3, head_dim=64, page_size=4, dtype="int8")
    # Queries at 6..9 see 7, 8, 9 and 10 keys.
    assert shape.flops == 3 * (7 + 8 + 9 + 10) * 6 * 64 * 4
    assert shape.cache_bytes == 3 * 10 * 2 * 128
    assert shape.pages_per_row == 3


@pytest.fixture
def timed(monkeypatch):
    """Sizes -> seconds, instead of a clock: more pages are faster, up to 16 of them."""
    monkeypatch.setattr(
        tune_kernels,
        "seconds_per_call",
        lambda call, *_: abs(call.keywords["blocks"].pages - 16) + 1.0,
    )


def test_the_tuner_keeps_the_fastest(timed, tmp_path, capsys):
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"TPU v6 lite": {"other": {"pages": 1, "queries": 1}}}))
    size = ["--contexts", "256", "--queries", "1", "--page-sizes", "16", "--dtypes", "float32"]
    assert tune_kernels.main([*TOY, *size, "--interpret", "--out", str(path)]) == 0
    table = json.loads(path.read_text())
    assert table.pop("TPU v6 lite") == {"other": {"pages": 1, "queries": 1}}
    (rows,) = table.values()
    assert rows == {"q1 g2 k1 p16 l128 m16 float32": {"pages": 16, "queries": 1}}
    assert "fastest: Blocks(pages=16, queries=1)" in capsys.readouterr().out
