"""Shows what a step of a model needs of each device, by the real compiler for TPUs, without one.

    python scripts/bench_sharded.py --shapes llama-3-8b,llama-3-70b --model 1,2,4,8

For each number of shards it compiles one decode step of the shape in bfloat16, from the newest
tokens to the logits, and once more with the sampler, to the next tokens. It prints the bytes that
each device holds (weights, cache, what the steps need besides), those that the step to the logits
copies in pieces of 8 MiB or more, and how often devices exchange anything. The cache must be
updated in place, else the exit code is 1. Times can be had on devices only. Needs the package
libtpu (`pip install '.[tpu]'`).
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer import CacheConfig, ModelConfig, ParallelConfig, SamplingParams, compute
from jaxinfer.bench.compiled import Program, bytes_of, compile_for, tpu_devices
from jaxinfer.compute import sharding
from jaxinfer.config import require
from jaxinfer.models import named_shape

HEADING = """\
               |  MB of a device   | besides, MB, to the | copied | exchanges of
shape       TP | weights     cache | logits       tokens | MB     | a layer   other   sampler"""
ROW = "{:11} {:2} | {:7.0f} {:9.0f} | {}"
NEEDS = "{:6.1f} {:12.1f} | {:6.1f} | {:7} {:7} {:9}"
LARGE = 8 << 20  # bytes of a copy that is one of weights or of the cache


@dataclass(frozen=True)
class Step:
    """A step over a mesh: the function, shapes of its arguments, and what a device is given."""

    jitted: Any
    operands: tuple[Any, ...]
    weight_bytes: int
    cache_bytes: int
    state_bytes: int
    platform: str

    def compile(self) -> Program:
        return compile_for(self.platform, self.jitted, *self.operands)

    def is_in_place(self, program: Program) -> bool:
        """Whether results take the memory of the whole cache and of all that stands in rows."""
        return program.alias_bytes >= self.cache_bytes + self.state_bytes


def make_step(
    config: ModelConfig,
    parallel: ParallelConfig,
    devices: Sequence[Any],
    *,
    num_rows: int = 32,
    num_tokens: int = 1,
    context: int = 2048,
    page_size: int = 32,
    stacked: bool = True,
    sampler: bool = False,
) -> Step:
    """A step of `num_rows` rows of `num_tokens` tokens on each data shard, in bfloat16.

    Args:
        stacked: scan the layers, as TPUs like it; else unroll them.
        sampler: a decode step up to the next tokens; else the step ends with the logits of each
            row's last token.

    Raises ValueError if `page_size` does not divide `context`, or the model cannot be split so.
    """
    require(
        context % page_size == 0,
        f"context={context} is no multiple of page_size={page_size}. Choose one that is.",
    )
    mesh = sharding.mesh_over(parallel, devices)
    platform = devices[0].platform
    config = sharding.fit_config(config, parallel.model)
    model = compute.Decoder(config, mesh=mesh)
    params = _shapes_of_params(config)
    width, rows = context // page_size, num_rows * parallel.data
    pages = CacheConfig(num_pages=rows * width, page_size=page_size, dtype="bfloat16")
    init = functools.partial(compute.init_cache, config, pages, stacked=stacked, platform=platform)
    cache = jax.eval_shape(init)
    if stacked:
        params = jax.eval_shape(compute.stack_layers, params)
    state = _shapes_of_state(rows, width, config.vocab_size)
    operands = params, cache, state
    param_specs = sharding.param_specs(params)
    cache_specs, state_specs = sharding.cache_spec(cache), sharding.state_spec(state)
    in_specs = (param_specs, cache_specs, state_specs)
    last = sharding.spec("rows") if sampler else sharding.spec("rows", "vocab")
    out_specs = (cache_specs, state_specs, last)
    function = _decode if sampler else functools.partial(_forward, num_tokens=num_tokens)
    places = sharding.shardings(mesh, in_specs)
    jitted = jax.jit(
        sharding.over_data(functools.partial(function, model), mesh, in_specs, out_specs),
        in_shardings=places,
        out_shardings=sharding.shardings(mesh, out_specs),
        donate_argnums=(1, 2),
    )
    return Step(jitted, operands, *map(bytes_of, operands, places), platform)


def _decode(model, params, cache, state):
    cache, state, output = compute.decode_step(model, params, cache, state)
    return cache, state, output.tokens_BW


def _forward(model, params, cache, state, *, num_tokens):
    tokens_BT = jnp.repeat(state.tokens_B[:, None], num_tokens, axis=1)
    query_lens_B = jnp.full_like(state.context_lens_B, num_tokens)
    where = state.page_table_BM, state.context_lens_B, query_lens_B
    cache, x_BTD = model(params, cache, tokens_BT, *where)
    return cache, state, model.unembed(params, x_BTD[:, -1])


def _shapes_of_params(config: ModelConfig) -> Any:
    """Those of all layers, each like the first."""
    first = compute.Decoder(replace(config, num_layers=1))
    params = jax.eval_shape(functools.partial(first.init, dtype="bfloat16"), jax.random.key(0))
    return params | {"layers": params["layers"] * config.num_layers}


def _shapes_of_state(rows: int, width: int, vocab_size: int) -> compute.DecodeState:
    """Those of so many rows, with page tables of that width."""
    per_row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    make = functools.partial(compute.make_sampling_state, vocab_size=vocab_size)
    sampling = jax.eval_shape(lambda: make([SamplingParams()] * rows, [[1]] * rows))
    table = jax.ShapeDtypeStruct((rows, width), jnp.int32)
    return compute.DecodeState(per_row, per_row, per_row, table, sampling)


def main(argv: list[str] | None = None) -> int:
    """The exit code; prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--shapes", default="llama-3-8b,llama-3-70b", help="named shapes")
    parser.add_argument("--model", default="1,2,4,8", help="numbers of shards")
    parser.add_argument("--topology", default="v6e:2x4", help="the slice to compile for")
    parser.add_argument("--num-rows", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args(argv)
    devices = tpu_devices(args.topology)
    sizes = dict(num_rows=args.num_rows, context=args.context)
    all_in_place = True
    print(f"{args.topology}, {args.num_rows} rows of {args.context} tokens, bfloat16")
    print(HEADING)
    for name in args.shapes.split(","):
        config = named_shape(name)
        for count in map(int, args.model.split(",")):
            parallel = ParallelConfig(model=count)
            step = make_step(config, parallel, devices, **sizes)
            try:
                program = step.compile()
                whole = make_step(config, parallel, devices, sampler=True, **sizes).compile()
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                needs = "does not fit"
            else:
                all_in_place &= step.is_in_place(program) and step.is_in_place(whole)
                exchanges = program.exchanges()
                of_a_layer = [one for one in exchanges if one.computation in program.loops]
                needs = NEEDS.format(
                    program.temp_bytes / 1e6,
                    whole.temp_bytes / 1e6,
                    sum(copy.num_bytes for copy in program.moved(LARGE)) / 1e6,
                    len(of_a_layer),
                    len(exchanges) - len(of_a_layer),
                    len(whole.exchanges()) - len(exchanges),
                )
            weights, cache = step.weight_bytes / 1e6, step.cache_bytes / 1e6
            print(ROW.format(name, count, weights, cache, needs), flush=True)
    return 0 if all_in_place else 1


if __name__ == "__main__":
    sys.exit(main())
