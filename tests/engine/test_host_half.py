"""The engine's host half on a device of plain Python: every configuration, hundreds of requests."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from jaxinfer import Engine, EngineConfig, SamplingParams
from jaxinfer.compute import Decoder

from .serving import (
    EOS,
    PlainDevice,
    PlainDevices,
    drain,
    hashed_output,
    note_chunks,
    prompt_of,
    result,
    results,
    run,
)


@pytest.fixture
def plain_engine(monkeypatch, wide):
    """A function from the fields of `EngineConfig` to an engine that runs on `PlainDevice`."""
    monkeypatch.setattr("jaxinfer.engine.engine.Executor", PlainDevice)
    model = Decoder(dataclasses.replace(wide.model.config, max_position=4096))

    def make(**fields):
        return Engine(model, wide.params, EngineConfig(kv_dtype="float32", **fields))

    return make


def random_jobs(rng, count, longest, most):
    jobs = []
    for i in range(count):
        stops = rng.sample(range(1000), 30)
        params = SamplingParams(max_tokens=rng.randint(1, most), stop_token_ids=stops)
        jobs.append((prompt_of(rng.randint(1, longest), i), params))
    return jobs


def expected(jobs, max_model_len):
    return [hashed_output(*job, max_model_len) for job in jobs]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_500_requests_get_their_output_and_leave_every_page_free(plain_engine, page_size):
    engine = plain_engine(
        max_model_len=64, max_num_seqs=4, page_size=page_size, num_pages=128 // page_size
    )
    jobs = random_jobs(random.Random(page_size), 500, 40, 8)
    got = results(run(engine, jobs))
    assert got == expected(jobs, 64)
    assert {reason for _, reason in got} == {"stop", "length"}
    assert engine.scheduler.shards[0].pool.num_available == 128 // page_size


@pytest.mark.parametrize(
    "length, page_size, prefill_chunk, num_cached",
    [(16, 16, 512, 0), (32, 16, 512, 16), (32, 16, 16, 16), (45, 8, 8, 40)],
)
def test_a_prompt_twice(plain_engine, length, page_size, prefill_chunk, num_cached):
    """At least its last token is computed again, in one chunk."""
    engine = plain_engine(
        max_model_len=64, max_num_seqs=2, page_size=page_size, prefill_chunk=prefill_chunk
    )
    job, lengths = (prompt_of(length), SamplingParams(max_tokens=6)), note_chunks(engine)
    first, second = run(engine, [job])[0], run(engine, [job])[0]
    assert result(first) == result(second) == hashed_output(*job, 64)
    assert second.num_cached == num_cached
    assert sum(lengths) == 2 * length - num_cached and lengths[-1] == length - num_cached


def test_a_shared_beginning_is_counted_exactly(plain_engine):
    """1600 tokens that five prompts begin with: four find them."""
    engine = plain_engine(max_model_len=2048, max_num_seqs=4, page_size=32)
    begin = prompt_of(1600)
    jobs = [(begin + prompt_of(100, i), SamplingParams(max_tokens=4)) for i in range(5)]
    assert results(run(engine, jobs)) == expected(jobs, 2048)
    found = engine.scheduler.counters
    assert (found.prompt_tokens, found.cached_tokens) == (5 * 1700, 4 * 1600)
    assert found.prefill_tokens == 1600 + 5 * 100


CHUNKS = (1, 7, 8, 16, 44, 45, 64)


@pytest.mark.parametrize("prefill_chunk", CHUNKS)
def test_every_chunk_size_feeds_the_whole_prompt(plain_engine, prefill_chunk):
    """Prompts of 45 tokens and around each limit, longer than a chunk, a page and a window."""
    for max_num_seqs, max_model_len, max_window in itertools.product((1, 3, 8), (48, 96), (1, 5)):
        engine = plain_engine(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            page_size=16,
            prefill_chunk=prefill_chunk,
            max_window=max_window,
        )
        lengths = [n for n in (45, 1, 15, 16, 17, 44, 46, 47, 64, 65, 94, 95) if n < max_model_len]
        jobs = [(prompt_of(n), SamplingParams(max_tokens=6)) for n in lengths]
        assert results(run(engine, jobs)) == expected(jobs, max_model_len)


def test_max_model_len_ends_an_output(plain_engine):
    engine = plain_engine(max_model_len=64, page_size=16, max_num_seqs=2)
    jobs = [(prompt_of(n), SamplingParams(max_tokens=100, ignore_eos=True)) for n in (60, 63)]
    requests = run(engine, jobs)
    assert [len(r.output_ids) for r in requests] == [4, 1]
    assert [r.finish_reason for r in requests] == ["length"] * 2
    with pytest.raises(ValueError, match="max_model_len=64 leaves room for 63"):
        engine.add_request(prompt_of(64), SamplingParams())


def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody(plain_engine):
    """8 pages of 16 tokens and a prompt of 200, within the model's length."""
    engine = plain_engine(max_model_len=256, page_size=16, num_pages=8, max_num_seqs=4)
    waiting = engine.add_request(prompt_of(100), SamplingParams(max_tokens=20))
    with pytest.raises(ValueError, match="needs 14 pages of 16 tokens for its 216; the pool has 8"):
        engine.add_request(prompt_of(200), SamplingParams(max_tokens=16))
    short = engine.add_request(prompt_of(5), SamplingParams(max_tokens=4))
    drain(engine)
    assert result(waiting) == hashed_output(prompt_of(100), waiting.params, 256)
    assert result(short) == hashed_output(prompt_of(5), short.params, 256)


