import hashlib

import numpy as np
import pytest

from jaxinfer.compute.sampling_state import make_sampling_state, request_key
from jaxinfer.sampling_params import SamplingParams


def test_key_is_the_documented_hash():
    data = (-5).to_bytes(8, "little", signed=True) + (2).to_bytes(8, "little")
    data += b"".join(v.to_bytes(4, "little") for v in (7, 300, 70000))
    expected = np.frombuffer(hashlib.blake2b(data).digest()[:8], "<u4")
    key = request_key(-5, [7, 300, 70000], 2)
    assert key.dtype == np.uint32 and key.tolist() == expected.tolist()


def test_keys_differ_by_every_part_of_the_name():
    names = [(0, [1]), (2**32, [1]), (2**63 - 1, [1]), (-(2**63), [1]), (0, [2]), (0, [1, 1])]
    keys = {tuple(request_key(seed, prompt)) for seed, prompt in names}
    keys |= {tuple(request_key(0, [1], 1))}
    assert len(keys) == len(names) + 1


def test_seeds_come_from_the_argument_then_the_params_then_fresh():
    seeded, free = SamplingParams(seed=4), SamplingParams()
    state = make_sampling_state([seeded, free], [[1], [1]], vocab_size=8, seeds=[9, 9])
    assert state.key_B2[0].tolist() == state.key_B2[1].tolist() == request_key(9, [1]).tolist()
    state = make_sampling_state([seeded, free, free], [[1]] * 3, vocab_size=8)
    assert state.key_B2[0].tolist() == request_key(4, [1]).tolist()
    assert state.key_B2[1].tolist() != state.key_B2[2].tolist()


def test_tables():
    params = SamplingParams(
        top_k=10**9, bad_words=[[3], [1, 2]], stop_token_ids=[5, 0], logit_bias={7: 1.5, 2: -3},
        allowed_token_ids=[0, 33, 5], min_tokens=2, max_tokens=10**12,
    )  # fmt: skip
    state = make_sampling_state(
        [params, SamplingParams(top_k=4)], [[1, 1, 6], []], vocab_size=40, eos_ids=(0, 9)
    )
    assert state.top_k_B.tolist() == [40, 4]
    assert state.bad_words_BCR[0, :3].tolist() == [[-1] * 7 + [3], [-1] * 6 + [1, 2], [-1] * 8]
    assert state.stop_ids_BC[0, :4].tolist() == [0, 5, 9, -1]
    assert state.stop_ids_BC[1, :3].tolist() == [0, 9, -1]
    assert state.bias_ids_BC[0, :3].tolist() == [7, 2, -1]
    assert state.bias_BC[0, :3].tolist() == [1.5, -3, 0]
    assert state.has_allowed_B.tolist() == [True, False]
    assert state.allowed_BU.tolist() == [[0b100001, 0b10], [0, 0]]
    assert np.flatnonzero(state.counts_BV[0]).tolist() == [1, 6]
    assert state.counts_BV[0, 1] == 1 and state.counts_BV.dtype == np.int16
    assert state.num_ids_B.tolist() == [40, 40]


def test_counts_saturate():
    state = make_sampling_state(
        [SamplingParams()], [[1]], vocab_size=3, outputs=[[1] * 20000 + [2]]
    )
    assert state.counts_BV.tolist() == [[0, 32767, 2]]


@pytest.mark.parametrize(
    "fields, prompt, match",
    [
        ({}, [8], "prompt holds token ids"),
        ({}, [-1], "prompt holds token ids"),
        ({"stop_token_ids": [6]}, [1], "stop_token_ids holds token id 6"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(fields, prompt, match):
    with pytest.raises(ValueError, match=match):
        make_sampling_state([SamplingParams(**fields)], [prompt], vocab_size=8, num_valid_ids=6)


def test_rows_must_match():
    with pytest.raises(ValueError, match="as many"):
        make_sampling_state([SamplingParams()], [[1], [2]], vocab_size=8)
    with pytest.raises(ValueError, match="num_valid_ids=9"):
        make_sampling_state([SamplingParams()], [[1]], vocab_size=8, num_valid_ids=9)
