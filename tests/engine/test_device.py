"""Rows of the decode state: packed for one transfer, written, taken and put back."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.engine import device
from jaxinfer.engine.batching import (
    decode_batch,
    decode_sizes,
    join,
    no_score,
    num_scored,
    prefill_batch,
    request_row,
    score_batch,
    start_batch,
)
from jaxinfer.sched import Chunk, Request

CONFIG = EngineConfig(
    max_model_len=32, max_num_seqs=3, page_size=8, num_pages=5, kv_dtype="float32"
)


def make_request(pages=(4, 0), prompt=(1, 2, 3), **params):
    request = Request(id="a", prompt_ids=prompt, params=SamplingParams(**params), seed=7)
    request.row, request.pages = 1, list(pages)
    return request


def row_of(request, vocab_size=37):
    return request_row(
        request, CONFIG, vocab_size=vocab_size, num_valid_ids=vocab_size, eos_ids=[2]
    )


def full_of(value, like):
    return jax.tree.map(lambda leaf: np.full((3, *leaf.shape[1:]), value, leaf.dtype), like)


def test_a_written_row_holds_what_was_packed_and_the_others_stay():
    """37 ids leave half a word of int16 counts over, and a packed word of ids partly used."""
    params = dict(
        temperature=0.3,
        top_p=0.7,
        seed=-5,
        logit_bias={3: -1.5, 36: 1e9},
        allowed_token_ids=[0, 31, 32, 36],
        bad_words=[[4, 5]],
        stop_token_ids=[9, 8],
        min_tokens=3,
    )
    row = row_of(make_request(**params), vocab_size=37)
    before = full_of(1, row)
    words = device.pack_row(row)
    assert words.dtype == np.int32
    after = jax.jit(device.write_row)(before, np.int32(1), words)
    for old, new, packed in zip(*map(jax.tree.leaves, (before, after, row)), strict=True):
        assert new.dtype == packed.dtype
        np.testing.assert_array_equal(new[1], packed[0])
        np.testing.assert_array_equal(new[np.array([0, 2])], old[[0, 2]])


def test_a_new_row_is_inactive_and_maps_its_pages_alone():
    row = row_of(make_request())
    assert row.page_table_BM.tolist() == [[4, 0, 5, 5]], "unmapped entries hold num_pages"
    assert (row.remaining_B.tolist(), row.context_lens_B.tolist()) == ([0], [0])


@pytest.mark.parametrize("page", [5, 6, -1])
def test_a_page_id_out_of_range_is_refused_on_the_host(page):
    with pytest.raises(AssertionError, match=str(page)):
        row_of(make_request(pages=[0, page]))


def test_stopping_a_row_clears_what_remains_of_it_alone():
    state = full_of(3, row_of(make_request()))
    stopped = jax.jit(device.stop_row)(state, np.int32(1))
    assert stopped.remaining_B.tolist() == [3, 0, 3]
    assert stopped.tokens_B.tolist() == [3, 3, 3]


def test_padding_rows_are_inactive_and_put_nowhere():
    state = full_of(3, row_of(make_request()))
    for leaf in jax.tree.leaves(state):
        leaf[2] = 1
    rows_B = np.array([2, 3, 3, 0], np.int32)
    taken = jax.jit(device._take_rows)(state, rows_B)
    assert taken.remaining_B.tolist() == [1, 0, 0, 3]
    assert taken.tokens_B.tolist() == [1, 1, 1, 3], "padding repeats the first row"
    put = jax.jit(device._put_rows)(state, rows_B, jax.tree.map(np.zeros_like, taken))
    decoded = [put.tokens_B, put.context_lens_B, put.remaining_B]
    decoded += [put.sampling.num_output_B, put.sampling.recent_BR, put.sampling.counts_BV]
    for leaf in decoded:
        assert not np.any(leaf[np.array([0, 2])])
        assert np.all(leaf[1] == 3)
    assert put.page_table_BM.tolist() == state.page_table_BM.tolist()
    assert put.sampling.top_k_B.tolist() == [3, 3, 1], "what a request asked for never changes"


def test_a_prefill_batch_is_padded_to_its_shape():
    first, second = make_request(prompt=(5, 6, 7, 8)), make_request(prompt=(9,))
    first.row, first.max_total_len, second.row, second.max_total_len = 2, 20, 0, 11
    chunks = [Chunk(first, 1, 2, False), Chunk(second, 0, 1, True)]
    batch = prefill_batch(chunks, (3, 4), num_rows=3)
    assert batch.tokens_BT.tolist() == [[6, 7, 0, 0], [9, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.rows_B.tolist() == [2, 0, 3]
    assert batch.query_lens_B.tolist() == [2, 1, 0]
    assert batch.context_lens_B.tolist() == [3, 1, 0]


def test_several_rows_may_start_where_one_chunk_ends():
    first, second = make_request(prompt=(9, 8, 7)), make_request(prompt=(9, 8, 7))
    first.row, first.max_total_len, second.row, second.max_total_len = 2, 20, 0, 11
    chunks = [Chunk(make_request(), 0, 4, False), Chunk(first, 1, 2, True)]
    starts = start_batch(chunks, [(1, first), (1, second)], (2, 4), num_starts=4, num_rows=3)
    assert starts.rows_B.tolist() == [2, 0, 3, 3]
    assert starts.index_B.tolist() == [5, 5, 0, 0], "the second state of the second row of four"
    assert starts.context_lens_B.tolist() == [3, 3, 0, 0]
    assert starts.max_tokens_B.tolist() == [17, 8, 0, 0]


def test_a_chunk_is_scored_up_to_the_end_of_the_prompt():
    request = make_request(prompt=(5, 6, 7, 8), prompt_logprobs=2)
    for start, length, scored in [(0, 4, 3), (0, 3, 3), (1, 2, 2), (3, 1, 0), (2, 2, 1)]:
        chunk = Chunk(request, start, length, False)
        assert num_scored(chunk) == scored
    batch = score_batch(chunk, 12, 6)
    assert batch.tokens_1S.tolist() == [[5, 6, 7, 8, -1, -1]]
    numbers = batch.row_1, batch.index_1, batch.start_1, batch.length_1
    assert [number.tolist() for number in numbers] == [[1], [12], [2], [1]]
    assert num_scored(Chunk(make_request(prompt=(5, 6)), 0, 2, True)) == 0, "did not ask"


@pytest.mark.parametrize(
    "rows, sizes",
    [(1, (1,)), (3, (1, 3)), (4, (1, 4)), (5, (1, 4, 5)), (33, (1, 4, 8, 16, 32, 33))],
)
def test_decode_sizes_end_at_the_number_of_rows(rows, sizes):
    assert decode_sizes(rows) == sizes


def test_a_decode_batch_is_padded_out_of_range():
    assert decode_batch([5, 1], 4, 8).tolist() == [5, 1, 8, 8]
    assert decode_batch(range(4), 4, 8).tolist() == [0, 1, 2, 3]


def test_batches_of_shards_are_joined_one_behind_the_other():
    one, other = no_score(2), score_batch(Chunk(make_request(prompt=(5, 6)), 0, 1, False), 3, 2)
    assert join([one]) is one
    both = join([one, other])
    assert both.tokens_1S.tolist() == [[-1, -1], [5, 6]]
    assert both.index_1.tolist() == [0, 3]
