"""`jaxinfer convert`: any checkpoint as a folder of the native form, tokenizer included."""

from __future__ import annotations

import argparse
import functools
import sys

from jaxinfer.cli.progress import progress_bars, under_way
from jaxinfer.config import DTYPES

SUMMARY = "write a model as an Orbax folder, which any number of devices can read"

USAGE = "SRC DST [--dtype DTYPE]"

EXAMPLES = """\
examples:
  jaxinfer convert smollm2-135m checkpoints/smollm2-135m-orbax
  jaxinfer convert path/to/model.gguf model-f32 --dtype float32
  jaxinfer generate --model model-f32 "Once upon a time"
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what this command takes to `parser`."""
    parser.add_argument(
        "source", metavar="SRC", help="alias, GGUF file, Hugging Face folder or hub id"
    )
    parser.add_argument("target", metavar="DST", help="folder to write; new, or empty")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=DTYPES,
        help="type of the weights in it (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """0, once the folder is there, whole; prints its path."""
    import jax  # noqa: PLC0415

    from jaxinfer.checkpoint import (  # noqa: PLC0415  (imports jax)
        load_params,
        open_checkpoint,
        require_new,
        resolve,
        save_orbax,
    )

    require_new(args.target)
    jax.config.update("jax_platforms", "cpu")  # the weights only pass through the host's memory
    checkpoint = open_checkpoint(resolve(args.source))
    with progress_bars(sys.stderr) as report:
        progress = functools.partial(report, "loading") if report else None
        params = load_params(checkpoint, dtype=args.dtype, progress=progress)
    with under_way(f"Writing {args.target} ...", sys.stderr):
        save_orbax(args.target, checkpoint.config, params, checkpoint.path)
    print(args.target)
    return 0
