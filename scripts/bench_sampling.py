"""Prints milliseconds of one call of `sample` for common settings, beside a full sort.

    python scripts/bench_sampling.py --vocab 49152 --rows 1 8 32 --repeats 10

Each number is the best of the repeats. The flat cases keep more tokens than there are candidates,
in every row, and so show the exact threshold search; "full sort" is what top-k and top-p would
need without them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.compute.sampling import sample
from jaxinfer.compute.sampling_state import make_sampling_state
from jaxinfer.sampling_params import SamplingParams

PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}

# (label, fields of SamplingParams, spread of the random logits)
CASES: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("greedy", {"temperature": 0.0}, 8.0),
    ("temperature only", {}, 8.0),
    ("top-p 0.9", {"top_p": 0.9}, 8.0),
    ("top-k 50", {"top_k": 50}, 8.0),
    ("top-k 50, top-p 0.9, min-p 0.05", {"top_k": 50, "top_p": 0.9, "min_p": 0.05}, 8.0),
    ("all penalties, greedy", {"temperature": 0.0, **PENALTIES}, 8.0),
    ("top-p 0.9, flat", {"top_p": 0.9}, 0.5),
    ("top-k 1000, top-p 0.9, flat", {"top_k": 1000, "top_p": 0.9}, 0.5),
)


def best_ms(call: Callable[[], jax.Array], repeats: int) -> float:
    """Milliseconds of the fastest of `repeats` calls, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def full_sort(logits_BV: jax.Array) -> jax.Array:
    """Probabilities in descending order, summed up, and their ids: what a sorting sampler does."""
    ids_BV = jnp.argsort(-logits_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(logits_BV, ids_BV, axis=-1)
    return jnp.cumsum(jax.nn.softmax(sorted_BV), axis=-1) + ids_BV


def measure(rows: int, vocab: int, repeats: int) -> dict[str, float]:
    """Milliseconds per case at logits of shape [rows, vocab]."""
    rng = np.random.default_rng(0)
    normal_BV = rng.standard_normal((rows, vocab)).astype(np.float32)
    positions_B = jnp.arange(rows, dtype=jnp.int32)
    step = jax.jit(sample)
    results = {}
    for label, fields, spread in CASES:
        params = [SamplingParams(seed=row, **fields) for row in range(rows)]
        prompts = rng.integers(0, vocab, (rows, 100)).tolist()
        state = jax.device_put(make_sampling_state(params, prompts, vocab_size=vocab))
        logits_BV = jnp.asarray(spread * normal_BV)
        results[label] = best_ms(lambda x=logits_BV, s=state: step(x, s, positions_B), repeats)
    sort, logits_BV = jax.jit(full_sort), jnp.asarray(8.0 * normal_BV)
    results["full sort"] = best_ms(lambda: sort(logits_BV), min(repeats, 3))
    return results


def main() -> None:
    """Prints one table: a line per case, a column per number of rows."""
    parser = argparse.ArgumentParser(description="Times `sample` against a full sort.")
    parser.add_argument("--vocab", type=int, default=49152, help="columns of the logits")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="batch sizes")
    parser.add_argument("--repeats", type=int, default=10, help="calls per number")
    args = parser.parse_args()
    columns = [measure(rows, args.vocab, args.repeats) for rows in args.rows]
    print(f"ms at V={args.vocab} on {jax.devices()[0].device_kind}, jax {jax.__version__}")
    print(f"{'':34}" + "".join(f"{f'B={rows}':>10}" for rows in args.rows))
    for label in columns[0]:
        print(f"{label:34}" + "".join(f"{column[label]:10.2f}" for column in columns))


if __name__ == "__main__":
    main()
