"""Prints decode speed and time to first token of the whole engine, beside the machine's bounds.

    python scripts/bench_decode.py --model smollm2-135m --dtypes bfloat16 float32

A decode step must read the weights once and each row's keys and values; the last column compares
the rate at which it does with the read bandwidth measured in the same run. The host's share is the
part of the wall time in which the host was not waiting for the device: what the device loses to it
is at most that.
"""

from __future__ import annotations

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxinfer
from jaxinfer.engine.programs import keep_compiled_programs

PROMPT_LEN = 128


def read_bandwidth(num_bytes: int = 1 << 28) -> float:
    """Bytes per second at which a large array is read, best of several."""
    data = jnp.ones(num_bytes // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()
    return max(num_bytes / seconds(lambda: total(data).block_until_ready()) for _ in range(10))


def seconds(run) -> float:
    """How long `run` takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def make_engine(
    model, params, dtype: str, num_rows: int, max_model_len: int, batch_invariant: bool
) -> jaxinfer.Engine:
    """An engine for `num_rows` requests; what it has not run yet it still has to compile."""
    config = jaxinfer.EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=num_rows,
        kv_dtype=dtype,
        max_window=8,
        batch_invariant=batch_invariant,
    )
    return jaxinfer.Engine(model, params, config, eos_ids=())


def drain(engine: jaxinfer.Engine) -> None:
    """Runs the engine until nothing is left to do."""
    while engine.has_work:
        engine.step()


def random_prompt(model, length: int, seed: int) -> list[int]:
    """Token ids at random."""
    return np.random.default_rng(seed).integers(3, model.config.vocab_size, length).tolist()


def greedy(max_tokens: int) -> jaxinfer.SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens."""
    return jaxinfer.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def bench_decode(engine, model, params, dtype, num_rows, num_tokens, bandwidth) -> str:
    """One line: tokens/s, ms per step, bytes per step, their rate over the bandwidth, host."""
    prompts = [random_prompt(model, PROMPT_LEN, seed) for seed in range(num_rows)]
    for prompt in prompts:  # compiles
        engine.add_request(prompt, greedy(10))
    drain(engine)
    requests = [engine.add_request(prompt, greedy(num_tokens)) for prompt in prompts]
    while any(len(request.output_ids) < 2 for request in requests):
        engine.step()
    before = sum(len(request.output_ids) for request in requests)
    waited = engine.wait_s
    elapsed = seconds(lambda: drain(engine))
    made = sum(len(request.output_ids) for request in requests) - before
    step_s = elapsed / (made / num_rows)
    context = PROMPT_LEN + num_tokens / 2
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    moved = weights + num_rows * context * model.config.kv_bytes_per_token(dtype)
    host = 1 - (engine.wait_s - waited) / elapsed
    return (
        f"{dtype:<9} {num_rows:>5} {made / elapsed:>10.1f} {step_s * 1e3:>9.1f} "
        f"{moved / 1e6:>9.0f} {moved / step_s / bandwidth:>10.2f} {host:>9.1%}"
    )


def bench_ttft(engine, model, length: int, repeats: int) -> float:
    """Median seconds from the arrival of a lone prompt of `length` tokens to its first token."""
    times = []
    for seed in range(repeats + 1):
        request = engine.add_request(random_prompt(model, length, seed), greedy(1))
        drain(engine)
        times.append(request.times.first_token - request.times.arrival)
    return statistics.median(times[1:])  # the first compiles


def main() -> None:
    """Prints the two tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="alias, path or hub id")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompt-lens", nargs="+", type=int, default=[32, 128, 512, 1024])
    parser.add_argument("--num-tokens", type=int, default=128, help="new tokens per request")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each TTFT")
    parser.add_argument("--batch-invariant", action="store_true", help="in that mode")
    args = parser.parse_args()
    keep_compiled_programs()
    bandwidth = read_bandwidth()
    device = jax.devices()[0]
    print(f"{args.model} on {device.device_kind}, read bandwidth {bandwidth / 1e9:.1f} GB/s")
    print(f"decode after {PROMPT_LEN} prompt tokens, {args.num_tokens} new ones, greedy")
    print(f"{'dtype':<9} {'batch':>5} {'tokens/s':>10} {'ms/step':>9} {'MB/step':>9} ", end="")
    print(f"{'of bound':>10} {'host':>9}")
    ttft = {}
    for dtype in args.dtypes:
        model, params = jaxinfer.load(args.model, dtype=dtype)
        for num_rows in args.batch_sizes:
            engine = make_engine(model, params, dtype, num_rows, 512, args.batch_invariant)
            print(
                bench_decode(engine, model, params, dtype, num_rows, args.num_tokens, bandwidth),
                flush=True,
            )
        longest = -(-max(args.prompt_lens) // 512) * 512 + 512
        engine = make_engine(model, params, dtype, 1, longest, args.batch_invariant)
        for length in args.prompt_lens:
            ttft[dtype, length] = bench_ttft(engine, model, length, args.repeats)
    print("\nTTFT in seconds of a lone prompt")
    print(f"{'dtype':<9} " + " ".join(f"{length:>8}" for length in args.prompt_lens))
    for dtype in args.dtypes:
        row = " ".join(f"{ttft[dtype, length]:>8.3f}" for length in args.prompt_lens)
        print(f"{dtype:<9} {row}")


if __name__ == "__main__":
    main()
