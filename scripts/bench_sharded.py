"""Shows what a decode step needs of each device, by the real compiler for TPUs, without one.

    python scripts/bench_sharded.py --shapes llama-3-8b,llama-3-70b --model 1,2,4,8

For each number of shards it compiles one step of the shape in bfloat16, from the newest tokens to
the logits, and with --sampler to the next tokens. It prints the bytes that each device holds
(weights, cache, and what the step needs besides, of that what attention alone needs), and how often
devices exchange anything. The cache must be updated in place, else the exit code is 1. Times can be
had on devices only. Needs the package libtpu (`pip install '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from jaxinfer import CacheConfig, ModelConfig, ParallelConfig, SamplingParams, compute
from jaxinfer.compute import sharding
from jaxinfer.models import NAMED_SHAPES
from pallas_kernels.paged_attention import paged_attention

HEADING = """\
               |  MB of a device   | besides, MB    |  a layer's  | collectives
shape       TP | weights     cache |  all attention | all-reduces | outside     """
ROW = "{:11} {:2} | {:7.0f} {:9.0f} | {:4.1f} {:9.1f} | {:11} | {:11}"
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"


@dataclass(frozen=True)
class Step:
    """A compiled decode step of one layout, and what its devices are given."""

    compiled: jax.stages.Compiled
    weight_bytes: int
    cache_bytes: int


def tpu_devices(topology: str) -> list[Any]:
    """The devices of a TPU slice that is not there, such as "v6e:2x4"."""
    # libtpu looks for a TPU machine's settings, and for other processes that use the TPU.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return list(topologies.get_topology_desc(topology, platform="tpu").devices)


def compile_decode(
    config: ModelConfig,
    parallel: ParallelConfig,
    devices: Sequence[Any],
    *,
    num_rows: int = 32,
    context: int = 2048,
    page_size: int = 32,
    stacked: bool = True,
    sampling: bool = True,
) -> Step:
    """One decode step of `num_rows` rows of each data shard, from shapes alone.

    Args:
        stacked: scan the layers, as TPUs like it; else unroll them.
        sampling: with the sampler; else the step ends with the logits.
    """
    mesh = sharding.mesh_over(parallel, devices)
    platform = devices[0].platform
    config = sharding.fit_config(config, parallel.model)
    model = compute.Decoder(config, mesh=mesh)
    params = jax.eval_shape(functools.partial(model.init, dtype="bfloat16"), jax.random.key(0))
    width, rows = context // page_size, num_rows * parallel.data
    pages = CacheConfig(num_pages=rows * width, page_size=page_size, dtype="bfloat16")
    init = functools.partial(compute.init_cache, config, pages, stacked=stacked, platform=platform)
    cache = jax.eval_shape(init)
    if stacked:
        params = jax.eval_shape(compute.stack_layers, params)
    state = _state_of(rows, width, config.vocab_size)

    def step(params, cache, state):
        if sampling:
            cache, state, output = compute.decode_step(model, params, cache, state)
            return cache, state, output.tokens_BW
        where = state.page_table_BM, state.context_lens_B, jnp.ones_like(state.context_lens_B)
        cache, x_BTD = model(params, cache, state.tokens_B[:, None], *where)
        return cache, state, model.unembed(params, x_BTD[:, 0])

    param_specs = sharding.param_specs(params)
    cache_specs, state_specs = sharding.cache_spec(cache), sharding.state_spec(state)
    in_specs = (param_specs, cache_specs, state_specs)
    out_specs = (
        cache_specs,
        state_specs,
        sharding.spec("rows") if sampling else sharding.spec("rows", "vocab"),
    )
    program = jax.jit(
        sharding.over_data(step, mesh, in_specs, out_specs),
        in_shardings=sharding.shardings(mesh, in_specs),
        out_shardings=sharding.shardings(mesh, out_specs),
        donate_argnums=(1, 2),
    )
    compiled = program.trace(params, cache, state).lower(lowering_platforms=(platform,)).compile()
    return Step(
        compiled,
        _bytes_of_one(params, sharding.shardings(mesh, param_specs)),
        _bytes_of_one(cache, sharding.shardings(mesh, cache_specs)),
    )


def _state_of(rows: int, width: int, vocab_size: int) -> compute.DecodeState:
    """The shapes of a state of so many rows, with page tables of that width."""
    per_row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    make = functools.partial(compute.make_sampling_state, vocab_size=vocab_size)
    sampling = jax.eval_shape(lambda: make([SamplingParams()] * rows, [[1]] * rows))
    table = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    return compute.DecodeState(per_row, per_row, per_row, table, sampling)


def attention_temp(
    config: ModelConfig, num_shards: int, device: Any, *, num_rows: int, context: int, page_size=32
) -> int:
    """Bytes that the attention of one layer needs besides its arguments, on one of `num_shards`."""
    config = sharding.fit_config(config, num_shards)
    N, K = config.num_heads // num_shards, config.num_kv_heads // num_shards
    H, width = config.head_dim, context // page_size
    local = ModelConfig(**{**vars(config), "num_heads": N, "num_kv_heads": K})
    pages = CacheConfig(num_pages=num_rows * width, page_size=page_size, dtype="bfloat16")
    cache = jax.eval_shape(
        functools.partial(compute.init_cache, local, pages, platform=device.platform)
    )
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    number = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    one = jax.sharding.SingleDeviceSharding(device)
    program = jax.jit(paged_attention, donate_argnums=2, in_shardings=one, out_shardings=one)
    lowered = program.trace(
        shape((num_rows, 1, N, H)),
        shape((num_rows, 1, K, 2 * H)),
        cache.pages[0],
        number((num_rows, width)),
        number((num_rows,)),
        number((num_rows,)),
    ).lower(lowering_platforms=(device.platform,))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def collectives(compiled: jax.stages.Compiled) -> tuple[Counter[str], Counter[str]]:
    """How many of each kind there are in the loop over the layers, and outside of it."""
    text = compiled.as_text()
    bodies = set(re.findall(r"while\(.*?body=%?([\w.\-]+)", text))
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for part in re.split(r"\n(?=%|ENTRY)", text):
        name = re.match(r"%?([\w.\-]+)", part)
        found = re.findall(rf" ({COLLECTIVES})(?:-start)?\(", part)
        (inside if name and name[1] in bodies else outside).update(found)
    return inside, outside


def large_copies(compiled: jax.stages.Compiled, least: int) -> list[str]:
    """The shapes of the copies and transposes of at least that many bytes."""
    sizes = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "s16": 2, "u16": 2, "s8": 1, "pred": 1}
    found = []
    results = re.findall(
        r"= \(?(\w+)\[([\d,]+)\]\S* (?:copy|copy-start|transpose)\(", compiled.as_text()
    )
    for kind, dims in results:
        if np.prod([int(dim) for dim in dims.split(",")]) * sizes.get(kind, 4) >= least:
            found.append(f"{kind}[{dims}]")
    return found


def _bytes_of_one(tree: Any, places: Any) -> int:
    """Bytes of `tree` on each device."""
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(places), strict=True)
    return sum(
        int(np.prod(place.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf, place in pairs
    )


def main(argv: list[str] | None = None) -> int:
    """The exit code; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shapes", default="llama-3-8b,llama-3-70b", help="named shapes")
    parser.add_argument("--model", default="1,2,4,8", help="numbers of shards")
    parser.add_argument("--topology", default="v6e:2x4", help="the slice to compile for")
    parser.add_argument("--sampler", action="store_true", help="with the sampler; slow to compile")
    parser.add_argument("--num-rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args(argv)
    devices = tpu_devices(args.topology)
    sizes = dict(num_rows=args.num_rows, context=args.context)
    is_in_place = True
    print(f"{args.topology}, {args.num_rows} rows of {args.context} tokens, bfloat16")
    print(HEADING)
    for name in args.shapes.split(","):
        config = NAMED_SHAPES[name]
        for count in map(int, args.model.split(",")):
            start = time.perf_counter()
            try:
                step = compile_decode(
                    config, ParallelConfig(model=count), devices, sampling=args.sampler, **sizes
                )
            except jax.errors.JaxRuntimeError as error:
                print(f"{name:11} {count:2} | does not fit: {str(error)[:200]}", flush=True)
                continue
            memory = step.compiled.memory_analysis()
            is_in_place &= memory.alias_size_in_bytes >= step.cache_bytes
            inside, outside = collectives(step.compiled)
            print(
                ROW.format(
                    name,
                    count,
                    step.weight_bytes / 1e6,
                    step.cache_bytes / 1e6,
                    memory.temp_size_in_bytes / 1e6,
                    attention_temp(config, count, devices[0], **sizes) / 1e6,
                    inside["all-reduce"],
                    sum(outside.values()),
                ),
                flush=True,
            )
            print(f"compiled in {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return 0 if is_in_place else 1


if __name__ == "__main__":
    sys.exit(main())
