"""Shows what a KV cache saves: a generation with it and without, tokens computed and seconds.

    python scripts/bench_kv_cache.py --lengths 16,32,64,128 --plot kv_cache.png

With the cache a new token costs one token's work: linear in the length. Without it each costs that
of the whole sequence so far: quadratic. Both are compiled and run once, then timed one right after
the other. They must give the same tokens, else the exit code is 1; in bfloat16 rounding can decide
a near tie of two logits one way or the other, and so part them.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time

import jax
import numpy as np

import jaxinfer
from jaxinfer import SamplingParams, compute

HEADING = """\
   new |          tokens computed           |           seconds
tokens |   cache  without   padded    ratio |    cache  without    ratio"""
ROW = "{:6} | {:7} {:8} {:8} {:8.1f} | {:8.3f} {:8.3f} {:8.1f}"
NOTE = """\
padded: what the program without a cache computes for them, as each of its steps has room for all.
Either way the last new token is never computed: nothing follows it."""


def tokens_computed(prompt_len: int, num_new: int, *, use_cache: bool) -> int:
    """How many tokens go through the model for `num_new` new ones."""
    if use_cache:  # the prompt once, then each new token but the last
        return prompt_len + num_new - 1
    return num_new * prompt_len + num_new * (num_new - 1) // 2


def tokens_padded(prompt_len: int, num_new: int) -> int:
    """How many the program without a cache computes for them: every step at the full width."""
    return num_new * (prompt_len + num_new)


def measure(model, params, prompt: list[int], num_new: int, repeats: int):
    """`(seconds, tokens)`, each with the cache and without; the best seconds of `repeats` runs."""
    batch = compute.make_prefill_batch([prompt], max_tokens=num_new)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True)
    sampling = compute.make_sampling_state([greedy], [prompt], vocab_size=model.config.vocab_size)
    operands = jax.device_put((params, batch.tokens_BT, batch.context_lens_B, sampling))
    programs = []
    for use_cache in (True, False):
        call = functools.partial(compute.generate, model, max_tokens=num_new, use_cache=use_cache)
        programs.append(jax.jit(call).lower(*operands).compile())
    tokens = [np.asarray(program(*operands))[0] for program in programs]
    seconds = [float("inf")] * len(programs)
    for _ in range(repeats):
        for i, program in enumerate(programs):
            start = time.perf_counter()
            jax.block_until_ready(program(*operands))
            seconds[i] = min(seconds[i], time.perf_counter() - start)
    return seconds, tokens


def plot(path: str, title: str, lengths: list[int], counts: list, seconds: list) -> None:
    """Writes one panel of tokens and one of seconds; their items are (with cache, without)."""
    import matplotlib  # noqa: PLC0415 (only for this)

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    for axis, label, pairs in zip(axes, ("tokens computed", "seconds"), (counts, seconds)):
        for name, marker, values in zip(("with KV cache", "without"), "os", zip(*pairs)):
            axis.loglog(lengths, values, marker=marker, label=name)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.set(xlabel="new tokens", ylabel=label)
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> int:
    """The exit code, once the table is printed: 1 if the tokens differ."""
    parser = argparse.ArgumentParser(description="Generation with a KV cache and without.")
    parser.add_argument("--model", default="smollm2-135m", help="alias, path or hub id")
    parser.add_argument("--dtype", default="float32", help="of weights and cache")
    parser.add_argument("--prompt-len", type=int, default=32, help="tokens, drawn at random")
    parser.add_argument("--lengths", default="16,32,64,128", help="new tokens of each row")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs; the best one counts")
    parser.add_argument("--plot", metavar="PNG", help="write a plot there")
    args = parser.parse_args(argv)
    model, params = jaxinfer.load(args.model, dtype=args.dtype)
    rng, length = np.random.default_rng(0), args.prompt_len
    prompt = rng.integers(0, model.config.vocab_size, length).tolist()
    device = jax.devices()[0].device_kind
    title = f"{args.model} in {args.dtype} on {device}, a prompt of {length} tokens"
    print(f"{title}\n{HEADING}")
    lengths, counts, seconds, same = [int(n) for n in args.lengths.split(",")], [], [], True
    for n in lengths:
        counts.append([tokens_computed(length, n, use_cache=use) for use in (True, False)])
        pair, tokens = measure(model, params, prompt, n, args.repeats)
        seconds.append(pair)
        same &= np.array_equal(*tokens)
        ratios = [without / cached for cached, without in (counts[-1], pair)]
        row = ROW.format(n, *counts[-1], tokens_padded(length, n), ratios[0], *pair, ratios[1])
        print(row, flush=True)
    print(f"{NOTE}\n{'Both gave the same tokens.' if same else 'THE TOKENS DIFFER.'}")
    if args.plot:
        plot(args.plot, title, lengths, counts, seconds)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
