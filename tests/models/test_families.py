"""Every family against another library: logits whole and in chunks by both layer loops and both
attentions, and greedy ids.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxinfer import SamplingParams, load
from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.compute import Decoder, generate, make_sampling_state, stack_layers
from jaxinfer.models import FAMILIES

from ..conftest import TINY, TINY_NAMES
from ..logits import logits_in_chunks

T = 40


def read(name):
    model, params = load(TINY / name, dtype="float32")
    with np.load(TINY / name / "refs.npz") as refs:
        return SimpleNamespace(model=model, params=params, refs=dict(refs))


@pytest.fixture(scope="module", params=TINY_NAMES)
def tiny(request):
    """A random model of a few layers, and another library's float32 results."""
    return read(request.param)


@pytest.mark.parametrize(("implementation", "stacked"), [("cpu", False), ("reference", True)])
def test_logits_and_greedy_ids(tiny, implementation, stacked):
    """Of a prompt and what follows it at temperature 0, in chunks of any size, and of a long one.

    Ids are greedy if each has the largest of the logits that those before it give.
    """
    model = Decoder(tiny.model.config, implementation)
    params = stack_layers(tiny.params) if stacked else tiny.params
    logits = functools.partial(logits_in_chunks, model, params, width=T, stacked=stacked)
    greedy_ids = tiny.refs["greedy_ids"]
    ids = np.concatenate([tiny.refs["prompt_ids"], greedy_ids[:-1]])
    for chunk in (T, 1, 7, 16):
        got = logits(ids, chunk)
        for part, wanted in ((got[:T], "logits"), (got[T - 1 :], "step_logits")):
            np.testing.assert_allclose(part, tiny.refs[wanted], atol=1e-4, rtol=0, err_msg=wanted)
        assert got[T - 1 :].argmax(axis=-1).tolist() == greedy_ids.tolist()
    final = logits(tiny.refs["long_prompt_ids"], T)[-1]
    np.testing.assert_allclose(final, tiny.refs["long_final_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "gpt_neox", "phi3_longrope"])
def test_generation(name, argmax_only):
    """Prefill and decode as a program has them, of models that differ most from each other."""
    tiny = read(name)
    ids = tiny.refs["prompt_ids"]
    greedy = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)
    sampling = make_sampling_state([greedy], [ids.tolist()], vocab_size=256, eos_ids=[])
    whole = jax.jit(functools.partial(generate, tiny.model, max_tokens=16, page_size=8))
    params = stack_layers(tiny.params)  # one layer to compile
    got = whole(params, ids[None].astype(np.int32), np.array([T], np.int32), sampling)
    assert np.asarray(got)[0].tolist() == tiny.refs["greedy_ids"].tolist()


def test_each_family_has_a_reference():
    with_one = {open_checkpoint(TINY / name).config.family for name in TINY_NAMES}
    assert with_one == {family.name for family in FAMILIES}


def test_longrope_is_chosen_once_for_all_lengths():
    """By the longest context that is to be used: a request's own length changes nothing."""
    long = read("phi3_longrope")
    original = long.model.config.rope.original_max_position
    config = dataclasses.replace(long.model.config, max_position=original)
    ids = long.refs["prompt_ids"][:original]
    logits = {
        model.config.max_position: [
            logits_in_chunks(model, long.params, ids, chunk, width=T) for chunk in (T, 1, 7)
        ]
        for model in (long.model, Decoder(config))
    }
    np.testing.assert_allclose(logits[512][0], long.refs["logits"][:original], atol=1e-4, rtol=0)
    for whole, *chunks in logits.values():
        for chunked in chunks:
            np.testing.assert_allclose(chunked, whole, atol=2e-5, rtol=0)
    assert abs(logits[512][0] - logits[original][0]).max() > 0.01
