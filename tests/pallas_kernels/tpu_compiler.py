"""The real TPU compiler, without a TPU: programs compiled for the devices of an absent slice."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import Counter
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh

needs_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

# The smallest slices; one of their devices is compiled for.
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
# No machine of a cloud is asked what it is, and several processes may compile at a time.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
KERNEL = 'custom_call_target="tpu_custom_call"'
ITEM_BYTES = {"bf16": 2, "f32": 4, "s32": 4, "s8": 1, "u8": 1, "pred": 1, "f8e4m3fn": 1}


def mesh_of(topology: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """A mesh of the first devices of a slice that is not there."""
    os.environ.update(ENVIRONMENT)
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    return Mesh(np.array(devices[: math.prod(shape)]).reshape(shape), names)


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a program, per device.

    Attributes:
        kernels: Pallas kernels in its text, where a loop's body stands once.
        operations: how often each stands in the text.
        beside_kernel: the same of the computation that a kernel stands in: the body of the loop
            over layers, if there is one.
        moved: `(operation, bytes)` of the copies and transposes of at least 1 MiB.
    """

    arguments: int
    temp: int
    alias: int
    kernels: int
    operations: Counter[str]
    beside_kernel: Counter[str]
    moved: list[tuple[str, int]]


def compile_for(jitted, *operands) -> Compiled:
    """The program of a jitted function, compiled for the devices that the shardings of its operands
    or its own name.
    """
    program = jitted.trace(*operands).lower(lowering_platforms=("tpu",)).compile()
    memory, text = program.memory_analysis(), program.as_text()
    moved = []
    for kind, sizes, operation in results(text):
        size = math.prod(int(n) for n in sizes.split(",") if n) * ITEM_BYTES.get(kind, 4)
        if operation in ("copy", "copy-start", "transpose") and size >= 2**20:
            moved.append((operation, size))
    beside_kernel = Counter()
    for computation in text.split("\n\n"):
        if KERNEL in computation:
            beside_kernel.update(operation for *_, operation in results(computation))
    return Compiled(
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        text.count(KERNEL),
        Counter(operation for *_, operation in results(text)),
        beside_kernel,
        moved,
    )


def results(text: str) -> list[tuple[str, str, str]]:
    """`(type, sizes, operation)` of each line; of a tuple, its first member."""
    return re.findall(r"= \(*(\w+)\[([\d,]*)\].*? ([a-z][a-z\d-]*)\(", text)


def bytes_of(tree) -> int:
    """The bytes of all arrays of a pytree."""
    return sum(
        math.prod(x.shape) * jax.numpy.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)
    )
