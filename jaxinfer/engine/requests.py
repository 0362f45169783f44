"""What a caller asks for, checked -> the `Request`s of its samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

import numpy as np

from jaxinfer.compute.sampling_state import fresh_seed
from jaxinfer.config import require
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.sched import Request


def make_requests(
    name: str,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    num_valid_ids: int,
    eos_ids: Sequence[int],
    max_logprobs: int,
    priority: int = 0,
) -> tuple[Request, ...]:
    """The `params.n` requests of one prompt, which the first computes for all of them.

    They are called `name`, `name.1` and so on. Prompt log-probabilities are the first one's alone.
    Raises ValueError for token ids that do not exist and for parameters that cannot be applied.
    """
    prompt = _checked_prompt(name, prompt_ids, num_valid_ids)
    params.check(num_valid_ids, eos_ids)
    _check_logprobs(name, params, max_logprobs)
    first = Request(
        id=name,
        prompt_ids=prompt,
        params=params,
        seed=fresh_seed() if params.seed is None else params.seed,
        stop_ids=frozenset(params.stop_ids(eos_ids)),
        priority=priority,
    )
    if params.prompt_logprobs is not None:
        first.prompt_logprobs.append(None)  # nothing comes before the first token
    alike = params.replace(prompt_logprobs=None)
    others = (
        dataclasses.replace(first, id=f"{name}.{i}", params=alike, sample_index=i)
        for i in range(1, params.n)
    )
    return (first, *others)


def require_new(samples: Sequence[Request], under_way: Container[str]) -> None:
    """Returns None, or raises ValueError if one of the names is among those of others."""
    taken = [request.id for request in samples if request.id in under_way]
    require(
        not taken,
        f"Request {taken and taken[0]!r} was added before. Give each request an id of its own.",
    )


def _check_logprobs(name: str, params: SamplingParams, most: int) -> None:
    for field in ("logprobs", "prompt_logprobs"):
        count = getattr(params, field)
        require(
            count is None or count <= most,
            f"Request {name!r} asks for {field}={count}, more than max_logprobs={most}. "
            "Ask for fewer or raise max_logprobs.",
        )


def _checked_prompt(name: str, prompt_ids: Sequence[int], num_valid_ids: int) -> tuple[int, ...]:
    ids = np.asarray(prompt_ids)
    require(
        ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer)),
        f"Request {name!r} has a prompt that is not a list of integer token ids.",
    )
    bad = ids[(ids < 0) | (ids >= num_valid_ids)]
    require(
        bad.size == 0,
        f"Request {name!r} holds token id {bad[0] if bad.size else 0}; "
        f"the model has ids 0..{num_valid_ids - 1}.",
    )
    return tuple(ids.tolist())
