"""Keeps the table of what the TPU compiler compiled: `--kernel-table docs/kernels_aot.md`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import jax
import pytest

HEADING = """\
# What the TPU compiler compiled

Written by `make kernels-aot`, with jax {jax}: one decode call each, of 8 rows with 2048 tokens of
context, 4 query heads to a kv head, on a stacked and donated cache. Each one compiled, with one
kernel, an alias of exactly the bytes of the cache, and no copy of 1 MiB or more.

| chip | pages of | head dims | page sizes | kv heads | calls | largest temp, bytes |
| --- | --- | --- | --- | --- | --- | --- |
"""


def pytest_addoption(parser):
    parser.addoption("--kernel-table", metavar="PATH", help="write the table of compiled kernels")


@pytest.fixture(scope="session")
def kernel_table(request):
    """`(chip, dtype, head dim, page size, kv heads, temp bytes, seconds)` of each compiled call."""
    rows = []
    yield rows
    path = request.config.getoption("--kernel-table", default=None)
    if path is not None:
        Path(path).write_text(HEADING.format(jax=jax.__version__) + body(rows), encoding="utf-8")


def body(rows) -> str:
    """A line for each chip and type, and the seconds of all."""
    lines = []
    for (chip, dtype), calls in groupby(sorted(rows), lambda row: row[:2]):
        group = list(calls)
        values = [sorted({row[i] for row in group}) for i in (2, 3, 4)]
        cells = [", ".join(map(str, column)) for column in values]
        lines.append([chip, dtype, *cells, str(len(group)), str(max(row[5] for row in group))])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    seconds = sum(row[6] for row in rows)
    return f"{text}\n{len(rows)} calls, {seconds / max(1, len(rows)):.1f} s each on average.\n"
