"""`jaxinfer fetch`: a model's checkpoint, on this machine."""

from __future__ import annotations

import argparse
import sys

from jaxinfer.cli.progress import under_way

SUMMARY = "download a model, once"

USAGE = "ALIAS|HUB_ID [--root DIR]"

EXAMPLES = """\
examples:
  jaxinfer fetch smollm2-135m
  jaxinfer fetch HuggingFaceTB/SmolLM2-135M-Instruct
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes to `parser`."""
    parser.add_argument("model", metavar="ALIAS|HUB_ID", help="what to fetch")
    parser.add_argument(
        "--root",
        default="checkpoints",
        metavar="DIR",
        help="where aliases are kept (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """0, once the checkpoint lies there complete; prints its path."""
    from jaxinfer.checkpoint import resolve  # noqa: PLC0415  (imports jax)

    with under_way(f"Fetching {args.model} ...", sys.stderr):
        path = resolve(args.model, args.root)
    print(path)
    return 0
