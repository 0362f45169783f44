"""The options that say what traffic a command makes, and the requests that they describe."""

from __future__ import annotations

import argparse
import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxinfer.bench.traces import TracedRequest


def parse_counts(text: str, *, form: str) -> tuple[int, ...]:
    """The counts, at least 1 each, of a list that is as long as `form`, such as IN,OUT."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if len(counts) != len(form.split(",")) or min(counts) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {form}. Write {len(form.split(','))} numbers of at least 1, "
            "with commas and no spaces."
        )
    return counts


def parse_count(text: str) -> int:
    """A whole number of at least 1."""
    return parse_counts(text, form="N")[0]


def parse_positive(text: str) -> float:
    """A number greater than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number greater than 0.")
    return value


def add_traffic_options(parser: argparse.ArgumentParser) -> None:
    """Adds the group of options that `read_requests` reads, and the loop."""
    traffic = parser.add_argument_group("traffic")
    source = traffic.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", help="recorded traffic, see below")
    source.add_argument(
        "--fixed",
        type=functools.partial(parse_counts, form="IN,OUT,COUNT"),
        metavar="IN,OUT,COUNT",
        help="COUNT requests of IN prompt and OUT output tokens, all there at the start",
    )
    traffic.add_argument(
        "--requests", type=parse_count, metavar="N", help="only the first N requests of the trace"
    )
    traffic.add_argument(
        "--divide",
        type=parse_count,
        default=1,
        metavar="D",
        help="divide lengths by D, so that a small model can serve the trace of a large one",
    )
    traffic.add_argument(
        "--clip",
        type=functools.partial(parse_counts, form="IN,OUT"),
        metavar="IN,OUT",
        help="then cut prompts to IN and outputs to OUT tokens",
    )
    loop = traffic.add_mutually_exclusive_group()
    loop.add_argument(
        "--open", action="store_true", help="send each request when the trace says that it came"
    )
    loop.add_argument(
        "--concurrency",
        type=parse_count,
        metavar="N",
        help="keep N requests under way, whenever they came (default: as many as --max-num-seqs)",
    )
    traffic.add_argument(
        "--speedup", type=parse_positive, metavar="X", help="with --open: X times as fast"
    )


def read_requests(args: argparse.Namespace) -> tuple[TracedRequest, ...]:
    """The requests that the options describe."""
    from jaxinfer.bench.traces import fixed_trace, read_trace, scale  # noqa: PLC0415

    if args.fixed is not None:
        requests = fixed_trace(*args.fixed)[: args.requests]
    else:
        requests = read_trace(args.trace, limit=args.requests)
    return scale(requests, divide=args.divide, clip=args.clip, speedup=args.speedup or 1.0)
