import jax
import numpy as np
import pytest

from jaxinfer.compute.logits import process_logits
from jaxinfer.compute.sampling_state import make_sampling_state
from jaxinfer.sampling_params import SamplingParams

VOCAB = 8


@pytest.fixture(scope="module")
def processed():
    """Makes the first processed logits of one row, as a list, with a compiled `process_logits`."""
    step = jax.jit(process_logits)

    def process(logits, prompt=(), output=(), eos_ids=(), **fields):
        state = make_sampling_state(
            [SamplingParams(temperature=0.0, **fields)],
            [prompt],
            vocab_size=VOCAB,
            outputs=[output],
            eos_ids=eos_ids,
        )
        padded = [*logits, *[0.0] * (VOCAB - len(logits))]
        return np.asarray(step(np.float32([padded]), state))[0, : len(logits)].tolist()

    return process


INF = float("inf")


@pytest.mark.parametrize(
    "logits, more, expected",
    [
        ([2.0, -1.0, 2.0], {"prompt": [0], "output": [1], "repetition_penalty": 2.0}, [1, -2, 2]),
        ([0.0, 0.0], {"output": [1, 1, 1], "frequency_penalty": 0.5}, [0, -1.5]),
        ([0.0, 0.0], {"output": [1, 1, 1], "presence_penalty": 0.5}, [0, -0.5]),
        ([3.0, 1.0], {"prompt": [0], "output": [1], "presence_penalty": 2.0}, [3, -1]),
        ([3.0, 1.0], {"prompt": [0, 0], "frequency_penalty": 2.0}, [3, 1]),
        ([1.0, 1.0], {"logit_bias": {1: -2.5}}, [1, -1.5]),
        ([1.0, 2.0, 3.0], {"allowed_token_ids": [2, 0]}, [1, -INF, 3]),
        ([1.0, 2.0, 3.0], {"bad_words": [[1]]}, [1, -INF, 3]),
        # A bias comes before a repetition penalty: (1 + 3) / 2.
        ([1.0, 1.0], {"prompt": [0], "logit_bias": {0: 3.0}, "repetition_penalty": 2.0}, [2, 1]),
        # Repetition before presence: 4 / 2 - 1.
        ([4.0], {"output": [0], "repetition_penalty": 2.0, "presence_penalty": 1.0}, [1]),
        # A biased token that is not allowed stays out; a penalty does not bring it back.
        (
            [1.0, 1.0],
            {
                "allowed_token_ids": [0],
                "logit_bias": {1: 9.0},
                "output": [1],
                "frequency_penalty": -2.0,
            },
            [1, -INF],
        ),
    ],
)
def test_one_transform(processed, logits, more, expected):
    assert processed(logits, **more) == expected


@pytest.mark.parametrize(
    "output, forbidden",
    [([], False), ([1], False), ([2], True), ([1, 2], True), ([2, 1], False), ([2, 4], False)],
)
def test_a_bad_word_may_not_be_completed(processed, output, forbidden):
    assert (processed([0.0] * 6, output=output, bad_words=[[2, 4]])[4] == -INF) == forbidden


def test_a_bad_word_counts_output_tokens_only_and_its_full_width(processed):
    assert processed([0.0] * 6, prompt=[2], bad_words=[[2, 4]])[4] == 0
    word = [1, 2, 3, 1, 2, 3, 1, 5]
    assert processed([0.0] * 6, output=[0, 0, *word[:-1]], bad_words=[word])[5] == -INF
    assert processed([0.0] * 6, output=[0, 0, 2, *word[1:-1]], bad_words=[word])[5] == 0


def test_a_bad_word_that_would_leave_nothing_yields(processed):
    only = {"allowed_token_ids": [3], "bad_words": [[3, 3]]}
    assert processed([0.0] * 5, output=[3], **only)[3] == 0


def test_min_tokens_holds_exactly_the_stop_ids(processed):
    more = {"min_tokens": 2, "stop_token_ids": [3], "eos_ids": (0,)}
    assert processed([0.0] * 5, **more) == [-INF, 0, 0, -INF, 0]
    assert processed([0.0] * 5, output=[1], **more) == [-INF, 0, 0, -INF, 0]
    assert processed([0.0] * 5, output=[1, 1], **more) == [0] * 5
    assert processed([0.0] * 5, ignore_eos=True, **more) == [0, 0, 0, -INF, 0]


def test_rows_that_ask_for_nothing_keep_their_bits():
    busy = SamplingParams(
        temperature=0.0, repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=1.0,
        logit_bias={1: 2.0}, allowed_token_ids=[1, 2], bad_words=[[3], [1, 2]], min_tokens=3,
        stop_token_ids=[2],
    )  # fmt: skip
    plain = SamplingParams(temperature=0.0)
    state = make_sampling_state(
        [plain, busy, plain], [[1, 2]] * 3, vocab_size=101, outputs=[[1, 5]] * 3
    )
    logits = np.random.default_rng(0).standard_normal((3, 101)).astype(np.float32)
    out = np.asarray(jax.jit(process_logits)(logits, state))
    np.testing.assert_array_equal(out[[0, 2]], logits[[0, 2]])
    assert np.isfinite(out[1]).sum() == 1
