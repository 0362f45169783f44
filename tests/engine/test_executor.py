"""The device half: what is compiled, donated and transferred, and in which order it happens."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer import Engine
from jaxinfer.compute import stack_layers

from .serving import (
    CONFIG,
    GREEDY,
    SCRIPT,
    SCRIPTED,
    drain,
    prompt_of,
    result,
    results,
    run,
    script,
)

RUNNING = ("prefill", "score", "start", "decode", "fetch")
RUNNING += ("write_row", "stop_row", "map_pages", "copy_pages")


class Recorder:
    """An executor that notes each call that runs a program, and which result a fetch takes."""

    def __init__(self, executor):
        self._executor = executor
        self.calls = []
        self._numbers = {}

    def __getattr__(self, name):
        value = getattr(self._executor, name)
        return self._recorded(name, value) if name in RUNNING else value

    def _recorded(self, name, method):
        def call(*args):
            if name == "fetch":
                (output, *_), _ = args[0]
                self.calls.append(("fetch", self._numbers.pop(id(output.tokens_BW))))
                return method(*args)
            out = method(*args)
            if name in ("start", "decode"):
                number = sum(call[0] in ("start", "decode") for call in self.calls)
                self._numbers[id(out.tokens_BW)] = number
                self.calls.append((name, number))
            else:
                self.calls.append((name,))
            return out

        return call


def recorded(engine):
    engine._executor = recorder = Recorder(engine._executor)
    return recorder


def test_all_programs_are_compiled_ahead_with_progress(programs, engine):
    compiled, seen = programs
    shapes = engine.scheduler.shards[0].shapes
    names = {("prefill", *shape) for shape in shapes} | {("decode", size) for size in (1, 4, 8)}
    names |= {("score",), ("start",), ("map_pages",), ("copy_pages",)}
    names |= {("write_row",), ("stop_row",)}
    assert set(compiled._compiled) == names
    assert seen == [(done, len(names)) for done in range(1, len(names) + 1)]


def test_nothing_is_compiled_once_all_is(make_engine, monkeypatch):
    engine = make_engine()

    def refuse(key):
        raise AssertionError(f"{key} is compiled again")

    monkeypatch.setattr(engine._executor._programs, "_compile", refuse)
    jobs = [(prompt_of(n), GREEDY) for n in (1, 15, 16, 17, 33, 64, 65, 100, 3, 4, 5)]
    run(engine, jobs)
    for params in (SCRIPTED, GREEDY.replace(temperature=1.0, top_k=3, seed=1)):
        request = engine.add_request(prompt_of(5), params)
        for _ in range(3):
            engine.step()
        engine.cancel(request.id)


def test_params_that_are_bound_to_a_device_compile_nothing_new(make_engine, wide, alone):
    """As those that are not: a program takes both."""
    bound = jax.device_put(wide.params, jax.devices()[0])
    kinds = [{leaf.committed for leaf in jax.tree.leaves(tree)} for tree in (wide.params, bound)]
    assert kinds == [{False}, {True}]
    engine, jobs = make_engine(params=bound), [(prompt_of(n), GREEDY) for n in (5, 40)]
    assert results(run(engine, jobs)) == [alone(*job) for job in jobs]
    assert engine.metrics()["compiles_after_warmup"] == 0


def test_stacked_layers_are_scanned(wide, alone):
    """With a cache of their form, which is donated like another; samples copy a page of it."""
    params = stack_layers(wide.params)
    engine = Engine(wide.model, params, CONFIG, logits_hook=script)
    pages = engine._executor._cache.pages
    assert pages.shape[0] == wide.model.config.num_layers
    jobs = [(prompt_of(n), GREEDY) for n in (5, 20)]
    assert results(run(engine, jobs)) == [alone(*job) for job in jobs]
    samples = engine.add_samples(prompt_of(5), GREEDY.replace(n=2))
    drain(engine)
    assert [result(sample) for sample in samples] == [alone(*jobs[0])] * 2
    assert pages.is_deleted()


def test_the_next_window_is_dispatched_before_the_last_is_read(make_engine):
    engine = make_engine()
    recorder = recorded(engine)
    run(engine, [(prompt_of(5), SCRIPTED.replace(max_tokens=14))])
    # One token of the prefill, one beside it, then windows of 4.
    assert [call for call in recorder.calls if call != ("map_pages",)] == [
        ("write_row",),
        ("prefill",),
        ("start", 0),
        ("decode", 1),
        ("fetch", 0),
        ("decode", 2),
        ("fetch", 1),
        ("decode", 3),
        ("fetch", 2),
        ("decode", 4),
        ("fetch", 3),
        ("fetch", 4),
    ]


def test_a_long_prompt_is_fetched_once(make_engine):
    engine = make_engine()
    recorder = recorded(engine)
    run(engine, [(prompt_of(150), SCRIPTED.replace(max_tokens=1))])
    names = [name for name, *_ in recorder.calls if name != "map_pages"]
    assert names == ["write_row", *["prefill"] * names.count("prefill"), "start", "fetch"]
    assert names.count("prefill") >= 3


def test_steady_decoding_sends_nothing_and_fetches_once_a_window(make_engine):
    engine = make_engine()
    params = SCRIPTED.replace(max_tokens=43)
    requests = [engine.add_request(prompt_of(n), params) for n in (5, 6, 7)]
    while not all(request.output_ids for request in requests):
        engine.step()
    engine.step()
    before, at = engine._executor.num_fetches, len(requests[0].output_ids)
    with jax.transfer_guard_host_to_device("disallow"):
        while len(requests[0].output_ids) < at + 28:
            engine.step()
    assert engine._executor.num_fetches - before == 7
    drain(engine)
    assert all(tuple(request.output_ids) == SCRIPT[:43] for request in requests)


def test_joining_and_leaving_costs_one_transfer_of_the_row(make_engine):
    """What a request sends is its row of the state, in one array."""
    engine = make_engine()
    sent = []
    program = engine._executor._programs["write_row",]

    class Programs(dict):
        def __missing__(self, key):
            return engine_programs[key]

    def write_row(state, row, words):
        sent.append((int(row[0]), words.nbytes))
        return program(state, row, words)

    engine_programs = engine._executor._programs
    engine._executor._programs = Programs({("write_row",): write_row})
    run(engine, [(prompt_of(5), GREEDY), (prompt_of(6), GREEDY)])
    assert [row for row, _ in sent] == [0, 1]
    assert len({size for _, size in sent}) == 1
    per_row = sum(leaf.nbytes // 8 for leaf in jax.tree.leaves(engine._executor._state))
    assert sent[0][1] <= per_row + 4 * len(jax.tree.leaves(engine._executor._state))


@pytest.mark.parametrize("name", ["prefill", "start", "decode", "write_row", "stop_row"])
def test_every_program_takes_over_the_buffers_that_it_replaces(make_engine, monkeypatch, name):
    """After a step the old cache and state are gone: there is never a second copy."""
    engine = make_engine()
    executor = engine._executor
    held = executor._state if name in ("start", "write_row", "stop_row") else executor._cache
    seen = []
    method = getattr(executor, name)

    def checked(*args):
        both = {"cache": executor._cache, "state": executor._state}
        out = method(*args)
        gone = {
            key: all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
            for key, old in both.items()
        }
        seen.append(gone)
        return out

    monkeypatch.setattr(executor, name, checked)
    request = engine.add_request(prompt_of(5), SCRIPTED.replace(max_tokens=8))
    while len(request.output_ids) < 2:
        engine.step()
    engine.cancel(request.id)
    wanted = {"cache": name in ("prefill", "decode"), "state": name != "prefill"}
    assert seen
    assert all(gone == wanted for gone in seen)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(held))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(executor._params))


def test_cache_and_state_are_updated_in_place(programs, make_engine):
    """By the compiler's own account: what is aliased is all of them."""
    executor = make_engine()._executor
    cache, state = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (executor._cache, executor._state)
    )
    compiled = programs[0]
    for key, aliased in [
        (("prefill", 1, 64), cache),
        (("decode", 8), cache + state),
        (("start",), state),
        (("write_row",), state),
    ]:
        assert compiled[key].memory_analysis().alias_size_in_bytes == aliased, key


def test_results_stay_on_the_device_until_fetched(make_engine):
    executor = make_engine()._executor
    rows_B = np.full(4, CONFIG.max_num_seqs, np.int32)
    rows_B[0] = 0
    output = executor.decode(rows_B, 2)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(output))
    fetched = executor.fetch(output)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(fetched))
    assert (fetched.tokens_BW == -1).all(), "an idle row produced a token"
    assert executor.num_fetches == 1
