"""What XLA made of a program, as one device runs it: bytes held, copies, exchanges with others.

The devices may be of a TPU slice that is not there: its compiler runs without one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

EXCHANGES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

# Neither is a machine of a cloud asked what it is, nor a TPU held: several processes may compile.
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True)
class Result:
    """What one line of a program's text computes.

    Attributes:
        operation: its name in HLO; of an exchange that is started ahead, without "-start".
        computation: that which the line stands in.
        arrays: `(dtype, shape)` of each array of it; what is started ahead has its largest only, as
            operands and results stand there.
        target: whose code a custom call runs.
    """

    operation: str
    computation: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    target: str | None = None

    @property
    def num_bytes(self) -> int:
        return sum(map(_num_bytes, self.arrays))


@dataclass(frozen=True)
class Program:
    """A compiled program, per device.

    Attributes:
        argument_bytes: of all arguments, the donated ones too.
        alias_bytes: of the arguments whose memory a result takes.
        temp_bytes: what is held besides while it runs.
        results: each line of the text. What a loop does each time stands once.
        loops: the computations that loops repeat.
    """

    argument_bytes: int
    alias_bytes: int
    temp_bytes: int
    results: tuple[Result, ...]
    loops: frozenset[str]

    def exchanges(self) -> list[Result]:
        """Where devices exchange something."""
        return [result for result in self.results if result.operation in EXCHANGES]

    def moved(self, least: int) -> list[Result]:
        """The copies and transposes of at least that many bytes."""
        kinds = ("copy", "copy-start", "transpose")
        return [
            result
            for result in self.results
            if result.operation in kinds and result.num_bytes >= least
        ]

    def kernels(self) -> list[Result]:
        """The calls of TPU kernels."""
        return [result for result in self.results if result.target == "tpu_custom_call"]


def tpu_devices(topology: str) -> list[Any]:
    """The devices of a TPU slice that is not there, such as "v6e:2x4". Needs the package libtpu."""
    for name, value in _WITHOUT_TPU.items():
        os.environ.setdefault(name, value)
    return list(topologies.get_topology_desc(topology, platform="tpu").devices)


def compile_for(platform: str, jitted: Any, *operands: Any) -> Program:
    """`jitted` for operands that may be shapes, compiled for the devices of a platform that its
    shardings or theirs name.
    """
    return read_program(jitted.trace(*operands).lower(lowering_platforms=(platform,)).compile())


def read_program(compiled: jax.stages.Compiled) -> Program:
    """What there is to know of a compiled function."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        results=tuple(_results(text)),
        loops=frozenset(re.findall(r" while\(.*?body=%?([\w.\-]+)", text)),
    )


def _results(text: str) -> Iterable[Result]:
    computation = ""
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            computation = head[1]
        elif found := re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z\d-]*)\(", line):
            kind, operation = found[1], found[2]
            arrays = tuple(
                (dtype, tuple(int(size) for size in sizes.split(",") if size))
                for dtype, sizes in re.findall(r"(\w+)\[([\d,]*)\]", kind)
            )
            if operation.endswith("-start") and operation != "all-reduce-start":
                arrays = (max(arrays, key=_num_bytes),)
            if operation.removesuffix("-start") in EXCHANGES:
                operation = operation.removesuffix("-start")
            target = re.search(r'custom_call_target="([^"]*)"', line)
            yield Result(operation, computation, arrays, target[1] if target else None)


def _num_bytes(array: tuple[str, tuple[int, ...]]) -> int:
    dtype, shape = array
    bits = re.match(r"[a-z]+(\d+)", dtype)
    if dtype == "pred":
        return math.prod(shape)
    return math.prod(shape) * int(bits[1]) // 8 if bits else 0  # a token, say


def bytes_of(tree: Any, shardings: Any = None) -> int:
    """The bytes of the arrays or shapes of a tree; given where each lies, those of one device."""
    leaves = jax.tree.leaves(tree)
    shapes = (
        [leaf.shape for leaf in leaves]
        if shardings is None
        else [
            place.shard_shape(leaf.shape)
            for leaf, place in zip(leaves, jax.tree.leaves(shardings), strict=True)
        ]
    )
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in zip(shapes, leaves))
