"""`jaxinfer bench`: traffic replayed against the engine, and what it measured."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.options import ENGINE_OPTIONS, Option, UsageError, add_options, given
from jaxinfer.cli.progress import progress_bars
from jaxinfer.cli.startup import Startup, import_engine
from jaxinfer.cli.traffic import add_traffic_options, parse_positive, read_requests
from jaxinfer.config import EngineConfig, ParallelConfig

if TYPE_CHECKING:
    from jaxinfer import Engine
    from jaxinfer.bench.replay import Replay
    from jaxinfer.bench.timeline import Timeline
    from jaxinfer.bench.traces import TracedRequest
    from jaxinfer.cli.progress import Report
    from jaxinfer.compute import Decoder

DEFAULT_DTYPE = "bfloat16"
# A trace can give its requests priorities; on a command line there is no place for them.
BENCH_OPTIONS = (
    *ENGINE_OPTIONS,
    Option("policy", str, "which request goes first", choices=EngineConfig.POLICIES),
    Option("max_overtakes", int, "later requests that may go before a waiting one, by priority"),
)

SUMMARY = "replay traffic against the engine and print how fast it was"

USAGE = "--model MODEL|--shape NAMED_SHAPE --trace FILE|--fixed IN,OUT,COUNT [options]"

EXAMPLES = """\
examples:
  jaxinfer bench --model smollm2-135m --fixed 128,64,32 --concurrency 8
  jaxinfer bench --shape llama-3-8b --trace AzureLLMInferenceTrace_conv.csv --requests 500 --open
  jaxinfer bench --model smollm2-135m --trace conversation_trace.jsonl --requests 64 --divide 64
  jaxinfer bench --shape llama-3-8b --fixed 512,128,256 --slo-ttft 0.5 --slo-tpot 0.03 --json

a trace is one of:
  a CSV file with the columns TIMESTAMP,ContextTokens,GeneratedTokens, as Azure publishes them
  a file of JSON lines with timestamp (ms), input_length, output_length and hash_ids (one for each
  512 tokens of the prompt), as Mooncake publishes them: equal hashes become equal tokens; with a
  priority too, if --policy is to heed it: the lower goes first

Prompts are random tokens, the same in every run. Sampling is greedy, and every output is exactly as
long as its request says. All is compiled and warmed up before the clock starts.

what is printed:
  TTFT    from the arrival of a request until its first token, its wait in the queue included
  TPOT    mean time of each later token of a request
  ITL     between two deliveries of tokens to a request; a decode window delivers its tokens at once
  queue   from the arrival until the request had a row
  device  the host waited for the device that long; in the rest of the time with work it was busy
          itself, and the device may have been too
  engine  what the engine counted from start to end of the clock
  start-up is told apart: import of jax, the weights, all programs, the first token of the warm-up
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes to `parser`."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--model", metavar="MODEL", help="alias, path (GGUF file or Hugging Face folder) or hub id"
    )
    model.add_argument(
        "--shape", metavar="NAMED_SHAPE", help="random weights in a shape such as llama-3-8b"
    )
    add_traffic_options(parser)
    _add_output_options(parser)
    defaults = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    defaults["max_model_len"] = "what the longest request needs"
    add_options(parser, "engine", BENCH_OPTIONS, defaults)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("output")
    output.add_argument(
        "--slo-ttft",
        type=parse_positive,
        metavar="SECONDS",
        help="goodput counts requests whose first token came within that time",
    )
    output.add_argument(
        "--slo-tpot",
        type=parse_positive,
        metavar="SECONDS",
        help="and whose later tokens took at most that long each, on average",
    )
    output.add_argument("--json", action="store_true", help="print a JSON object, not a table")
    output.add_argument(
        "--timeline",
        metavar="FILE",
        help="write what device and host did when, for chrome://tracing or ui.perfetto.dev",
    )
    output.add_argument(
        "--plot",
        metavar="FILE",
        help="draw TTFT, ITL, requests and pages over time (.png, .svg, .pdf); needs matplotlib",
    )


def run(args: argparse.Namespace) -> int:
    """0 once the figures are printed; 1 if a request did not get all of its tokens."""
    if args.speedup is not None and not args.open:
        raise UsageError("--speedup needs --open: a closed loop does not look at arrivals.")
    for path in (args.timeline, args.plot):
        if path is not None and not Path(path).resolve().parent.is_dir():
            raise UsageError(f"{path} lies in no folder that exists. Make it first.")
    requests = read_requests(args)
    from jaxinfer.bench import plot, report  # noqa: PLC0415  (imports numpy)

    if args.plot is not None:
        plot.require_matplotlib()
    with progress_bars(sys.stderr) as progress:
        engine, startup = make_engine(args, requests, progress)
        result, timeline = measure(args, engine, requests, progress)
    if timeline is not None:
        write_timeline(args.timeline, timeline, result)
    if args.plot is not None:
        plot.save_plot(result, args.plot)
    found = report.summary(result, slo_ttft=args.slo_ttft, slo_tpot=args.slo_tpot)
    about = describe(args, engine)
    if args.json:
        print(json.dumps({**about, "startup": dataclasses.asdict(startup), **found}))
    else:
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        print(f"start-up  {startup}")
        print(report.table(found))
    return int(found["num_incomplete"] > 0)


