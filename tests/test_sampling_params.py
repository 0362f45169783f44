import numpy as np
import pytest

from jaxinfer.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    SamplingParams,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "name, value",
    [
        *[(n, v) for n in ("temperature", "top_p", "min_p", "repetition_penalty",
                           "presence_penalty", "frequency_penalty")
          for v in (NAN, INF, -INF, "1", None, True)],
        ("temperature", -0.1),
        ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.0001),
        ("min_p", -0.01), ("min_p", 1.01),
        ("repetition_penalty", 0.0), ("repetition_penalty", -1.0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("top_k", -2), ("top_k", 1.0), ("top_k", True),
        ("max_tokens", 0), ("max_tokens", 1.5), ("max_tokens", None), ("max_tokens", True),
        ("min_tokens", -1), ("min_tokens", 17),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0), ("seed", False),
        ("logit_bias", {-1: 0.0}), ("logit_bias", {1: NAN}), ("logit_bias", {1: INF}),
        ("logit_bias", {1: -INF}), ("logit_bias", {"1": 0.0}), ("logit_bias", [1]),
        ("logit_bias", {True: 0.0}), ("logit_bias", {1: "a"}),
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0)),
        ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1.0]),
        ("allowed_token_ids", 5), ("allowed_token_ids", [True]),
        ("bad_words", "abc"), ("bad_words", [5, 6]), ("bad_words", [""]), ("bad_words", [[]]),
        ("bad_words", [[-1]]), ("bad_words", [[1]] * (MAX_BAD_WORDS + 1)), ("bad_words", [None]),
        ("bad_words", [[1] * (MAX_BAD_WORD_TOKENS + 1)]),
        ("stop_token_ids", [-1]), ("stop_token_ids", list(range(MAX_STOP_IDS + 1))),
        ("stop_token_ids", "5"), ("ignore_eos", 1),
        ("n", 0), ("n", -1), ("n", 1.5), ("n", True),
        *[(n, v) for n in ("logprobs", "prompt_logprobs")
          for v in (-1, True, False, NAN, 1.0, "1")],
        ("logprobs_mode", "Raw"), ("logprobs_mode", None), ("logprobs_mode", 1),
        ("logprobs_mode", ["raw"]),
    ],
)  # fmt: skip
def test_meaningless_values_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0}, {"temperature": 1e-38}, {"temperature": np.float32(0.5)},
        {"top_p": 1}, {"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": -1}, {"top_k": 10**9},
        {"presence_penalty": -2}, {"frequency_penalty": 2.0}, {"repetition_penalty": 0.5},
        {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"seed": np.int64(7)},
        {"seed": np.uint64(2**63 - 1)},
        {"logprobs": 0}, {"logprobs": np.int64(20)}, {"prompt_logprobs": 0}, {"logprobs": None},
        {"prompt_logprobs": 128, "logprobs_mode": "processed"},
        {"min_tokens": 16}, {"bad_words": []}, {"logit_bias": {}}, {"stop_token_ids": []},
    ],
)  # fmt: skip
def test_edges_are_accepted(fields):
    SamplingParams(**fields)


def test_unknown_names_are_refused():
    with pytest.raises(TypeError, match="top_q"):
        SamplingParams(**{"top_q": 1})


def test_messages_say_value_requirement_and_remedy():
    with pytest.raises(
        ValueError, match=r"temperature=-1\.0 must be in \[0, 1e\+06\]; 0 is greedy"
    ):
        SamplingParams(temperature=-1)
    with pytest.raises(ValueError, match=r"min_tokens=5 exceeds max_tokens=4\. Lower it"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(ValueError, match=r"has 513 entries, more than the 512 of its table\. Use"):
        SamplingParams(logit_bias=dict.fromkeys(range(513), 1.0))


def test_sequences_become_tuples_of_plain_numbers():
    params = SamplingParams(
        stop_token_ids=np.array([3, 4]), bad_words=[np.array([1, 2]), "no"],
        allowed_token_ids=range(3),
        temperature=np.float32(0.5), seed=np.int32(3),
    )  # fmt: skip
    assert params.stop_token_ids == (3, 4) and type(params.stop_token_ids[0]) is int
    assert params.bad_words == ((1, 2), "no") and params.allowed_token_ids == (0, 1, 2)
    assert type(params.temperature) is float and type(params.seed) is int
    assert hash(params) == hash(params.replace())


def test_logit_bias_is_a_copy():
    bias = {np.int64(3): 1}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2
    assert params.logit_bias == {3: 1.0}


def test_replace_validates():
    params = SamplingParams(bad_words=["no"])
    assert params.replace(bad_words=[[5], [6, 7]]).bad_words == ((5,), (6, 7))
    with pytest.raises(ValueError, match="top_p"):
        params.replace(top_p=2.0)


def test_stop_ids_unite_eos_and_the_row_s_own():
    params = SamplingParams(stop_token_ids=[9, 2])
    assert params.stop_ids([2, 5]) == (2, 5, 9)
    assert params.replace(ignore_eos=True).stop_ids([2, 5]) == (2, 9)
    assert SamplingParams().stop_ids([7, 2]) == (2, 7)
    assert SamplingParams(ignore_eos=True).stop_ids([7, 2]) == ()


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"logit_bias": {10: 1.0}}, "logit_bias holds token id 10, but ids end at 9"),
        ({"allowed_token_ids": [3, 11]}, "allowed_token_ids holds token id 11"),
        ({"bad_words": [[1], [2, 12]]}, "bad_words holds token id 12"),
        ({"stop_token_ids": [10]}, "stop_token_ids holds token id 10"),
        ({"logprobs": 11}, "logprobs=11 exceeds the 10 ids of the model. Ask for fewer"),
        ({"prompt_logprobs": 11}, "prompt_logprobs=11 exceeds the 10 ids"),
        ({"bad_words": ["no"]}, "Encode it"),
        ({"allowed_token_ids": [3, 4], "bad_words": [[4], [3]]}, "forbids every allowed token"),
        ({"allowed_token_ids": [0], "min_tokens": 1}, "min_tokens=1 allows no stop id"),
    ],
)
def test_check_refuses_what_cannot_be_applied(fields, match):
    with pytest.raises(ValueError, match=match):
        SamplingParams(**fields).check(10, eos_ids=[0])


def test_check_accepts_the_last_id_and_full_tables():
    params = SamplingParams(
        logit_bias={9: 1.0}, allowed_token_ids=[9, 0], bad_words=[[9, 9]], stop_token_ids=[9]
    )
    params.check(10, eos_ids=[0])
    full = SamplingParams(
        bad_words=[[v] for v in range(MAX_BAD_WORDS)],
        stop_token_ids=list(range(MAX_BAD_WORDS, MAX_BAD_WORDS + MAX_STOP_IDS)),
        min_tokens=1,
    )
    full.check(MAX_BAD_WORDS + MAX_STOP_IDS + 1)
    with pytest.raises(ValueError, match="no other token"):
        full.check(MAX_BAD_WORDS + MAX_STOP_IDS)
    with pytest.raises(ValueError, match="33 ids, more than 32"):
        full.check(100, eos_ids=[99])
