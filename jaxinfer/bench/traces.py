"""Traffic as data: when requests arrive, how long they are, and which prompts begin alike."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jaxinfer.config import require

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Mooncake's traces hash each prompt in blocks of that many tokens.
MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class TracedRequest:
    """One request of a trace: its sizes, not its content.

    Attributes:
        arrival_s: seconds after the first request of the trace.
        num_prompt, num_output: tokens, at least 1 each.
        prefix_hashes: one for each `tokens_per_hash` tokens of the prompt, the last one for the
            rest; equal hashes stand for equal tokens. None: no two prompts begin alike.
        priority: the lower goes first, where the policy heeds it.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    prefix_hashes: tuple[int, ...] | None = None
    tokens_per_hash: int = MOONCAKE_BLOCK
    priority: int = 0


def fixed_trace(num_prompt: int, num_output: int, count: int) -> tuple[TracedRequest, ...]:
    """`count` requests of the same lengths, which all arrive at once."""
    for name, value in (("IN", num_prompt), ("OUT", num_output), ("COUNT", count)):
        require(value >= 1, f"Fixed traffic of {name}={value} must be at least 1.")
    return (TracedRequest(0.0, num_prompt, num_output),) * count


def read_trace(path: str | Path, *, limit: int | None = None) -> tuple[TracedRequest, ...]:
    """The requests of the file in order of arrival, the first at 0 s; the first `limit` lines only.

    What the file begins with says what it is: JSON objects with `timestamp` (ms), `input_length`,
    `output_length`, `hash_ids` (Mooncake) and perhaps `priority`, or a CSV header with TIMESTAMP,
    ContextTokens and GeneratedTokens (Azure's LLM inference traces). ValueError names a line that
    is not understood.
    """
    require(limit is None or limit >= 1, f"A trace of {limit} requests must have at least 1.")
    with open(path, encoding="utf-8-sig") as file:
        lines = ((number, line.strip()) for number, line in enumerate(file, 1) if line.strip())
        number, first = next(lines, (0, ""))
        require(number > 0, f"{path} is empty. Give a trace with at least one request.")
        if first.startswith("{"):
            parse, form = _mooncake_request, _MOONCAKE_FORM
            lines = itertools.chain([(number, first)], lines)
        else:
            parse, form = _azure_parser(path, number, first), _AZURE_FORM
        found = _parsed(path, itertools.islice(lines, limit), parse, form)
    require(bool(found), f"{path} holds a header alone. Give a trace with at least one request.")
    start = min(request.arrival_s for request in found)
    found = [dataclasses.replace(one, arrival_s=one.arrival_s - start) for one in found]
    return tuple(sorted(found, key=lambda request: request.arrival_s))


def scale(
    requests: Iterable[TracedRequest],
    *,
    divide: int = 1,
    clip: tuple[int, int] | None = None,
    speedup: float = 1.0,
) -> tuple[TracedRequest, ...]:
    """The requests with lengths divided by `divide` (rounded up), then cut to `clip`: (most prompt
    tokens, most output tokens); arrivals `speedup` times as fast.

    A hash then stands for as many tokens fewer, so that prompts share the same part of themselves.
    """
    require(divide >= 1, f"divide={divide} must be at least 1.")
    require(speedup > 0, f"speedup={speedup} must be greater than 0.")
    require(
        clip is None or min(clip) >= 1, f"clip={clip} must leave each request 1 token in and out."
    )
    return tuple(_scaled(request, divide, clip, speedup) for request in requests)


def _scaled(
    request: TracedRequest, divide: int, clip: tuple[int, int] | None, speedup: float
) -> TracedRequest:
    num_prompt, num_output = -(-request.num_prompt // divide), -(-request.num_output // divide)
    if clip is not None:
        num_prompt, num_output = min(num_prompt, clip[0]), min(num_output, clip[1])
    hashes, tokens_per_hash = request.prefix_hashes, request.tokens_per_hash
    if hashes is not None:
        require(
            tokens_per_hash % divide == 0,
            f"divide={divide} does not divide the {tokens_per_hash} tokens that each hash of the "
            "trace stands for. Choose a power of 2.",
        )
        tokens_per_hash //= divide
        hashes = hashes[: -(-num_prompt // tokens_per_hash)]
    return dataclasses.replace(
        request,
        arrival_s=request.arrival_s / speedup,
        num_prompt=num_prompt,
        num_output=num_output,
        prefix_hashes=hashes,
        tokens_per_hash=tokens_per_hash,
    )


_AZURE_FORM = "a row such as 2023-11-16 18:17:03.97,480,10 under its header"
_MOONCAKE_FORM = (
    'an object such as {"timestamp": 27, "input_length": 600, "output_length": 9, '
    f'"hash_ids": [46, 47]}}, with a hash for each {MOONCAKE_BLOCK} tokens'
)
_Parse = Callable[[str], TracedRequest]


def _parsed(
    path: str | Path, lines: Iterable[tuple[int, str]], parse: _Parse, form: str
) -> list[TracedRequest]:
    found = []
    for number, line in lines:
        try:
            found.append(parse(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"{path}, line {number}: {line[:80]!r} is not {form} ({error}). "
                "Correct or remove the line."
            ) from error
    return found


def _azure_parser(path: str | Path, number: int, header: str) -> _Parse:
    """What makes a request of a row under that header."""
    columns = next(csv.reader([header]))
    require(
        set(AZURE_COLUMNS) <= set(columns),
        f"{path}, line {number}: {header[:80]!r} begins no known trace. Give a CSV file with the "
        f"columns {','.join(AZURE_COLUMNS)} (Azure), or a file of {_MOONCAKE_FORM} (Mooncake).",
    )
    time_at, prompt_at, output_at = (columns.index(name) for name in AZURE_COLUMNS)

    def parse(line: str) -> TracedRequest:
        cells = next(csv.reader([line]))
        arrival = datetime.fromisoformat(cells[time_at])
        if arrival.tzinfo is None:  # differences alone count, so any zone will do
            arrival = arrival.replace(tzinfo=UTC)
        num_prompt, num_output = _count(int(cells[prompt_at])), _count(int(cells[output_at]))
        return TracedRequest(arrival.timestamp(), num_prompt, num_output)

    return parse


def _mooncake_request(line: str) -> TracedRequest:
    fields = json.loads(line)
    num_prompt, hashes = _count(fields["input_length"]), tuple(fields["hash_ids"])
    for one in hashes:
        require(type(one) is int and one >= 0, f"hash {one!r} is not an integer of at least 0")
    needed = -(-num_prompt // MOONCAKE_BLOCK)
    require(len(hashes) == needed, f"{num_prompt} tokens have {needed} hashes, not {len(hashes)}")
    num_output = _count(fields["output_length"])
    priority = fields.get("priority", 0)
    require(type(priority) is int, f"priority {priority!r} is not an integer")
    arrival_s = float(fields["timestamp"]) / 1e3
    return TracedRequest(arrival_s, num_prompt, num_output, hashes, priority=priority)


def _count(value: object) -> int:
    require(type(value) is int and value >= 1, f"{value!r} is not a number of tokens, at least 1")
    assert isinstance(value, int)
    return value
