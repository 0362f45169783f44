"""Prints how fast a trace is served by this engine and by transformers' `generate`, in one run.

    python scripts/bench_peers.py --trace AzureLLMInferenceTrace_conv.csv

Both get the same weights, prompts, output lengths and number of threads. The engine keeps as many
requests under way as the batches of `generate` have; a batch starts when the one before is over, so
that its requests, like ours, wait for no other. The peer runs in a process of its own, of
--peer-python if torch and transformers are installed somewhere else.

Tokens are those that were asked for, prompt and output. Padding is the share of what prefill
computed for nothing; idle rows that of decode steps. CPU s is processor time of all threads: it
says who did less, also where other programs take a share of the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

import jaxinfer
from jaxinfer.bench.prompts import make_prompts
from jaxinfer.bench.replay import Record, fitting_len, replay, warm_up
from jaxinfer.bench.report import percentiles, summary
from jaxinfer.bench.traces import TracedRequest, read_trace, scale
from jaxinfer.checkpoint import save_huggingface
from jaxinfer.compute import Decoder
from jaxinfer.engine.programs import keep_compiled_programs

PEER = Path(__file__).with_name("peer_transformers.py")
MOST_PADDING, LEAST_DEVICE = 0.10, 0.97  # what is aimed at
COLUMNS = (
    *("tokens/s", "out/s", "TTFT p50", "p90", "TPOT p50", "p90", "padding", "idle rows"),
    *("device", "CPU s"),
)


def make_engine(
    model: Decoder, params: Any, requests: Sequence[TracedRequest], num_rows: int
) -> jaxinfer.Engine:
    """An engine for the requests, compiled and warm."""
    page_size = jaxinfer.EngineConfig.page_size
    max_model_len = fitting_len(requests, page_size, model.config.max_position)
    config = jaxinfer.EngineConfig(max_model_len=max_model_len, max_num_seqs=num_rows)
    engine = jaxinfer.Engine(model, params, config, eos_ids=(), compile_ahead=True)
    warm_up(engine)
    return engine


def ours(engine: jaxinfer.Engine, requests, prompts, num_rows: int) -> dict[str, float]:
    """The figures of this engine, by `COLUMNS`."""
    start = time.process_time()
    result = replay(engine, requests, prompts, concurrency=num_rows)
    cpu_s = time.process_time() - start
    found = summary(result)
    assert not found["num_incomplete"]
    shares = found["engine"]
    return figures(
        result.records,
        result.duration_s,
        shares["prefill_padding"],
        shares["idle_decode_rows"],
        found["device_share"],
        cpu_s,
    )


def figures(
    records: Sequence[Record],
    seconds: float,
    padding: float,
    idle_rows: float,
    device_share: float | None,
    cpu_s: float,
) -> dict[str, Any]:
    """A value for each of `COLUMNS`; times of tokens in ms."""
    num_output = sum(record.num_output for record in records)
    num_tokens = num_output + sum(record.num_prompt for record in records)
    ttft = percentiles(record.ttft_s for record in records)
    tpot = percentiles(record.tpot_s for record in records)
    assert ttft is not None and tpot is not None
    times = (ttft["p50"], ttft["p90"], tpot["p50"], tpot["p90"])
    rates = (num_tokens / seconds, num_output / seconds)
    return dict(zip_columns((*rates, *times, padding, idle_rows, device_share, cpu_s)))


def zip_columns(values: Sequence[Any]) -> list[tuple[str, Any]]:
    """Name and value of each column, the p90 told apart by what they are of."""
    names = [f"{COLUMNS[i - 1]} p90" if name == "p90" else name for i, name in enumerate(COLUMNS)]
    return list(zip(names, values, strict=True))


def can_run(python: str) -> bool:
    """Whether that interpreter has what the peer needs."""
    probe = [python, "-c", "import torch, transformers"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def theirs(
    python: str, folder: str, dtype: str, requests, prompts, num_rows: int
) -> tuple[dict[str, Any], str]:
    """The figures of the peer, and which version it is."""
    pairs = [(p.tolist(), one.num_output) for p, one in zip(prompts, requests, strict=True)]
    job = {
        "model": folder,
        "dtype": dtype,
        "num_threads": num_threads(),
        "batch_size": num_rows,
        "requests": pairs,
    }
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, str(PEER)],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["num_threads"] == job["num_threads"]
    records = [
        Record(len(prompt), count, 0.0, 0.0, tuple(times), times[-1])
        for (prompt, count), times in zip(pairs, result["times_s"], strict=True)
    ]
    assert all(record.is_complete for record in records)
    padding, idle_rows = batch_waste(requests, num_rows)
    found = figures(records, result["duration_s"], padding, idle_rows, None, result["cpu_s"])
    return found, result["version"]


def batch_waste(requests: Sequence[TracedRequest], num_rows: int) -> tuple[float, float]:
    """`(padding, idle_rows)`: shares of the prefill and of the decode rows of batches, in which all
    take what the longest takes, that give no token.
    """
    batches = [requests[i : i + num_rows] for i in range(0, len(requests), num_rows)]
    used = [sum(one.num_prompt for one in requests), sum(one.num_output - 1 for one in requests)]
    prefill = sum(len(batch) * max(one.num_prompt for one in batch) for batch in batches)
    decode = sum(len(batch) * max(one.num_output - 1 for one in batch) for batch in batches)
    return 1 - used[0] / prefill, 1 - used[1] / max(decode, 1)


def num_threads() -> int:
    """Threads that XLA computes with, and so the peer: one for each core that we may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def line(name: str, found: dict[str, Any]) -> str:
    """A row of the table."""
    cells = []
    for column, value in found.items():
        if value is None:
            cells.append("-")
        elif column in ("padding", "idle rows", "device"):
            cells.append(f"{value:.1%}")
        else:
            cells.append(f"{value:,.1f}")
    return f"{name:<14}" + "".join(f" {cell:>9}" for cell in cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", required=True, help="CSV of Azure, or JSON lines of Mooncake")
    parser.add_argument("--model", default="smollm2-135m", help="alias, path or hub id")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=64, help="only the first of the trace")
    parser.add_argument("--clip", type=int, nargs=2, default=[512, 128], metavar=("IN", "OUT"))
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way; a batch")
    parser.add_argument("--peer-python", default=sys.executable, help="that has transformers")
    parser.add_argument("--rounds", type=int, default=1, help="of both, in turns")
    args = parser.parse_args(argv)
    keep_compiled_programs()
    requests = scale(read_trace(args.trace, limit=args.requests), clip=tuple(args.clip))
    model, params = jaxinfer.load(args.model, dtype=args.dtype)
    engine = make_engine(model, params, requests, args.concurrency)
    prompts = make_prompts(requests, engine.num_valid_ids)
    has_peer = can_run(args.peer_python)
    totals = [sum(getattr(one, f"num_{kind}") for one in requests) for kind in ("prompt", "output")]
    print(
        f"{args.model}, {args.dtype}, {jax.devices()[0].device_kind}, {num_threads()} threads, "
        f"{len(requests)} requests: {totals[0]:,} tokens in, {totals[1]:,} out, {args.concurrency} "
        "under way"
    )
    if not has_peer:
        print(f"{args.peer_python} cannot import torch and transformers: no peer is measured.")
    print(" " * 14 + "".join(f"{name:>10}" for name in COLUMNS), flush=True)
    version = ""
    with tempfile.TemporaryDirectory() as folder:
        if has_peer:
            save_huggingface(Path(folder) / "model", model.config, params)
        for _ in range(args.rounds):
            found = ours(engine, requests, prompts, args.concurrency)
            print(line("jaxinfer", found), flush=True)
            if has_peer:
                where = args.peer_python, str(Path(folder) / "model"), args.dtype
                peer, version = theirs(*where, requests, prompts, args.concurrency)
                print(line("transformers", peer), flush=True)
    print(
        f"padding {found['padding']:.1%} (aim: at most {MOST_PADDING:.0%}), device busy "
        f"{found['device']:.1%} of the time at least (aim: {LEAST_DEVICE:.0%})"
    )
    if version:
        print(version)


if __name__ == "__main__":
    main()
