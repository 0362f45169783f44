"""Finds the fastest sizes of the TPU kernel's steps on this chip and keeps them in tuned.json.

    python scripts/tune_kernels.py --rows 32 --contexts 2048,8192 --queries 1,512

Tries every number of pages and of queries that a step may sensibly take, checks that the result
stays what it is, and writes the fastest under the chip's `device_kind` and the call's shape. A call
of a shape that is not there goes by a rule.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from pathlib import Path

import jax
import numpy as np

from pallas_kernels.paged_attention import mosaic_tpu, paged_attention
from pallas_kernels.paged_attention.layout import LANES
from pallas_kernels.paged_attention.measure import Shape, make_operands, seconds_per_call
from pallas_kernels.paged_attention.mosaic_tpu import Blocks
from pallas_kernels.paged_attention.mosaic_tpu.blocks import CallShape

TUNED = Path(mosaic_tpu.__file__).with_name("tuned.json")
TOLERANCE = 2e-2


def candidates(shape: Shape) -> list[Blocks]:
    """Steps of 128 to 4096 keys, and of 1 query token up to 1024 rows of queries."""
    keys = [n for n in (128, 256, 512, 1024, 2048, 4096) if n <= max(LANES, shape.context)]
    pages = sorted({max(1, n // shape.page_size) for n in keys})
    tokens = [n for n in (8, 16, 32, 64, 128, 256, 512) if n * shape.group <= 1024]
    tokens = sorted({min(n, shape.queries) for n in tokens} or {shape.queries})
    return [Blocks(*sizes) for sizes in itertools.product(pages, tokens)]


def call_with(blocks: Blocks, shape: Shape, interpret: bool):
    """The kernel with steps of these sizes."""
    options = dict(window=None, soft_cap=None, sinks_N=None, layer=None, value_dim=None)
    scale = shape.head_dim**-0.5
    return functools.partial(
        mosaic_tpu.attend, scale=scale, blocks=blocks, interpret=interpret, **options
    )


def tune(shape: Shape, calls: int, interpret: bool) -> Blocks:
    """The fastest sizes for a shape, each printed with its time."""
    operands = make_operands(shape)
    reference = jax.jit(functools.partial(paged_attention, implementation="reference"))
    want = np.asarray(reference(*operands)[0])
    times: dict[Blocks, float] = {}
    for blocks in candidates(shape):
        call = call_with(blocks, shape, interpret)
        try:
            got = np.asarray(jax.jit(call)(*operands)[0])
        except jax.errors.JaxRuntimeError as error:  # too large for the chip
            print(f"  {blocks}: {str(error).splitlines()[0][:90]}")
            continue
        if np.abs(got - want).max() > TOLERANCE:
            raise SystemExit(f"{blocks} gives a wrong result for {shape}: do not tune, report it.")
        times[blocks] = seconds_per_call(call, operands, calls)
        print(f"  {blocks}: {1e6 * times[blocks]:.1f} us", flush=True)
    return min(times, key=lambda blocks: times[blocks])


def keep(path: Path, device_kind: str, shape: Shape, best: Blocks) -> None:
    """Writes the sizes of a shape into the file, beside what is there."""
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    call_shape = CallShape(
        queries=shape.queries,
        group=shape.group,
        num_heads=shape.kv_heads,
        page_size=shape.page_size,
        lanes=shape.page_spec.lanes,
        table_width=shape.pages_per_row,
        dtype=shape.page_spec.dtype,
    )
    table.setdefault(device_kind, {})[call_shape.key] = {
        "pages": best.pages,
        "queries": best.queries,
    }
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Tune the TPU kernel on this chip.")
    parser.add_argument("--rows", type=int, default=32, help="sequences of a decode call")
    parser.add_argument("--contexts", default="2048,8192")
    parser.add_argument("--queries", default="1,512", help="new tokens; more than 8 is one row's")
    parser.add_argument("--kv-heads", default="1,8")
    parser.add_argument("--group", type=int, default=4, help="query heads to a kv head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-sizes", default="32,128")
    parser.add_argument("--dtypes", default="bfloat16", help="of the pages")
    parser.add_argument("--calls", type=int, default=64, help="in a row, in one program")
    parser.add_argument("--out", type=Path, default=TUNED)
    parser.add_argument("--interpret", action="store_true", help="without a TPU: a rehearsal")
    args = parser.parse_args(argv)
    device_kind = jax.devices()[0].device_kind
    lists = [args.contexts, args.queries, args.kv_heads, args.page_sizes]
    numbers = [[int(n) for n in text.split(",")] for text in lists]
    for dtype, sizes in itertools.product(args.dtypes.split(","), itertools.product(*numbers)):
        context, queries, kv_heads, page_size = sizes
        rows = args.rows if queries <= 8 else 1
        shape = Shape(rows, context, queries, kv_heads, args.group, args.head_dim, page_size, dtype)
        print(shape)
        best = tune(shape, args.calls, args.interpret)
        keep(args.out, device_kind, shape, best)
        print(f"  fastest: {best}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
