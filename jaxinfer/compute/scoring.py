"""Log-probabilities of prompt tokens, from the hidden states that a prefill leaves.

A few states at a time: logits of a whole chunk never exist.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.logprobs import init_logprobs, score_logits
from jaxinfer.compute.tiles import TILE, map_tiles
from jaxinfer.compute.types import Logprobs, SamplingState


def score_prompt(
    model: Decoder,
    params: Params,
    sampling: SamplingState,
    x_ND: Array,
    tokens_S: Array,
    *,
    index: Array,
    start: Array,
    length: Array,
    max_logprobs: int,
    logits_hook: LogitsHook | None = None,
) -> Logprobs:
    """`Logprobs` [N] of the prompt token that follows each hidden state of a chunk.

    The chunk is positions `start .. start + length - 1` of the prompt `tokens_S` (-1 behind it),
    its states `x_ND[index : index + length]`. Entries of other states, and of the prompt's last
    token, mean nothing. `sampling` is the prompt's one row. "raw" is the log-softmax of the model's
    own logits; "processed" is of what the sampler would have drawn from had the prompt ended before
    that token: with the row's parameters, no output, and the tokens before as the prompt that is
    penalised.
    """
    N, S = x_ND.shape[0], tokens_S.shape[0]
    vocab = sampling.counts_BV.shape[1]
    ids_S = jnp.where(tokens_S < 0, vocab, tokens_S)
    first_V = jnp.full(vocab, S, jnp.int32)
    first_V = first_V.at[ids_S].min(jnp.arange(S, dtype=jnp.int32), mode="drop")
    row = _broadcast(sampling, TILE)

    def score_tile(_: None, states: tuple[Array, Array], active_B: Array):
        x_BD, next_B = states
        logits_BV = model.unembed(params, x_BD)
        seen_BV = (first_V < next_B[:, None]).astype(row.counts_BV.dtype)
        return None, score_logits(
            logits_BV,
            jnp.maximum(tokens_S[next_B], 0),
            dataclasses.replace(row, counts_BV=seen_BV),
            max_logprobs=max_logprobs,
            logits_hook=logits_hook,
            mesh=model.mesh,
        )

    steps_N = jnp.arange(N, dtype=jnp.int32) - index
    states = x_ND, jnp.clip(start + steps_N + 1, 0, S - 1)
    nothing = init_logprobs((N,), max_logprobs)
    is_scored_N = (steps_N >= 0) & (steps_N < length)
    return map_tiles(score_tile, None, states, nothing, is_scored_N, model.mesh)[1]


def _broadcast(sampling: SamplingState, num_rows: int) -> SamplingState:
    """The one row of `sampling`, without an output, `num_rows` times."""
    fresh = dataclasses.replace(
        sampling,
        num_output_B=jnp.zeros_like(sampling.num_output_B),
        recent_BR=jnp.full_like(sampling.recent_BR, -1),
    )
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_rows, *leaf.shape[1:])), fresh)
