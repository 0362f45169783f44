"""One set of compiled programs for all engine tests, and the pure generation to hold them to."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, Engine
from jaxinfer.compute import generate, make_sampling_state
from jaxinfer.sched import Scheduler

from .serving import CONFIG, EOS, V, result, run, script, widen
from .streaming import LONG, assert_quiet
from .texts import assert_idle, save_model


@pytest.fixture(scope="session")
def wide(tiny_llama):
    """The tiny Llama with 1000 ids: `.model`, `.params`; `.flat_params` give logits of 0."""
    return widen(tiny_llama.model, tiny_llama.params)


@pytest.fixture(scope="session")
def programs(wide):
    """The programs of `CONFIG`, all compiled, and the progress that was reported meanwhile."""
    seen = []
    engine = Engine(
        wide.model,
        wide.params,
        CONFIG,
        logits_hook=script,
        compile_ahead=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    return engine._executor._programs, seen


@pytest.fixture(scope="session")
def make_engine(wide, programs):
    """A function that makes a new engine of `CONFIG` on the compiled programs.

    `host` are changes of `CONFIG` that its scheduler alone goes by: fewer pages or rows than the
    device has, smaller chunks, another order.
    """

    def make(*, params=None, host=(), **keywords):
        engine = Engine(wide.model, params or wide.params, CONFIG, logits_hook=script, **keywords)
        engine._executor._programs = programs[0]
        engine.scheduler = Scheduler(dataclasses.replace(CONFIG, **dict(host)))
        return engine

    return make


@pytest.fixture(scope="session")
def shared_engine(make_engine):
    return make_engine()


@pytest.fixture
def engine(shared_engine):
    """An idle engine; each test must leave it idle, with every page and row free."""
    yield shared_engine
    assert not shared_engine.has_work
    shared_engine.check_integrity()
    pool = shared_engine.scheduler.shards[0].pool
    assert pool.num_available == CONFIG.num_pages
    assert shared_engine.scheduler.is_idle


@pytest.fixture(scope="session")
def alone(make_engine):
    """A function from (prompt, params) to what the request gives with no other in the engine."""
    quiet = make_engine()

    def ask(prompt, params):
        (request,) = run(quiet, [(prompt, params)])
        assert quiet.scheduler.shards[0].pool.num_available == CONFIG.num_pages
        return result(request)

    return ask


@pytest.fixture(scope="session")
def oracle(wide):
    """A function from (prompt, params, sample index) to what `generate` gives when it computes all
    tokens anew.

    48 tokens of prompt and 16 of output at most.
    """
    whole = jax.jit(
        functools.partial(
            generate,
            wide.model,
            max_tokens=16,
            use_cache=False,
            page_size=CONFIG.page_size,
            logits_hook=script,
        )
    )

    def ask(prompt, params, sample_index=0):
        assert len(prompt) <= 48
        assert params.max_tokens <= 16
        tokens_1T = np.zeros((1, 48), np.int32)
        tokens_1T[0, : len(prompt)] = prompt
        state = make_sampling_state(
            [params], [prompt], vocab_size=V, eos_ids=[EOS], sample_index=sample_index
        )
        tokens_1W = whole(wide.params, tokens_1T, np.array([len(prompt)], np.int32), state)
        ids = [int(token) for token in tokens_1W[0] if token >= 0][: params.max_tokens]
        return ids, "stop" if ids[-1] in params.stop_ids([EOS]) else "length"

    return ask


@pytest.fixture(scope="session")
def checkpoint(wide, tmp_path_factory):
    """A model folder: weights with 1000 rows in the head, a tokenizer of 261 ids."""
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, wide.model, wide.params)
    return folder


@pytest.fixture(scope="session")
def open_model(checkpoint, programs):
    """A function from `LLM` or `AsyncLLM` to one on the programs that all engine tests share."""

    def open_as(kind, **keywords):
        llm = kind(
            str(checkpoint),
            dtype="float32",
            max_model_len=CONFIG.max_model_len,
            max_num_seqs=CONFIG.max_num_seqs,
            page_size=CONFIG.page_size,
            num_pages=CONFIG.num_pages,
            prefill_chunk=CONFIG.prefill_chunk,
            max_window=CONFIG.max_window,
            logits_hook=script,
            **keywords,
        )
        llm._engine._executor._programs = programs[0]
        return llm

    return open_as


@pytest.fixture(scope="session")
def make_llm(open_model):
    """A function that makes an `LLM`."""
    return functools.partial(open_model, LLM)


@pytest.fixture(scope="session")
def shared_llm(make_llm):
    return make_llm()


@pytest.fixture
def llm(shared_llm):
    """An idle `LLM`; each test must leave nothing behind."""
    yield shared_llm
    assert_idle(shared_llm)


@pytest.fixture(scope="session")
def make_async_llm(open_model):
    """A function that makes an `AsyncLLM`."""
    return functools.partial(open_model, AsyncLLM)


@pytest.fixture(scope="session")
def shared_async_llm(make_async_llm):
    llm = make_async_llm()
    yield llm
    asyncio.run(llm.close())
    llm._worker._thread.join(LONG)
    assert not llm._worker._thread.is_alive()


@pytest.fixture
def async_llm(shared_async_llm):
    """An idle `AsyncLLM`, the same in every test, and so in many event loops."""
    yield shared_async_llm
    assert_quiet(shared_async_llm)
