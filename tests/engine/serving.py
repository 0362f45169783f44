"""What the engine tests share: one small model, one configuration, and a device of plain Python."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.compute import Decoder, StepOutput
from jaxinfer.engine.batching import decode_sizes

V, EOS = 1000, 2
# 24 pages of 8 tokens for 8 rows of up to 256: requests wait for pages as well as for rows.
CONFIG = EngineConfig(
    max_model_len=256,
    max_num_seqs=8,
    page_size=8,
    num_pages=24,
    prefill_chunk=64,
    max_window=4,
    kv_dtype="float32",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
# A greedy row that asks for this top_k produces SCRIPT[0], SCRIPT[1], ...; see `script`.
SCRIPTED = GREEDY.replace(top_k=77)
SCRIPT = tuple(range(10, 160, 3))


def script(logits_BV, sampling):
    """The hook of every engine here: writes the output of the rows that ask for top_k=77."""
    ids_V = jnp.arange(logits_BV.shape[1])
    next_B1 = (SCRIPT[0] + 3 * sampling.num_output_B)[:, None]
    scripted_BV = jnp.where(ids_V == next_B1, 10.0, 0.0)
    return jnp.where((sampling.top_k_B == 77)[:, None], scripted_BV, logits_BV)


def widen(model, params):
    """The decoder and its params with a vocabulary of V, the ids beyond the model's own random."""
    rng = np.random.default_rng(5)

    def more(table):
        old = np.asarray(table["weight"])
        new = rng.normal(0, old.std(), (V - len(old), old.shape[1])).astype(old.dtype)
        return {"weight": jnp.asarray(np.concatenate([old, new]))}

    wide = {**params, "embed": more(params["embed"]), "head": more(params["head"])}
    model = Decoder(dataclasses.replace(model.config, vocab_size=V))
    flat = {**wide, "head": {"weight": jnp.zeros_like(wide["head"]["weight"])}}
    return SimpleNamespace(model=model, params=wide, flat_params=flat)


def prompt_of(length, seed=0):
    """A random prompt without special ids."""
    return np.random.default_rng([length, seed]).integers(3, V, length).tolist()


def drain(engine):
    """What every request brought until none was left, by request id: (new ids, finish reason)s."""
    brought = {}
    while engine.has_work:
        for output in engine.step():
            brought.setdefault(output.request.id, []).append((output.new_ids, output.finish_reason))
        engine.check_integrity()
    return brought


def run(engine, jobs):
    """The finished requests of (prompt, params) pairs, all added at once."""
    requests = [engine.add_request(prompt, params) for prompt, params in jobs]
    drain(engine)
    return requests


def result(request):
    """What a request gave: its ids and why they end."""
    return request.output_ids, request.finish_reason


def results(requests):
    """What requests gave, in their order."""
    return [result(request) for request in requests]


def note_chunks(engine):
    """A list that from now on gets the number of tokens of every chunk that `engine` computes."""
    lengths, prefill = [], engine._executor.prefill

    def noted(chunks):
        lengths.extend(count for count in chunks.query_lens_B.tolist() if count)
        return prefill(chunks)

    engine._executor.prefill = noted
    return lengths


def assert_same_logprobs(request, other, atol=1e-4):
    """Asserts that both have the same log-probabilities, of prompt and output: as many as the one
    got if it was cancelled, else all.
    """
    for got, want in [
        (request.logprobs, other.logprobs),
        (request.prompt_logprobs[1:], other.prompt_logprobs[1:]),
    ]:
        assert len(got) == len(want) or request.finish_reason == "cancelled"
        for one, same in zip(got, want):
            assert one.token_id == same.token_id
            values = [[entry.logprob, *entry.top.values()] for entry in (one, same)]
            np.testing.assert_allclose(*values, atol=atol, rtol=0)


