"""The shapes that prefill calls are padded to, and which of them a call takes."""

from __future__ import annotations

from collections.abc import Sequence

Shape = tuple[int, int]  # rows, tokens per row

MAX_ROWS = 8
# Shorter rows would only add programs to compile: so few tokens cost no more than one does.
MIN_TOKENS = 16
# What a call costs besides its tokens, in tokens: each call reads all the weights.
CALL_COST = 64


def prefill_shapes(prefill_chunk: int, max_num_seqs: int, max_prompt_len: int) -> tuple[Shape, ...]:
    """The (rows, tokens) shapes of prefill calls, fewest rows first, the longest row first of all.

    None has more than `prefill_chunk` tokens in all, `max_num_seqs` rows or `max_prompt_len` tokens
    in a row. The first is one row as long as those limits allow, so that a prompt of any length can
    be computed chunk by chunk. Then come shapes of the same area with 2, 4 and 8 rows, for many
    short prompts, and single rows of a quarter and a sixteenth, for a short prompt alone or the end
    of a long one. 512 tokens and 32 rows: 1x512, 1x128, 1x32, 2x256, 4x128, 8x64.
    """
    longest = min(prefill_chunk, max_prompt_len)
    shapes = {(1, longest)}
    for tokens in (prefill_chunk // 4, prefill_chunk // 16):
        if MIN_TOKENS <= tokens < longest:
            shapes.add((1, tokens))
    rows = 2
    while rows <= min(MAX_ROWS, max_num_seqs):
        tokens = min(prefill_chunk // rows, longest)
        if tokens >= min(MIN_TOKENS, longest):
            shapes.add((rows, tokens))
        rows *= 2
    return tuple(sorted(shapes, key=lambda shape: (shape[0], -shape[1])))


def pick(shapes: Sequence[Shape], lengths: Sequence[int]) -> tuple[Shape, tuple[int, ...]]:
    """The shape of the next call, and the indices into `lengths` of what it computes, in order.

    `lengths` are the tokens still to compute of each request, in order of arrival. The first is
    always taken, so none starves; with it go the longest others that fit, which leaves the least
    padding. Among the shapes, the one with the most tokens computed per cost (its area and
    `CALL_COST`) wins, on a tie the one with fewer rows. Only a request alone in the longest shape
    is ever cut: cut anywhere else, its rest would need calls of its own.
    """
    best_shape, best_indices, best_value = shapes[0], (0,), 0.0
    for rows, tokens in shapes:
        if lengths[0] > tokens:
            continue
        fitting = [i for i in range(1, len(lengths)) if lengths[i] <= tokens]
        fitting.sort(key=lambda i: -lengths[i])
        indices = (0, *sorted(fitting[: rows - 1]))
        value = sum(lengths[i] for i in indices) / (rows * tokens + CALL_COST)
        if value > best_value:
            best_shape, best_indices, best_value = (rows, tokens), indices, value
    return best_shape, best_indices
