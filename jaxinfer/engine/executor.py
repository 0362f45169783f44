"""`Executor`: owns params, cache and decode state; the one place that runs device programs."""

from __future__ import annotations

import dataclasses
import time
from typing import TypeVar

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.compute.cache import init_cache
from jaxinfer.compute.decoder import Decoder, Params, are_stacked
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sharding import (
    num_data_shards,
    param_shardings,
    spec,
    state_spec,
    traced_for,
)
from jaxinfer.compute.types import DecodeState, Logprobs, StepOutput
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine import device
from jaxinfer.engine.batching import decode_sizes
from jaxinfer.engine.device import Chunks, Scored, Starts
from jaxinfer.engine.programs import Programs, Progress
from jaxinfer.sched.buckets import Shape

T = TypeVar("T")


class Executor:
    """Runs device programs in the order in which they are called, none of them waited for.

    Cache and state are donated to every program and replaced by what it returns: there is one copy
    of each. A model with a mesh has `num_shards` shards of requests with `num_rows` rows and a pool
    of pages each: batches then hold the parts of all shards, one behind the other, of equal shape.
    """

    def __init__(
        self,
        model: Decoder,
        params: Params,
        config: EngineConfig,
        empty_row: DecodeState,
        *,
        prefill_shapes: tuple[Shape, ...],
        logits_hook: LogitsHook | None = None,
    ):
        self.num_rows = config.max_num_seqs
        self.num_shards = num_data_shards(model.mesh)
        self.decode_sizes = decode_sizes(config.max_num_seqs)
        if config.batch_invariant:
            _check_platform()
            model = dataclasses.replace(model, batch_invariant=True)
            # Tile by tile a step costs what its active rows cost, whatever its size.
            self.decode_sizes = self.decode_sizes[-1:]
        self.num_starts = max(rows for rows, _ in prefill_shapes)
        self.num_hidden = max(rows * tokens for rows, tokens in prefill_shapes)
        self.num_fetches = 0
        self.wait_s = 0.0  # seconds that the host has waited for the device
        self.compile_s = 0.0  # seconds that compiling ahead took
        self._mesh = model.mesh
        # Already on the device, so that steady decoding sends nothing there.
        steps = range(config.max_window + 1)
        self._num_steps = tuple(self._put(np.int32(n), spec()) for n in steps)
        self._decoding: tuple[np.ndarray, Array] | None = None
        self._prefill_shapes = prefill_shapes
        self._params = params = _place(params, model.mesh)
        with traced_for(model.mesh):
            self._cache = init_cache(
                model.config, config.cache, stacked=are_stacked(params), mesh=model.mesh
            )
        num_rows = self.num_shards * self.num_rows
        self._state = jax.tree.map(
            lambda leaf, where: self._put(np.repeat(leaf, num_rows, axis=0), where),
            empty_row,
            state_spec(empty_row),
        )
        self._programs = Programs(
            model,
            params,
            self._cache,
            self._state,
            config,
            num_words=len(device.pack_row(empty_row)),
            num_starts=self.num_starts,
            num_hidden=self.num_hidden,
            logits_hook=logits_hook,
        )

    def compile(self, progress: Progress | None = None) -> None:
        """Returns None; every program that a request can need is compiled."""
        start = time.perf_counter()
        keys = [("prefill", *shape) for shape in self._prefill_shapes]
        keys += [("decode", size) for size in self.decode_sizes]
        keys += [("score",), ("start",), ("map_pages",), ("copy_pages",)]
        keys += [("write_row",), ("stop_row",)]
        self._programs.compile(keys, progress)
        self.compile_s += time.perf_counter() - start

    @property
    def num_programs(self) -> tuple[int, int]:
        """Programs that there are, and how many of them JAX's persistent cache had."""
        return self._programs.num_compiled, self._programs.num_cached

    def update_params(self, params: Params) -> None:
        """Returns None; later programs use `params`; ValueError if none was compiled for such."""
        old, tree = jax.tree.flatten_with_path(self._params)
        new, new_tree = jax.tree.flatten_with_path(params)
        require(
            tree == new_tree,
            f"The new params are the tree {new_tree}, the old ones {tree}. Keep its structure.",
        )
        for (path, before), (_, after) in zip(old, new, strict=True):
            is_alike = before.shape == after.shape and before.dtype == after.dtype
            require(
                is_alike and _lie_alike(before, after),
                f"The new params{jax.tree_util.keystr(path)} is {_describe(after)}, the old one "
                f"{_describe(before)}. Keep shape, dtype and sharding.",
            )
        self._params = params

    def check_params(self) -> None:
        """Raises RuntimeError if the params were given away: JAX itself may crash on those."""
        if self._params["embed"]["weight"].is_deleted():  # then all are
            raise RuntimeError(
                "The params that the engine serves were donated to another program. Give it the "
                "new ones with update_params before the next step."
            )

    def write_row(self, shard: int, row: int, state: DecodeState) -> None:
        """Returns None; `row` of `shard` now holds the one-row numpy `state`."""
        words = device.pack_row(state)
        self._state = self._programs["write_row",](self._state, self._only(shard, row), words)

    def stop_row(self, shard: int, row: int) -> None:
        """Returns None; `row` of `shard` is inactive from the next program on."""
        self._state = self._programs["stop_row",](self._state, self._only(shard, row))

    def _only(self, shard: int, row: int) -> np.ndarray:
        """`row` for that shard, and none for the others."""
        rows = np.full(self.num_shards, self.num_rows, np.int32)
        rows[shard] = row
        return rows

    def map_pages(self, entries_C3: np.ndarray) -> None:
        """Returns None; page tables hold (row, index, page) `[num_starts, 3]` where row is one."""
        # Put by hand: it is all that steady decoding sends, and a transfer guard shows the rest.
        entries = self._put(entries_C3, spec("rows"))
        self._state = self._programs["map_pages",](self._state, entries)

    def prefill(self, chunks: Chunks) -> Array:
        """The hidden states `[N, D]` of the chunks' tokens, row by row; not waited for."""
        rows, tokens = chunks.tokens_BT.shape
        program = self._programs["prefill", rows // self.num_shards, tokens]
        table_RM = self._state.page_table_BM
        self._cache, x_ND = program(self._params, self._cache, table_RM, chunks)
        return x_ND

    def score(self, x_ND: Array, scored: Scored) -> Logprobs:
        """`Logprobs` [N] of the prompt tokens that follow those of a chunk; not waited for."""
        return self._programs["score",](self._params, self._state, x_ND, scored)

    def start(self, x_ND: Array, starts: Starts) -> StepOutput:
        """The first tokens `[num_starts, 1]` of rows that now decode, -1 for padding; not waited
        for.
        """
        program = self._programs["start",]
        self._state, output = program(self._params, self._state, x_ND, starts)
        return output

    def copy_pages(self, sources_C: np.ndarray, destinations_C: np.ndarray) -> None:
        """Returns None; each destination `[num_starts]` in range now holds what its source does."""
        program = self._programs["copy_pages",]
        self._cache = program(self._cache, sources_C, destinations_C)

    def decode(self, rows_B: np.ndarray, num_steps: int) -> StepOutput:
        """The next tokens `[B, W]` of the rows, -1 where none; not waited for."""
        program = self._programs["decode", len(rows_B) // self.num_shards]
        arguments = self._on_device(rows_B), self._num_steps[num_steps]
        self._cache, self._state, output = program(
            self._params, self._cache, self._state, *arguments
        )
        return output

    def _on_device(self, rows_B: np.ndarray) -> Array:
        """`rows_B` there; while the same rows decode on, nothing is sent."""
        if self._decoding is None or not np.array_equal(self._decoding[0], rows_B):
            self._decoding = rows_B, self._put(rows_B, spec("rows"))
        return self._decoding[1]

    def _put(self, array: np.ndarray | np.int32, where: PartitionSpec) -> Array:
        """`array` on the device, or over the mesh as `where` says."""
        if self._mesh is None:
            return jax.device_put(array)
        return jax.device_put(array, NamedSharding(self._mesh, where))

    def fetch(self, results: T) -> T:
        """The pytree `results` on the host, waited for: the only copy from the device that the
        engine makes.
        """
        start = time.perf_counter()
        fetched = jax.device_get(results)
        self.num_fetches += 1
        self.wait_s += time.perf_counter() - start
        return fetched


def _place(params: Params, mesh: Mesh | None) -> Params:
    """`params` where the programs want them; the same arrays if they lie there already."""
    if mesh is not None:
        return jax.device_put(params, param_shardings(mesh, params))
    params = jax.device_put(params)
    num_devices = max(len(leaf.sharding.device_set) for leaf in jax.tree.leaves(params))
    require(
        num_devices == 1,
        f"The params lie on {num_devices} devices, and the model has no mesh. Load both with the "
        "same parallel or mesh.",
    )
    return params


def _describe(array: Array) -> str:
    """Shape, dtype and place, the devices in their order."""
    place = getattr(array, "sharding", None)
    if place is None:
        return f"{array.dtype}{list(array.shape)} on the host"
    devices = [device.id for device in place.devices_indices_map(array.shape)]
    split = getattr(place, "spec", "whole")
    return f"{array.dtype}{list(array.shape)}, {split} on devices {devices}"


def _lie_alike(before: Array, after: Array) -> bool:
    """Whether both lie on the same devices in the same way, however their shardings are spelled."""
    place = getattr(after, "sharding", None)  # none on the host
    return place is not None and before.sharding.is_equivalent_to(place, before.ndim)


def _check_platform() -> None:
    """Raises ValueError where programs that are equal but for their sizes may round differently."""
    platform = jax.default_backend()
    require(
        platform == "cpu",
        f"batch_invariant=True holds on CPU only, and the platform is {platform!r}, whose kernels "
        "are chosen for each program anew. Leave it off.",
    )
