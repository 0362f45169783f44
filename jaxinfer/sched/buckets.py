"""The shapes that prefill calls are padded to, and which of them a call takes."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

Shape = tuple[int, int]  # rows, tokens per row

# Shorter rows would only add programs to compile: so few tokens cost no more than one does.
MIN_TOKENS = 16
# What a call costs besides its tokens, in tokens: each call reads all the weights.
CALL_COST = 64
# What a request costs that a call does not finish: its rest takes a part of another.
CUT_COST = 16
# Tokens of the shorter shapes, in sixteenths of a chunk. With these 5 % of what is computed for 16
# conversations at a time, with prompts of 20 to 512 tokens, is padding; a quarter where only the
# longest row may be cut.
SINGLE_ROWS = (12, 6, 3, 1)
SHORT_ROWS = ((2, 1), (4, 1), (8, 2))  # rows, sixteenths


def prefill_shapes(prefill_chunk: int, max_num_seqs: int, max_prompt_len: int) -> tuple[Shape, ...]:
    """The (rows, tokens) shapes of prefill calls, fewest rows first, the longest row first of all.

    None has more than `prefill_chunk` tokens in all, `max_num_seqs` rows or `max_prompt_len` tokens
    in a row. The first is one row as long as those limits allow. Then come shorter single rows, for
    one prompt alone or the rest of one, and at last several short rows, for many short prompts.
    512 tokens and 32 rows: 1x512, 1x384, 1x192, 1x96, 1x32, 2x32, 4x32, 8x64.
    """
    longest = min(prefill_chunk, max_prompt_len)
    shapes = {(1, longest)}
    for sixteenths in SINGLE_ROWS:
        tokens = prefill_chunk * sixteenths // 16
        if MIN_TOKENS <= tokens < longest:
            shapes.add((1, tokens))
    for rows, sixteenths in SHORT_ROWS:
        tokens = min(max(prefill_chunk * sixteenths // 16, MIN_TOKENS), longest)
        shapes.add((min(rows, max_num_seqs, prefill_chunk // tokens), tokens))
    return tuple(sorted(shapes, key=lambda shape: (shape[0], -shape[1])))


def pick(
    shapes: Sequence[Shape], lengths: Sequence[int], limit: int
) -> tuple[Shape, tuple[tuple[int, int], ...]]:
    """The shape of the next call, and the (index into `lengths`, tokens) of what it computes.

    `lengths` are the tokens still to compute of each request, in order of precedence. The first is
    always taken, so none starves; with it go those that fill the rows best. Among the shapes of at
    most `limit` tokens the one with the most tokens computed per cost wins, on a tie the one with
    fewer rows. It costs its area, `CALL_COST`, and `CUT_COST` for each request that it does not
    finish. If all shapes are larger, it is the shortest row, filled up to the limit.
    """
    allowed = [shape for shape in shapes if shape[0] * shape[1] <= limit]
    if not allowed:
        shortest = min(tokens for rows, tokens in shapes if rows == 1)
        return (1, shortest), ((0, min(lengths[0], shortest, limit)),)
    best_shape, best_taken, best_value = allowed[0], [0], 0.0
    for rows, tokens in allowed:
        cut = [min(length, tokens) for length in lengths]
        taken = [0, *nlargest(rows - 1, range(1, len(lengths)), key=cut.__getitem__)]
        num_computed = sum(cut[i] for i in taken)
        num_cut = sum(lengths[i] > tokens for i in taken)
        value = num_computed / (rows * tokens + CALL_COST + CUT_COST * num_cut)
        if value > best_value:
            best_shape, best_taken, best_value = (rows, tokens), taken, value
    return best_shape, tuple((i, min(lengths[i], best_shape[1])) for i in sorted(best_taken))