class PlainDevice:
    """Stands in for `Executor`: keeps tokens where keys would stand and hashes what it finds there.

    A wrong token, position or page changes every token that follows, as on a real device.
    """

    def __init__(self, model, params, config, empty_row, *, prefill_shapes, logits_hook=None):
        self.num_rows = config.max_num_seqs
        self.decode_sizes = decode_sizes(config.max_num_seqs)
        self.num_starts = max(rows for rows, _ in prefill_shapes)
        self.num_hidden = max(rows * tokens for rows, tokens in prefill_shapes)
        self.num_shards, self.num_fetches = 1, 0
        self._prefill_shapes = prefill_shapes
        self._pages = np.full((config.cache.num_pages, config.page_size), -1)
        self._rows = [None] * self.num_rows

    def check_params(self):
        pass

    def write_row(self, shard, row, state):
        self._rows[row] = SimpleNamespace(
            table=state.page_table_BM[0].copy(),
            stop_ids=set(state.sampling.stop_ids_BC[0].tolist()) - {-1},
            length=0,
            remaining=0,
            newest=None,
        )

    def stop_row(self, shard, row):
        self._rows[row].remaining = 0

    def map_pages(self, entries):
        for row, index, page in entries:
            if row < self.num_rows:
                self._rows[row].table[index] = page

    def copy_pages(self, sources, destinations):
        kept = destinations < len(self._pages)
        self._pages[destinations[kept]] = self._pages[sources[kept]]

    def prefill(self, chunks):
        assert chunks.tokens_BT.shape in self._prefill_shapes
        for b, (index, count) in enumerate(zip(chunks.rows_B, chunks.query_lens_B)):
            if index == self.num_rows:
                assert count == 0
                continue
            row = self._rows[index]
            start = chunks.context_lens_B[b] - count
            assert row.length in (start, 0), "goes on, or behind a shared beginning"
            row.length = start
            for token in chunks.tokens_BT[b, :count]:
                self._store(row, token)
        states = np.full(chunks.tokens_BT.shape, -1)
        for state_T, index, count in zip(states, chunks.rows_B, chunks.query_lens_B):
            state_T[:count] = index
        return states.reshape(-1)

    def start(self, prefilled_N, starts):
        tokens_B1 = np.full((self.num_starts, 1), -1)
        for b, index in enumerate(starts.rows_B):
            if index < self.num_rows:
                row, at = self._rows[index], starts.index_B[b]
                leader = self._rows[prefilled_N[at]]
                assert prefilled_N[at] not in prefilled_N[at + 1 :], "not the end of its chunk"
                row.length = starts.context_lens_B[b]
                assert row.length == leader.length
                row.remaining = starts.max_tokens_B[b]
                tokens_B1[b] = self._produce(row, leader)
        return StepOutput(tokens_B1)

    def decode(self, rows_B, num_steps):
        assert len(rows_B) in self.decode_sizes
        tokens_BW = np.full((len(rows_B), num_steps), -1)
        for b, index in enumerate(rows_B):
            for step in range(num_steps if index < self.num_rows else 0):
                row = self._rows[index]
                if row.remaining:
                    self._store(row, row.newest)
                    tokens_BW[b, step] = self._produce(row)
        return StepOutput(tokens_BW)

    def fetch(self, results):
        self.num_fetches += 1
        return results

    def _store(self, row, token):
        page, slot = divmod(row.length, self._pages.shape[1])
        self._pages[row.table[page], slot] = token
        row.length += 1

    def _produce(self, row, source=None):
        """The next token of `row`, from the pages of `source` if not from its own."""
        size, table = self._pages.shape[1], (source or row).table
        known = [self._pages[table[i // size], i % size] for i in range(row.length)]
        row.newest = hashed(known)
        row.remaining = 0 if row.newest in row.stop_ids else row.remaining - 1
        return row.newest


class PlainDevices:
    """A `PlainDevice` for each of `NUM` data shards: each is given its own part of a batch."""

    NUM = 3

    def __init__(self, *args, **keywords):
        self._shards = [PlainDevice(*args, **keywords) for _ in range(self.NUM)]
        first = self._shards[0]
        self.num_rows, self.num_shards = first.num_rows, self.NUM
        self.decode_sizes, self.num_starts = first.decode_sizes, first.num_starts
        self.num_hidden, self.num_fetches = first.num_hidden, 0
        self.wait_s, self.compile_s, self.num_programs = 0.0, 0.0, (0, 0)
        self.num_busy = []  # shards with work, of each decode call

    def _each(self, name, *args):
        """What the method of that name gives for each shard's part of `args`."""
        parts = [
            jax.tree.map(lambda leaf, i=i: np.split(leaf, self.NUM)[i], args)
            for i in range(self.NUM)
        ]
        return [getattr(shard, name)(*part) for shard, part in zip(self._shards, parts)]

    def check_params(self):
        pass

    def write_row(self, shard, row, state):
        self._shards[shard].write_row(0, row, state)

    def stop_row(self, shard, row):
        self._shards[shard].stop_row(0, row)

    def map_pages(self, entries):
        self._each("map_pages", entries)

    def copy_pages(self, sources, destinations):
        self._each("copy_pages", sources, destinations)

    def prefill(self, chunks):
        states = self._each("prefill", chunks)
        pad = self.num_hidden - len(states[0])
        return np.concatenate([np.pad(part, (0, pad), constant_values=-1) for part in states])

    def start(self, prefilled_N, starts):
        parts = self._each("start", prefilled_N, starts)
        return StepOutput(np.concatenate([part.tokens_BW for part in parts]))

    def decode(self, rows_B, num_steps):
        self.num_busy.append(
            sum((np.stack(np.split(rows_B, self.NUM)) < self.num_rows).any(axis=1))
        )
        parts = [
            shard.decode(rows, num_steps)
            for shard, rows in zip(self._shards, np.split(rows_B, self.NUM))
        ]
        return StepOutput(np.concatenate([part.tokens_BW for part in parts]))

    def fetch(self, results):
        self.num_fetches += 1
        return results


def hashed(ids):
    """The token that `PlainDevice` puts after `ids`."""
    value = 17
    for token in ids:
        value = (value * 31 + int(token)) % 99991
    return value % V


def hashed_output(prompt, params, max_model_len, eos_ids=(EOS,)):
    """What a right engine gives on a `PlainDevice`."""
    ids, stop_ids = list(prompt), params.stop_ids(eos_ids)
    for _ in range(min(params.max_tokens, max_model_len - len(prompt))):
        ids.append(hashed(ids))
        if ids[-1] in stop_ids:
            return ids[len(prompt) :], "stop"
    return ids[len(prompt) :], "length"
