"""Prints what share of the device's own rates paged attention reaches; the results are checked
first.

    python scripts/bench_kernels.py --rows 32 --context 2048 --chunk 512

Decode is bound by memory: the bytes of keys and values over the seconds, against those of a plain
copy. Prefill is bound by products: their operations over the seconds, against those of a large
matmul. Both bounds are measured in the same run. The default shape is one of 8 shards of Llama 3
8B. Without a TPU, name an implementation that runs there: --implementation mosaic_tpu_interpreted.
"""

from __future__ import annotations

import argparse
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import IMPLEMENTATIONS, paged_attention
from pallas_kernels.paged_attention.measure import (
    Shape,
    best_seconds,
    make_operands,
    seconds_per_call,
)

TOLERANCE = {"float32": 1e-3}
OTHERWISE = 2e-2
HEADING = ("call", "error", "us a call", "GB/s of a copy", "TFLOP/s of matmul")
TITLE = "{:38}| {:>8} | {:>10} | {:>15} | {:>17}"
ROW = "{:37} | {:8.1e} | {:10.1f} | {:6.1f}  {:7.1%} | {:8.2f}     {:7.1%}"


def copy_bandwidth(num_bytes: int) -> float:
    """Bytes read and written per second by a plain copy."""
    data = jnp.ones(num_bytes // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1)
    return 2 * num_bytes / best_seconds(lambda: add(data))


def matmul_rate(size: int, dtype: str, calls: int = 8) -> float:
    """Operations per second of square products one after the other."""
    a = jnp.ones((size, size), dtype)
    chain = jax.jit(lambda a: jax.lax.fori_loop(0, calls, lambda _, x: (x @ a) / size, a))
    return calls * 2 * size**3 / best_seconds(lambda: chain(a))


def error_of(shape: Shape, implementation: str) -> float:
    """The largest difference of a result from the reference's."""
    operands = make_operands(shape)
    got, want = (
        jax.jit(functools.partial(paged_attention, implementation=name))(*operands)[0]
        for name in (implementation, "reference")
    )
    return float(np.abs(np.asarray(got) - np.asarray(want)).max())


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Paged attention against the device's own rates.")
    parser.add_argument("--implementation", default="mosaic_tpu", choices=list(IMPLEMENTATIONS))
    parser.add_argument("--rows", type=int, default=32, help="sequences that decode together")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence")
    parser.add_argument("--chunk", type=int, default=512, help="new tokens of a prefill chunk")
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--group", type=int, default=4, help="query heads to a kv head")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--page-sizes", default="32,64,128", help="one row of the table each")
    parser.add_argument("--dtypes", default="bfloat16,int8", help="of the pages")
    parser.add_argument("--calls", type=int, default=64, help="in a row, in one program")
    parser.add_argument("--bound-size", type=int, default=4096, help="of the matmul; its square "
                        "times 16 bytes are copied")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The exit code, once the table is printed: 1 if a result is wrong."""
    args = parse(argv)
    copy, matmul = copy_bandwidth(16 * args.bound_size**2), matmul_rate(args.bound_size, "bfloat16")
    print(f"{jax.devices()[0].device_kind}: copies {copy / 1e9:.1f} GB/s, ", end="")
    print(f"multiplies {matmul / 1e12:.2f} TFLOP/s in bfloat16\n{TITLE.format(*HEADING)}")
    heads = dict(kv_heads=args.kv_heads, group=args.group, head_dim=args.head_dim)
    call = functools.partial(paged_attention, implementation=args.implementation)
    good = True
    for dtype in args.dtypes.split(","):
        for page_size in map(int, args.page_sizes.split(",")):
            for name, rows, queries in (("decode", args.rows, 1), ("prefill", 1, args.chunk)):
                shape = Shape(
                    rows, args.context, queries, **heads, page_size=page_size, dtype=dtype
                )
                error = error_of(shape, args.implementation)
                good &= error <= TOLERANCE.get(dtype, OTHERWISE)
                seconds = seconds_per_call(call, make_operands(shape), args.calls)
                bytes_s, flops_s = shape.cache_bytes / seconds, shape.flops / seconds
                label = f"{name} {rows} x {queries} of {args.context}, {dtype}, page {page_size}"
                cells = (1e6 * seconds, bytes_s / 1e9, bytes_s / copy, flops_s / 1e12)
                print(ROW.format(label, error, *cells, flops_s / matmul), flush=True)
    print("All results are right." if good else "A RESULT IS WRONG.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
