"""A real model, SmolLM2-135M-Instruct, against another library's float32 results.

The model is fetched into checkpoints/ if it is not there, as `make demo` does.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxinfer
from jaxinfer.checkpoint import resolve
from jaxinfer.compute import init_cache, make_prefill_batch
from jaxinfer.compute.steps import prefill_hidden

DATA = Path(__file__).parents[1] / "data"
ROOT = Path(__file__).parents[2] / "checkpoints"
# Below this gap between the two best logits another order of summation may choose the other.
TIE = 1e-3
MODEL_LEN = 1600


@pytest.fixture(scope="module")
def references():
    """30 prompts of all kinds with the log-probability of each token but the first, 64 greedy ids
    each (EOS not stopping), the five most likely at each step and the gap between the best two.
    """
    with open(DATA / "smollm2.json") as file:
        return json.load(file)["prompts"]


@pytest.fixture(scope="module")
def loaded():
    return jaxinfer.load(str(resolve("smollm2-135m", ROOT)), dtype="float32")


@pytest.fixture(scope="module")
def llm():
    return jaxinfer.LLM(
        str(resolve("smollm2-135m", ROOT)), dtype="float32", max_model_len=MODEL_LEN
    )


@pytest.fixture(scope="module")
def served(llm, references):
    """The requests of all prompts, served at once, in chunks; log-probabilities of all tokens."""
    engine, params = llm._engine, jaxinfer.SamplingParams(temperature=0.0, ignore_eos=True)
    params = params.replace(max_tokens=64, logprobs=5, prompt_logprobs=0)
    requests = [engine.add_request(ref["prompt_ids"], params) for ref in references]
    while engine.has_work:
        engine.step()
    engine.check_integrity()
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
    assert num_compared > 1500


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
    assert assert_near(*prompts) > 5000
    assert assert_near(*tops) > 9000


def test_scores(llm, served, references):
    """Short prompts with their outputs as one text: as they were when generated, and as in the
    reference.
    """
    short = [pair for pair in zip(served, references) if len(pair[0].prompt_ids) <= 200]
    all_scores = llm.score([[*r.prompt_ids, *r.output_ids] for r, _ in short])
    got, wanted = [], []
    for scores, (request, ref) in zip(all_scores, short, strict=True):
        entries = [*request.prompt_logprobs[1:], *request.logprobs]
        generated = [entry.logprob for entry in entries]
        np.testing.assert_allclose(scores, generated, atol=1e-4, rtol=0, err_msg=ref["id"])
        best = [top[0] for top in ref["top5_logprobs"][: num_certain(ref)]]
        got.extend(scores[: len(ref["prompt_logprobs"]) + len(best)])
        wanted.extend([*ref["prompt_logprobs"], *best])
    assert assert_near(got, wanted) > 2500


def test_final_logits(loaded, references):
    """The logits after a prompt of 1 to 1500 tokens, computed whole."""
    model, params = loaded
    with np.load(DATA / "smollm2.npz") as arrays:
        for ref in references:
            if f"{ref['id']}_final_logits" not in arrays:
                continue
            # Few shapes, so few compilations: the prompt padded to a power of two.
            ids, width = ref["prompt_ids"], 1 << (len(ref["prompt_ids"]) - 1).bit_length()
            got = final_logits(model, params, ids, max(width, 64))
            want = arrays[f"{ref['id']}_final_logits"]
            np.testing.assert_allclose(got, want, atol=2e-3, rtol=0, err_msg=ref["id"])


def final_logits(model, params, ids, width):
    """float32 logits `[V]` of the token after `ids`."""
    batch = make_prefill_batch([[*ids, *[0] * (width - len(ids))]], max_tokens=1)
    lens_B = np.array([len(ids)], np.int32)
    batch = jaxinfer.compute.PrefillBatch(batch.tokens_BT, lens_B, lens_B, batch.page_table_BM)
    cache = init_cache(
        model.config,
        jaxinfer.CacheConfig(num_pages=batch.page_table_BM.size, dtype="float32"),
    )
    _, x_BTD = jax.jit(prefill_hidden, static_argnums=0)(model, params, cache, batch)
    return np.asarray(jnp.asarray(model.unembed(params, x_BTD[:, len(ids) - 1])))[0]
