"""A plain float64 sampler for one row: sorts, loops and dictionaries, no tricks."""

import numpy as np

from jaxinfer.sampling_params import SamplingParams


def process(logits, params: SamplingParams, prompt, output, eos_ids):
    """Float64 logits after bias, allowed and bad tokens, penalties and min_tokens."""
    x = np.array(logits, np.float64)
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.allowed_token_ids is not None:
        x[[v for v in range(len(x)) if v not in set(params.allowed_token_ids)]] = -np.inf
    output = list(output)
    for word in params.bad_words or ():
        head = list(word[:-1])
        if not head or output[-len(head) :] == head:
            x[word[-1]] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / params.repetition_penalty
            if x[token] > 0
            else (x[token] * params.repetition_penalty)
        )
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        x[list(params.stop_ids(eos_ids))] = -np.inf
    return x


def distribution(processed, params: SamplingParams, slack):
    """Float64 probabilities after temperature and filters; `slack` is taken off top_p."""
    x = np.asarray(processed, np.float64)
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    if params.temperature < 1e-30:
        return np.eye(len(x))[order[0]]
    weights = np.exp((x - x.max()) / params.temperature)
    if 0 < params.top_k < len(x):
        order = order[: params.top_k]
    if params.top_p < 1:
        target = (params.top_p - slack) * sum(weights[v] for v in order)
        kept, mass = [], 0.0
        for v in order:
            if kept and mass >= target:
                break
            kept.append(v)
            mass += weights[v]
        order = kept
    order = [v for v in order if weights[v] >= params.min_p * weights.max()]
    probs = np.zeros(len(x))
    probs[order] = weights[order]
    return probs / probs.sum()
