"""`jaxinfer bench`: a tiny model serves a trace, and the figures are those of the trace."""

import dataclasses
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxinfer import ParallelConfig, models
from jaxinfer.bench.replay import Record, Replay
from jaxinfer.bench.timeline import TRACKS
from jaxinfer.cli import bench as bench_command
from jaxinfer.cli import main
from jaxinfer.cli.startup import Startup
from jaxinfer.config import EngineConfig

FOLDER = Path(__file__).parents[1] / "data" / "tiny" / "llama"
SIZES = (
    *("--dtype", "float32", "--max-num-seqs", "1", "--prefill-chunk", "16", "--page-size", "8"),
    *("--max-window", "4"),
)
ROWS = [(0, 700, 48, [0, 1]), (40, 512, 20, [0]), (90, 1500, 600, [0, 2, 3])]


@pytest.fixture
def trace(tmp_path):
    """Three requests in Mooncake's form."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, row))) for row in ROWS))
    return path


def bench(*argv):
    return main(["bench", *map(str, argv)])


def test_a_trace_is_served_token_for_token(trace, tmp_path, capsys):
    timeline, plot = tmp_path / "timeline.json", tmp_path / "plot.svg"
    code = bench(
        *("--model", FOLDER, "--trace", trace, "--divide", 16, "--clip", "60,8", *SIZES),
        *("--concurrency", 2, "--slo-ttft", 1000, "--slo-tpot", 1000, "--json"),
        *("--timeline", timeline, "--plot", plot),
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    found = json.loads(captured.out)
    # 700, 512 and 1500 tokens / 16, at most 60; 48, 20 and 600 / 16, at most 8.
    sizes = [(44, 3), (32, 2), (60, 8)]
    assert (found["num_requests"], found["num_incomplete"]) == (3, 0)
    assert found["prompt_tokens"] == sum(n for n, _ in sizes)
    assert found["output_tokens"] == sum(n for _, n in sizes)
    assert found["max_model_len"] == 72, "the longest request has 68 tokens, in pages of 8"
    assert (found["dtype"], found["kv_dtype"]) == ("float32", "float32")
    assert (found["loop"], found["num_pages"]) == ("2 under way", 9)
    assert found["parallel"] == "one device"
    assert found["goodput"]["share"] == 1.0
    assert found["requests_per_s"] == pytest.approx(3 / found["duration_s"])
    assert found["output_tokens_per_s"] == pytest.approx(13 / found["duration_s"])
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= 1e3 * found["duration_s"]
    assert 0 < found["device_share"] < 1
    assert found["engine"]["compiles_after_warmup"] == 0
    check_startup(found["startup"])
    check_counters(json.loads(timeline.read_text()))
    check_work(json.loads(timeline.read_text()), sizes, found)
    assert "<svg" in plot.read_text()


def check_startup(startup):
    """Prefill of 1x16 alone, windows of one row, and what all engines have besides."""
    assert startup["programs"] == 1 + 1 + 6
    assert 0 <= startup["cached_programs"] <= startup["programs"]
    assert all(startup[f"{part}_s"] > 0 for part in ("import", "load", "compile", "first_token"))


def check_counters(trace):
    events = trace["traceEvents"]
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == list(TRACKS)
    pages = [event["args"]["in use"] for event in events if event["name"] == "pages"]
    # The longest request, alone in the engine as each of them, has 68 tokens.
    assert max(pages) == 9 and pages[-1] == 0
    requests = [event["args"] for event in events if event["name"] == "requests"]
    assert all(one["running"] <= 1 and one["waiting"] <= 1 for one in requests)
    assert {"running": 1, "waiting": 1} in requests
    assert requests[-1] == {"running": 0, "waiting": 0}


def check_work(trace, sizes, found):
    work = [event for event in trace["traceEvents"] if "rows" in event["args"]]
    num_tokens = {"prefill": 0, "decode": 0}
    for event in work:
        kind, shape = event["name"].split()
        assert kind == "prefill" or shape in ["1x1", "1x2", "1x3", "1x4"]
        assert event["args"]["rows"] == 1
        num_tokens[kind] += event["args"]["tokens"]
    # The first token of each output is the prefill's.
    assert num_tokens == {
        "prefill": sum(num_prompt for num_prompt, _ in sizes) - found["engine"]["cached_tokens"],
        "decode": sum(num_output - 1 for _, num_output in sizes),
    }
    times = [(event["ts"], event["ts"] + event["dur"]) for event in work]
    assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(times)), "overlap"
    assert times[0][0] >= 0


@pytest.fixture
def calls(monkeypatch):
    """What `replay` is called with by commands whose engine is a bare configuration.

    It reports that a request of 4 tokens has got 1 of 2.
    """
    seen = []
    engine = SimpleNamespace(
        config=EngineConfig(max_num_seqs=3),
        num_valid_ids=50,
        scheduler=SimpleNamespace(shards=(None,)),
    )
    result = Replay((Record(4, 2, 0.0, 0.0, (0.5,), 0.5),), (), 0.0, 1.0, 0.0, 0.5, {})

    def serve(engine, requests, prompts, **how):
        seen.append((requests, [len(prompt) for prompt in prompts], how["concurrency"]))
        return result

    startup = Startup(1.0, 2.0, 3.25, 19, 17, 0.5)
    monkeypatch.setattr(bench_command, "make_engine", lambda *args: (engine, startup))
    monkeypatch.setattr("jaxinfer.bench.replay.replay", serve)
    return seen


@pytest.mark.parametrize(
    ("argv", "concurrency", "arrivals", "loop"),
    [
        ((), 3, (0.0, 0.04), "3 under way"),
        (("--concurrency", 5), 5, (0.0, 0.04), "5 under way"),
        (("--open",), None, (0.0, 0.04), "open, 1 times as fast"),
        (("--open", "--speedup", 4), None, (0.0, 0.01), "open, 4 times as fast"),
    ],
)
def test_the_loop_is_as_asked(calls, trace, capsys, argv, concurrency, arrivals, loop):
    assert bench("--model", "m", "--trace", trace, "--requests", 2, "--json", *argv) == 1
    ((requests, prompt_lens, seen),) = calls
    assert seen == concurrency
    assert tuple(one.arrival_s for one in requests) == pytest.approx(arrivals)
    assert prompt_lens == [700, 512]
    assert json.loads(capsys.readouterr().out)["loop"] == loop


def test_a_request_without_all_its_tokens_is_exit_code_1_and_in_the_table(calls, capsys):
    assert bench("--model", "m", "--fixed", "4,2,7", "--requests", 5) == 1
    assert calls[0][1] == [4] * 5
    about, startup, first, second, *rest = capsys.readouterr().out.splitlines()
    assert startup == (
        "start-up  import 1.00 s, load 2.00 s, compile 3.25 s (19 programs, 17 of them from the "
        "cache), first token 0.50 s"
    )
    assert about.startswith("model m, dtype bfloat16, device cpu, parallel one device, traffic ")
    assert "traffic fixed 4,2,7, loop 3 under way" in about
    assert first == "requests  1, 1 of them cut short, in 1.00 s: 1.00 per s"
    assert second == "tokens    4 in, 1 out: 1.0 out per s, 5.0 in all per s"
    labels = ["ms", "TTFT", "TPOT", "ITL", "queue", "device"]
    assert [line.split()[0] for line in rest if line] == labels


def test_a_shape_gets_random_weights(tiny_llama, monkeypatch):
    shapes = {"tiny": tiny_llama.model.config}
    monkeypatch.setattr(models, "named_shape", shapes.__getitem__)
    args = SimpleNamespace(shape="tiny", model=None)
    model, make_params = bench_command.open_model(args, "reference", ParallelConfig())
    assert (model.config, model.attention) == (shapes["tiny"], "reference")
    made = jax.eval_shape(lambda: make_params("bfloat16", None))
    wanted = jax.tree.map(lambda leaf: (leaf.shape, "bfloat16"), tiny_llama.params)
    assert jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), made) == wanted


def test_what_the_model_cannot_hold_is_refused_before_its_weights_are_read(
    trace, monkeypatch, capsys
):
    monkeypatch.setattr("jaxinfer.checkpoint.load_params", None)
    assert bench("--model", FOLDER, "--trace", trace, *SIZES) == 1
    error = capsys.readouterr().err
    assert "2100 tokens, prompt and output; the model can hold 512" in error
    assert "Use --clip or --divide." in error
    argv = ("--model", FOLDER, "--fixed", "30,3,1", "--max-model-len", 32, *SIZES)
    assert bench(*argv) == 1
    assert "33 tokens, prompt and output; max_model_len=32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--fixed", "4,2,1", "--speedup", "2"), "--speedup needs --open"),
        (("--fixed", "4,2,1", "--plot", "nowhere/plot.png"), "lies in no folder"),
        (("--fixed", "4,2,1", "--timeline", "nowhere/t.json"), "lies in no folder"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(argv, message, capsys):
    assert bench("--model", "m", *argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ("--fixed", "4,2"),
        ("--fixed", "4,2,0"),
        ("--fixed", "4,2,1", "--clip", "4"),
        ("--fixed", "4,2,1", "--requests", "0"),
        ("--fixed", "4,2,1", "--slo-ttft", "0"),
        ("--fixed", "4,2,1", "--slo-tpot", "nan"),
        ("--fixed", "4,2,1", "--open", "--concurrency", "2"),
        ("--fixed", "4,2,1", "--trace", "x"),
        ("--fixed", "4,2,1", "--shape", "llama-3-8b"),
        (),
    ],
)
def test_malformed_options_are_refused(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        bench("--model", "m", *argv)
    assert stop.value.code == 2
    assert "usage: jaxinfer bench" in capsys.readouterr().err


def test_without_matplotlib_a_plot_is_refused_before_anything_is_loaded(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench("--model", "none", "--fixed", "4,2,1", "--plot", "plot.png") == 1
    assert "pip install 'jaxinfer[plot]'" in capsys.readouterr().err


def test_the_engine_options_are_those_of_the_engine_and_of_the_model():
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    known |= {"dtype", "attention", "parallel"}
    assert {option.name for option in bench_command.BENCH_OPTIONS} == known