@pytest.mark.parametrize("seed", range(4))
def test_random_arrivals_and_cancels(plain_engine, seed):
    rng = random.Random(seed)
    engine = plain_engine(
        max_model_len=64, max_num_seqs=5, page_size=8, num_pages=20, prefill_chunk=32, max_window=3
    )
    jobs = random_jobs(rng, 200, 50, 20)
    requests, cancelled = [], set()
    for prompt, params in jobs:
        requests.append(engine.add_request(prompt, params))
        for _ in range(rng.choice((0, 0, 1, 3))):
            engine.step()
            engine.check_integrity()
        if rng.random() < 0.3:
            victim = rng.choice(requests)
            if victim.finish_reason is None:
                engine.cancel(victim.id)
                cancelled.add(victim)
    drain(engine)
    for request, want in zip(requests, expected(jobs, 64)):
        if request in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.output_ids == want[0][: len(request.output_ids)]
        else:
            assert result(request) == want
    assert len(cancelled) > 10
    assert engine.scheduler.shards[0].pool.num_available == 20


def test_eos_ids_end_outputs_unless_ignored(plain_engine):
    """The hash soon produces one of 40 ids that all count as the model's EOS."""
    engine = plain_engine(max_model_len=64, page_size=8, max_num_seqs=2)
    engine.eos_ids = tuple(range(0, 1000, 40)[:25])
    params = SamplingParams(max_tokens=50)
    jobs = [(prompt_of(9, i), params) for i in range(10)]
    got = results(run(engine, jobs))
    assert got == [hashed_output(*job, 64, eos_ids=engine.eos_ids) for job in jobs]
    assert "stop" in {reason for _, reason in got}
    assert EOS not in engine.eos_ids


def test_a_long_prompt_does_not_hold_back_what_others_have_finished(plain_engine):
    """The last window of one request is read in the step after it, not after another's prefill."""
    engine = plain_engine(
        max_model_len=512, max_num_seqs=2, page_size=8, prefill_chunk=32, max_window=4
    )
    params = SamplingParams(max_tokens=6)
    first = engine.add_request(prompt_of(8, 1), params)
    while len(first.output_ids) < 5:
        engine.step()
    engine.add_request(prompt_of(256, 2), params)
    engine.step()
    engine.step()
    assert first.finish_reason is not None
    drain(engine)


def test_a_failed_step_stops_the_engine_with_its_reason(plain_engine, monkeypatch):
    engine = plain_engine(max_model_len=64, max_num_seqs=2, page_size=8)
    request = engine.add_request(prompt_of(8, 1), SamplingParams())

    def fail(*arguments):
        raise MemoryError("out of device memory")

    monkeypatch.setattr(PlainDevice, "prefill", fail)
    with pytest.raises(MemoryError):
        engine.step()
    with pytest.raises(RuntimeError, match="out of device memory.*Make a new one"):
        engine.step()
    engine.cancel(request.id)
    assert request.finish_reason == "cancelled"


def test_an_interrupted_read_loses_no_token(plain_engine, monkeypatch):
    engine = plain_engine(max_model_len=64, max_num_seqs=2, page_size=8)
    job = prompt_of(8, 1), SamplingParams(max_tokens=9)
    request = engine.add_request(*job)
    fetch, calls = PlainDevice.fetch, itertools.count()

    def interrupted(self, array):
        if next(calls) % 2 == 0:
            raise KeyboardInterrupt
        return fetch(self, array)

    monkeypatch.setattr(PlainDevice, "fetch", interrupted)
    produced = []
    while engine.has_work:
        try:
            for output in engine.step():
                produced += output.new_ids
        except KeyboardInterrupt:
            continue
    assert result(request) == hashed_output(*job, 64)
    assert produced == request.output_ids


@pytest.fixture
def plain_shards(monkeypatch, wide):
    """As `plain_engine`, over the data shards of `PlainDevices`."""
    monkeypatch.setattr("jaxinfer.engine.engine.Executor", PlainDevices)
    name = "jaxinfer.engine.engine.num_data_shards"
    monkeypatch.setattr(name, lambda mesh: PlainDevices.NUM)

    def make(**fields):
        return Engine(wide.model, wide.params, EngineConfig(kv_dtype="float32", **fields))

    return make


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_shards_serve_one_stream_of_requests(plain_shards, policy):
    """Prompts that begin alike, cancels, and pools so small that requests give way."""
    rng = random.Random(7)
    engine = plain_shards(
        max_model_len=64,
        max_num_seqs=3,
        page_size=4,
        num_pages=22,
        prefill_chunk=32,
        max_window=3,
        policy=policy,
    )
    stems = [prompt_of(20, seed) for seed in range(3)]
    requests, jobs, cancelled, shards = [], [], [], set()
    for i in range(150):
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + prompt_of(rng.randint(1, 20), i)
        params = SamplingParams(
            max_tokens=rng.randint(1, 20), stop_token_ids=rng.sample(range(1000), 30)
        )
        jobs.append((prompt, params))
        requests.append(engine.add_request(prompt, params, priority=rng.randint(0, 2)))
        for _ in range(rng.choice((0, 0, 1, 3))):
            engine.step()
            engine.check_integrity()
        live = [request for request in requests if request.finish_reason is None]
        if live and rng.random() < 0.1:
            cancelled.append(rng.choice(live))
            engine.cancel(cancelled[-1].id)
    drain(engine)
    for request, want in zip(requests, expected(jobs, 64)):
        shards.add(request.shard)
        if request in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.output_ids == want[0][: len(request.output_ids)]
        else:
            assert result(request) == want
    assert shards == {0, 1, 2}
    assert len(cancelled) > 5
    metrics = engine.metrics()
    assert metrics["preempted"] > 0
    assert metrics["cached_tokens"] > 100
    assert metrics["pages_free"] + metrics["pages_cached"] == metrics["pages_total"] == 3 * 22
    assert max(engine._executor.num_busy) == 3, "one call decodes on all shards"
