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


@pytest.fixture(scope="module")
def references():
    """30 prompts of all kinds, 64 greedy ids each (EOS not stopping), the gap at each step."""
    with open(DATA / "smollm2.json") as file:
        return json.load(file)["prompts"]


@pytest.fixture(scope="module")
def loaded():
    return jaxinfer.load(str(resolve("smollm2-135m", ROOT)), dtype="float32")


def test_greedy_ids(loaded, references):
    """All prompts at once, in chunks, through the engine: the ids up to the first tie."""
    config = jaxinfer.EngineConfig(max_model_len=1600, max_num_seqs=32, kv_dtype="float32")
    engine = jaxinfer.Engine(*loaded, config, eos_ids=())
    params = jaxinfer.SamplingParams(temperature=0.0, max_tokens=64)
    requests = [engine.add_request(ref["prompt_ids"], params) for ref in references]
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    num_compared = 0
    for request, ref in zip(requests, references, strict=True):
        ties = [step for step, gap in enumerate(ref["gap"]) if gap < TIE]
        until = min(ties, default=64)
        assert request.output_ids[:until] == ref["greedy_ids"][:until], ref["id"]
        num_compared += until
    assert num_compared > 1500


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