def make_engine(
    args: argparse.Namespace, requests: tuple[TracedRequest, ...], progress: Report | None
) -> tuple[Engine, Startup]:
    """An engine that can serve the requests, everything compiled and run once; and how long that
    took.
    """
    import_s = import_engine()
    import jax  # noqa: PLC0415

    from jaxinfer import Engine  # noqa: PLC0415
    from jaxinfer.bench.replay import check_fits, fitting_len, warm_up  # noqa: PLC0415
    from jaxinfer.compute.decoder import stack_where_scanned  # noqa: PLC0415
    from jaxinfer.engine.programs import keep_compiled_programs  # noqa: PLC0415

    keywords = given(args, BENCH_OPTIONS)
    dtype, attention = keywords.pop("dtype", DEFAULT_DTYPE), keywords.pop("attention", None)
    parallel = keywords.pop("parallel", ParallelConfig())
    model, make_params = open_model(args, attention, parallel)
    if "max_model_len" not in keywords:
        page_size = keywords.get("page_size", EngineConfig.page_size)
        keywords["max_model_len"] = fitting_len(requests, page_size, model.config.max_position)
    config = EngineConfig(**{"kv_dtype": dtype, **keywords})
    check_fits(requests, config)
    keep_compiled_programs()
    start = time.perf_counter()
    params = stack_where_scanned(make_params(dtype, progress), model.mesh)
    params = jax.block_until_ready(params)
    load_s = time.perf_counter() - start
    engine = Engine(
        model, params, config, compile_ahead=True, progress=reporter(progress, "compiling")
    )
    first = min(record.token_times_s[0] for record in warm_up(engine).records)
    metrics = engine.metrics()
    return engine, Startup.of(metrics, import_s=import_s, load_s=load_s, first_token_s=first)


def open_model(
    args: argparse.Namespace, attention: str | None, parallel: ParallelConfig
) -> tuple[Decoder, Callable[[str, Report | None], Any]]:
    """The model over so many devices, and what makes its params, given their dtype: read, or random
    for a shape.
    """
    import jax  # noqa: PLC0415

    from jaxinfer.checkpoint import load_params, open_checkpoint, resolve  # noqa: PLC0415
    from jaxinfer.compute import Decoder  # noqa: PLC0415
    from jaxinfer.compute.sharding import fit_config, make_mesh, param_shardings  # noqa: PLC0415
    from jaxinfer.models import named_shape  # noqa: PLC0415

    mesh = make_mesh(parallel)
    if args.shape is not None:
        config = fit_config(named_shape(args.shape), parallel.model)
        model = Decoder(config, attention, mesh=mesh)

        def random(dtype: str, progress: Report | None) -> Any:
            init, key = functools.partial(model.init, dtype=dtype), jax.random.key(0)
            if mesh is None:
                return init(key)
            where = param_shardings(mesh, jax.eval_shape(init, key))
            return jax.jit(init, out_shardings=where)(key)

        return model, random
    checkpoint = open_checkpoint(resolve(args.model))
    config = fit_config(checkpoint.config, parallel.model)
    return Decoder(config, attention, mesh=mesh), lambda dtype, progress: load_params(
        checkpoint, dtype=dtype, mesh=mesh, progress=reporter(progress, "loading")
    )


def measure(
    args: argparse.Namespace,
    engine: Engine,
    requests: tuple[TracedRequest, ...],
    progress: Report | None,
) -> tuple[Replay, Timeline | None]:
    """What serving the requests brought, and the timeline if one is asked for."""
    from jaxinfer.bench.prompts import make_prompts  # noqa: PLC0415  (imports numpy)
    from jaxinfer.bench.replay import replay  # noqa: PLC0415
    from jaxinfer.bench.timeline import Timeline  # noqa: PLC0415

    prompts = make_prompts(requests, engine.num_valid_ids)
    concurrency = None if args.open else args.concurrency or num_rows(engine)
    with contextlib.ExitStack() as stack:
        timeline = None
        if args.timeline is not None:
            timeline = engine.observer = stack.enter_context(Timeline())
        result = replay(
            engine,
            requests,
            prompts,
            concurrency=concurrency,
            progress=reporter(progress, "serving"),
        )
    return result, timeline


def num_rows(engine: Engine) -> int:
    """Requests that can decode together, on all data shards."""
    return engine.config.max_num_seqs * len(engine.scheduler.shards)


def write_timeline(path: str, timeline: Timeline, result: Replay) -> None:
    """Returns None; the trace lies at `path`."""
    from jaxinfer.bench.timeline import chrome_trace  # noqa: PLC0415

    trace = chrome_trace(timeline, result.samples, result.start_s)
    Path(path).write_text(json.dumps(trace), encoding="utf-8")


def describe(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """What was measured: model, devices, traffic and the sizes of the engine."""
    import jax  # noqa: PLC0415

    config = engine.config
    options = given(args, ENGINE_OPTIONS)
    closed = f"{args.concurrency or num_rows(engine)} under way"
    return {
        "model": args.model or args.shape,
        "dtype": options.get("dtype", DEFAULT_DTYPE),
        "device": jax.devices()[0].device_kind,
        "parallel": str(options.get("parallel", "one device")),
        "traffic": args.trace or f"fixed {','.join(map(str, args.fixed))}",
        "loop": f"open, {args.speedup or 1:g} times as fast" if args.open else closed,
        "kv_dtype": config.kv_dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "num_pages": config.cache.num_pages,
        "page_size": config.page_size,
    }


def reporter(progress: Report | None, what: str) -> Callable[[int, int], None] | None:
    """`progress` for one named piece of work."""
    return None if progress is None else functools.partial(progress, what)
