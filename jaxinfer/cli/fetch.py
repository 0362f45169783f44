"""`jaxinfer fetch`: a model's checkpoint, in the folder of checkpoints."""

from __future__ import annotations

import argparse
import sys

from jaxinfer.cli.progress import progress_bars

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
        help="the folder of checkpoints (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """0, once the checkpoint lies complete in its folder, whose path is printed."""
    from jaxinfer.checkpoint.fetch import fetch  # noqa: PLC0415  (slow to import)

    with progress_bars(sys.stderr) as progress:
        path = fetch(args.model, args.root, progress=progress)
    print(path)
    return 0
