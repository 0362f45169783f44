"""Prints which part of a trace's prompts the prefix cache saves, beside what the trace allows.

    python scripts/bench_prefix_cache.py --trace conversation_trace.jsonl --requests 500 --divide 16

The trace gives each part of a prompt a hash (Mooncake's form). The bound follows from these hashes
alone: of each request, in order of arrival, the full pages that begin as an earlier prompt did, but
for its last token, which each must compute. The engine serves random tokens of those hashes with
random weights in the smallest of shapes: which pages are found depends on neither.

First the pool holds all that ever comes. Then it is a part of what that run had in use at its end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax

import jaxinfer
from jaxinfer.bench.prompts import make_prompts
from jaxinfer.bench.replay import needed_len, replay
from jaxinfer.bench.traces import TracedRequest, read_trace, scale
from jaxinfer.compute import Decoder
from jaxinfer.config import RopeConfig, require

COLUMNS = (
    *("pool", "pages", "used", "cached tokens", "hit rate", "of bound", "evicted", "preempted"),
    "seconds",
)


def num_shareable(requests: Sequence[TracedRequest], page_size: int) -> int:
    """Prompt tokens on pages that an earlier request of the trace has filled with the same."""
    seen: set[tuple[tuple[int, ...], int]] = set()
    found = 0
    for request in requests:
        size, hashes = request.tokens_per_hash, request.prefix_hashes
        require(hashes is not None, "The trace has no prefix hashes. Give one of Mooncake's form.")
        require(
            size % page_size == 0,
            f"page_size={page_size} does not divide the {size} tokens of a hash. "
            "Choose another, or divide by less.",
        )
        ends = range(page_size, request.num_prompt + 1, page_size)
        pages = [(hashes[: (end - 1) // size + 1], end) for end in ends]
        usable = (request.num_prompt - 1) // page_size
        shared = next((i for i, page in enumerate(pages) if page not in seen), len(pages))
        found += min(shared, usable) * page_size
        seen.update(pages)
    return found


def make_model(max_position: int) -> tuple[Decoder, object]:
    """A model that costs next to nothing, and its params."""
    config = jaxinfer.ModelConfig(
        vocab_size=4096,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rope=RopeConfig(dim=16),
        max_position=max_position,
    )
    model = Decoder(config)
    return model, model.init(jax.random.key(0), "float32")


def serve(
    requests: Sequence[TracedRequest], num_pages: int, args: argparse.Namespace
) -> tuple[dict[str, float], int]:
    """What the engine counted, and the pages in use or cached at the end."""
    max_model_len = needed_len(requests, args.page_size)
    config = jaxinfer.EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=args.concurrency,
        page_size=args.page_size,
        num_pages=num_pages,
    )
    engine = jaxinfer.Engine(*make_model(max_model_len), config, eos_ids=())
    prompts = make_prompts(requests, engine.num_valid_ids)
    counters = replay(engine, requests, prompts, concurrency=args.concurrency).counters
    engine.check_integrity()
    return counters, engine.metrics()["pages_cached"]


def run(
    label: str,
    requests: Sequence[TracedRequest],
    num_pages: int,
    bound: int,
    args: argparse.Namespace,
) -> int:
    """The pages that are in use after serving the requests; prints the line of that pool."""
    start = time.perf_counter()
    counted, in_use = serve(requests, num_pages, args)
    cells = (
        label,
        f"{num_pages:,}",
        f"{in_use:,}",
        f"{counted['cached_tokens']:,}",
        f"{counted['cached_tokens'] / counted['prompt_tokens']:.4%}",
        f"{counted['cached_tokens'] / max(bound, 1):.2%}",
        f"{counted['evicted_pages']:,}",
        f"{counted['preempted']:,}",
        f"{time.perf_counter() - start:.0f}",
    )
    print("".join(f"{cell:>14}" for cell in cells), flush=True)
    return in_use


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the bound, and a line for each pool."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trace", required=True, help="JSON lines in Mooncake's form")
    parser.add_argument("--requests", type=int, help="only the first of the trace")
    parser.add_argument("--divide", type=int, default=1, help="lengths by that")
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=16, help="requests under way")
    parser.add_argument("--pools", type=float, nargs="*", default=[0.5], help="parts of all pages")
    args = parser.parse_args(argv)
    requests = scale(read_trace(args.trace, limit=args.requests), divide=args.divide)
    total = sum(request.num_prompt for request in requests)
    bound = num_shareable(requests, args.page_size)
    print(f"{len(requests)} requests, {total:,} prompt tokens; the hashes let {bound:,} be shared:")
    print(f"{bound / total:.4%}, of pages of {args.page_size}")
    print("".join(f"{name:>14}" for name in COLUMNS))
    everything = sum(-(-(one.num_prompt + one.num_output) // args.page_size) for one in requests)
    in_use = run("unbounded", requests, everything, bound, args)
    for part in args.pools:
        run(f"{part:.0%}", requests, int(part * in_use), bound, args)


if __name__ == "__main__":
    main()
