"""A real model, SmolLM2-135M-Instruct, against another library's float32 results.

The model is fetched into checkpoints/ if it is not there, as `make demo` does.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint import resolve
from jaxinfer.compute import PrefillBatch, init_cache
from jaxinfer.compute.steps import prefill_hidden

DATA = Path(__file__).parents[1] / "data"
ROOT = Path(__file__).parents[2] / "checkpoints"
# Below this gap between the two best logits another order of summation may choose the other.
TIE = 1e-3
# 30 layers are long to compile: few shapes of calls.
OPTIONS = dict(dtype="float32", max_model_len=1600, max_num_seqs=4, prefill_chunk=32)
CHUNK = 64
FEW = slice(1, 28, 2)  # 14 prompts, one of them of 1500 tokens and one of a single token


@pytest.fixture(
    scope="module",
    params=[FEW, pytest.param(slice(None), marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def references(request):
    """30 prompts of all kinds with the log-probability of each token but the first, 64 greedy ids
    each (EOS not stopping), the five most likely at each step and the gap between the best two.
    """
    with open(DATA / "smollm2.json") as file:
        return json.load(file)["prompts"][request.param]


@pytest.fixture(scope="module")
def loaded():
    return jaxinfer.load(str(resolve("smollm2-135m", ROOT)), dtype="float32")


@pytest.fixture(scope="module")
def llm():
    return jaxinfer.LLM(str(resolve("smollm2-135m", ROOT)), compile_ahead=True, **OPTIONS)


@pytest.fixture(scope="module")
def served(llm, references):
    """The requests of all prompts, served at once, in chunks; log-probabilities of all tokens."""
    engine, params = llm._engine, jaxinfer.SamplingParams(temperature=0.0, ignore_eos=True)
    params = params.replace(max_tokens=64, logprobs=5, prompt_logprobs=0)
    requests = [engine.add_request(ref["prompt_ids"], params) for ref in references]
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    assert engine.metrics()["compiles_after_warmup"] == 0
    return requests


def num_certain(ref):
    """Steps up to the first tie."""
    return next((step for step, gap in enumerate(ref["gap"]) if gap < TIE), 64)


def test_greedy_ids(served, references):
    num_compared = 0
    for request, ref in zip(served, references, strict=True):
        until = num_certain(ref)
        assert request.output_ids[:until] == ref["greedy_ids"][:until], ref["id"]
        num_compared += until
    assert num_compared > 60 * len(references)


def assert_near(got, wanted):
    """Returns how many values were compared. A hidden state in many thousand amplifies float32
    rounding, in any order of summation, beyond what the others show.
    """
    errors = np.abs(np.subtract(got, wanted))
    assert np.quantile(errors, 0.999) < 1e-4
    assert errors.max() < 2e-3
    return errors.size


def test_log_probabilities(served, references):
    """Of every token of the prompts, and of the five most likely at every step."""
    prompts, tops = ([], []), ([], [])
    for request, ref in zip(served, references, strict=True):
        assert request.prompt_logprobs[0] is None
        prompts[0].extend(entry.logprob for entry in request.prompt_logprobs[1:])
        prompts[1].extend(ref["prompt_logprobs"])
        for step in range(num_certain(ref)):
            entry = request.logprobs[step]
            assert entry.logprob == entry.top[entry.token_id] == max(entry.top.values())
            tops[0].extend(entry.top.values())
            tops[1].extend(ref["top5_logprobs"][step])
    assert assert_near(*prompts) == sum(len(ref["prompt_ids"]) - 1 for ref in references)
    assert assert_near(*tops) > 5 * 60 * len(references)


def test_scores(llm, served, references):
    """Short prompts with their outputs as one text: as they were when generated, and as in the
    reference.
    """
    short = [pair for pair in zip(served, references) if len(pair[0].prompt_ids) <= 200]
    short = short[::2]
    all_scores = llm.score([[*r.prompt_ids, *r.output_ids] for r, _ in short])
    got, wanted = [], []
    for scores, (request, ref) in zip(all_scores, short, strict=True):
        entries = [*request.prompt_logprobs[1:], *request.logprobs]
        generated = [entry.logprob for entry in entries]
        np.testing.assert_allclose(scores, generated, atol=1e-4, rtol=0, err_msg=ref["id"])
        best = [top[0] for top in ref["top5_logprobs"][: num_certain(ref)]]
        got.extend(scores[: len(ref["prompt_logprobs"]) + len(best)])
        wanted.extend([*ref["prompt_logprobs"], *best])
    assert assert_near(got, wanted) > 90 * len(short)


def test_final_logits(loaded, references):
    """The logits after a prompt of 1 to 1500 tokens, by the pure steps in chunks of one shape."""
    model, params = loaded
    with np.load(DATA / "smollm2.npz") as arrays:
        for ref in references:
            if f"{ref['id']}_final_logits" not in arrays:
                continue
            got = final_logits(model, params, ref["prompt_ids"])
            want = arrays[f"{ref['id']}_final_logits"]
            np.testing.assert_allclose(got, want, atol=2e-3, rtol=0, err_msg=ref["id"])


def final_logits(model, params, ids):
    """float32 logits `[V]` of the token after `ids`."""
    num_pages = OPTIONS["max_model_len"] // 32
    cache = init_cache(model.config, jaxinfer.CacheConfig(num_pages=num_pages, dtype="float32"))
    table_BM = np.arange(num_pages, dtype=np.int32)[None]
    compute = jax.jit(prefill_hidden, static_argnums=0, donate_argnums=2)
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        tokens_BT = np.array([part + [0] * (CHUNK - len(part))], np.int32)
        lens_B = np.array([len(part)], np.int32)
        batch = PrefillBatch(tokens_BT, lens_B, start + lens_B, table_BM)
        cache, x_BTD = compute(model, params, cache, batch)
    return np.asarray(model.unembed(params, x_BTD[:, len(part) - 1]))[0]
