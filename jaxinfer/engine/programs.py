"""`Programs`: the compiled device programs, one per shape, compiled ahead in threads or at first
use.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sharding import (
    cache_spec,
    num_data_shards,
    over_data,
    param_specs,
    shardings,
    spec,
    state_spec,
    traced_for,
)
from jaxinfer.compute.types import DecodeState, KVCache
from jaxinfer.config import EngineConfig
from jaxinfer.engine import device
from jaxinfer.engine.compiles import CACHE_HIT, CompileCounter
from jaxinfer.engine.device import Chunks, Scored, Starts

Progress = Callable[[int, int], None]
Key = tuple[str, *tuple[int, ...]]
COMPILE_THREADS = 2


def keep_compiled_programs() -> None:
    """Returns None; from now on JAX keeps compiled programs on disk, in the user's cache folder.

    Leaves a `jax_compilation_cache_dir` that the user has set alone. JAX's own threshold of one
    second would leave out what is short to compile but not short to compile at every start.
    """
    if getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "jaxinfer" / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class Programs:
    """Compiled programs by key: a name of `jaxinfer.engine.device` and the shape that it works on.

    ("prefill", rows, tokens), ("score",), ("start",), ("decode", rows), ("write_row",),
    ("stop_row",), ("map_pages",), ("copy_pages",). All that varies in shape is in the key, so a
    program once compiled is never compiled again. Rows and tokens are those of each data shard.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        cache: KVCache,
        state: DecodeState,
        config: EngineConfig,
        *,
        num_words: int,
        num_starts: int,
        num_hidden: int,
        logits_hook: LogitsHook | None,
    ):
        shaped = functools.partial(jax.tree.map, _shape_of)
        self._params, self._cache, self._state = shaped(params), shaped(cache), shaped(state)
        self._num_words, self._num_starts = num_words, num_starts
        self._max_model_len = config.max_model_len
        self._mesh = model.mesh
        self._shards = num_data_shards(model.mesh)
        hidden = (self._shards * num_hidden, model.config.hidden_size)
        self._hidden = jax.ShapeDtypeStruct(hidden, jnp.float32)
        common = dict(logits_hook=logits_hook, max_logprobs=config.max_logprobs)
        prefill = functools.partial(device.prefill_rows, model, num_hidden=num_hidden)
        score = functools.partial(device.score_rows, model, **common)
        start = functools.partial(device.start_rows, model, **common)
        decode = functools.partial(device.decode_rows, model, max_steps=config.max_window, **common)
        # By name: the function; where its arguments lie, and what it returns; which it donates.
        params_, cache_, state_ = param_specs(params), cache_spec(cache), state_spec(state)
        rows, whole = spec("rows"), spec()
        self._functions = {
            "prefill": self._jit(prefill, (params_, cache_, rows, rows), (cache_, rows), (1,)),
            "score": self._jit(score, (params_, state_, rows, rows), rows, ()),
            "start": self._jit(start, (params_, state_, rows, rows), (state_, rows), (1,)),
            "decode": self._jit(
                decode, (params_, cache_, state_, rows, whole), (cache_, state_, rows), (1, 2)
            ),
            "write_row": self._jit(device.write_row, (state_, rows, whole), state_, (0,)),
            "stop_row": self._jit(device.stop_row, (state_, rows), state_, (0,)),
            "map_pages": self._jit(device.map_pages, (state_, rows), state_, (0,)),
            "copy_pages": self._jit(device.copy_pages, (cache_, rows, rows), cache_, (0,)),
        }
        self._compiled: dict[Key, jax.stages.Compiled] = {}
        self._cached = CompileCounter(CACHE_HIT)

    def __getitem__(self, key: Key) -> jax.stages.Compiled:
        """The program of `key`, compiled now if it was not before."""
        if key not in self._compiled:
            self._compiled[key] = self._compile(key)
        return self._compiled[key]

    @property
    def num_compiled(self) -> int:
        """Programs that there are by now."""
        return len(self._compiled)

    @property
    def num_cached(self) -> int:
        """Those of them that JAX's persistent cache had."""
        return self._cached.count

    def compile(self, keys: list[Key], progress: Progress | None = None) -> None:
        """Returns None; the programs of `keys` are compiled, several at a time."""
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            jobs = {pool.submit(self._compile, key): key for key in keys}
            for done, job in enumerate(as_completed(jobs), 1):
                self._compiled[jobs[job]] = job.result()
                if progress is not None:
                    progress(done, len(jobs))

    def _jit(
        self, function: Callable, in_specs: tuple, out_specs: Any, donated: tuple[int, ...]
    ) -> Any:
        """`function` of one data shard as a program of all, with arguments and results where the
        specs say: nothing about them is left to be compiled for anew.
        """
        if self._mesh is None:
            return jax.jit(function, donate_argnums=donated)
        return jax.jit(
            over_data(function, self._mesh, in_specs, out_specs),
            in_shardings=shardings(self._mesh, in_specs),
            out_shardings=shardings(self._mesh, out_specs),
            donate_argnums=donated,
        )

    def _compile(self, key: Key) -> jax.stages.Compiled:
        with traced_for(self._mesh):
            lowered = self._functions[key[0]].lower(*self._arguments(key))
            with self._cached.watching():
                return lowered.compile()

    def _arguments(self, key: Key) -> tuple[Any, ...]:
        """The shapes that the program of `key` takes."""
        each, starts = self._shards, self._shards * self._num_starts
        match key:
            case ("prefill", rows, tokens):
                row = _int32(each * rows)
                chunks = Chunks(_int32(each * rows, tokens), row, row, row)
                return self._params, self._cache, self._state.page_table_BM, chunks
            case ("score",):
                one = _int32(each)
                scored = Scored(_int32(each, self._max_model_len), one, one, one, one)
                return self._params, self._state, self._hidden, scored
            case ("start",):
                row = _int32(starts)
                return self._params, self._state, self._hidden, Starts(row, row, row, row)
            case ("decode", rows):
                return self._params, self._cache, self._state, _int32(each * rows), _int32()
            case ("copy_pages",):
                return self._cache, _int32(starts), _int32(starts)
            case ("map_pages",):
                return self._state, _int32(starts, 3)
            case ("write_row",):
                return self._state, _int32(each), _int32(self._num_words)
            case _:
                return self._state, _int32(each)


def _shape_of(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
