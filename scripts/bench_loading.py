"""Measures how a checkpoint loads: seconds, and peak memory against its bound.

    python scripts/bench_loading.py MODEL [--dtype bfloat16]

MODEL is an alias, a GGUF file, a Hugging Face folder or a hub id. The load runs in a fresh process;
its peak is counted over that of the interpreter with jax and this package imported. The bound is
the weights in the asked dtype plus the largest tensor (on a host whose device is the CPU).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import jax

from jaxinfer.checkpoint import load_params, open_checkpoint, resolve


def peak_bytes() -> int:
    """Most resident memory of this process so far (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM. Run this on Linux.")


def measure(path: str, dtype: str) -> dict[str, float | str]:
    """Loads once in this process."""
    jax.block_until_ready(jax.device_put(1.0))
    before = peak_bytes()
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    opened = time.perf_counter()
    params = load_params(checkpoint, dtype=dtype)
    done = time.perf_counter()
    leaves = jax.tree.leaves(params)
    return {
        "device": jax.devices()[0].device_kind,
        "open_s": opened - start,
        "load_s": done - opened,
        "weights": sum(leaf.nbytes for leaf in leaves),
        "largest": max(leaf.nbytes for leaf in leaves),
        "peak": peak_bytes() - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how a checkpoint loads.")
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.model, arguments.dtype)))
        return
    path = resolve(arguments.model)
    command = [sys.executable, __file__, str(path), "--dtype", arguments.dtype, "--here"]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result = json.loads(child.stdout.splitlines()[-1])
    bound = result["weights"] + result["largest"]
    print(f"{path} as {arguments.dtype} on {result['device']}")
    print(f"open and check   {result['open_s']:8.2f} s")
    print(f"load             {result['load_s']:8.2f} s")
    for label, value in (
        ("weights", result["weights"]),
        ("largest tensor", result["largest"]),
        ("bound", bound),
        ("peak", result["peak"]),
    ):
        print(f"{label:16} {value / 1e6:8.1f} MB")
    print(f"peak / bound     {result['peak'] / bound:8.3f}")


if __name__ == "__main__":
    main()
