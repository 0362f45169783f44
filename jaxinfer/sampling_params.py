"""`SamplingParams`: what one request asks of the sampler. Every field is applied or refused."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.config import require

# Widths of the per-row tables on the device. A request that needs more is refused, never cut.
MAX_LOGIT_BIAS = 512
MAX_BAD_WORDS = 32
MAX_BAD_WORD_TOKENS = 8
MAX_STOP_IDS = 32

# (least, most, what it means) of each number, both ends included.
RANGES = {
    "temperature": (0.0, 1e6, "0 is greedy"),
    "top_p": (0.0, 1.0, "1 keeps every token"),
    "min_p": (0.0, 1.0, "0 keeps every token"),
    "repetition_penalty": (1e-6, 1e6, "1 is none"),
    "presence_penalty": (-2.0, 2.0, "0 is none"),
    "frequency_penalty": (-2.0, 2.0, "0 is none"),
}
# (least, most) of each integer.
INT_RANGES = {
    "top_k": (-1, None),
    "n": (1, None),
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, None),
    "prompt_logprobs": (0, None),
}
# Those of them that may be None.
OPTIONAL = ("seed", "logprobs", "prompt_logprobs")
LOGPROBS_MODES = ("raw", "processed")
MAX_BIAS = 1e9


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request samples; each field may differ from row to row of a batch at no cost.

    The order is fixed: logit_bias and allowed/bad tokens -> penalties -> min_tokens -> temperature
    -> top_k -> top_p (of what top_k left, renormalised) -> min_p -> draw. Sequences become tuples.

    Attributes:
        temperature: divides the logits; 0 takes the most likely token (lowest id on ties).
        top_k: keep the k most likely; 0, -1 and anything from the vocabulary's size up keep all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p; 1 keeps all.
        min_p: keep tokens with at least min_p times the probability of the most likely one.
        repetition_penalty: of prompt and output tokens; divides positive logits, multiplies others.
        presence_penalty: subtracted once from the logit of each token of the output; -2 to 2.
        frequency_penalty: subtracted from it once per occurrence in the output; -2 to 2.
        logit_bias: token id -> finite number added to its logit; to forbid a token use bad_words.
        allowed_token_ids: only these may be sampled.
        bad_words: words that may not be completed in the output: strings, or token-id sequences.
            One that would leave no token to sample yields for that step.
        max_tokens: most tokens to generate. A request also ends when max_model_len is reached.
        min_tokens: tokens to generate before one of the stop ids may be sampled.
        stop: strings that end the text, which stops before them; sought once min_tokens are there.
        stop_token_ids: ids that end the output, besides the model's own EOS.
        ignore_eos: go on past the model's own EOS.
        seed: the draws are a function of (seed, prompt, sample index, position); None: a fresh one.
        logprobs: log-probabilities of each output token and of the k most likely in its place; 0:
            of it alone; None: none at all. Up to `max_logprobs` of the engine.
        prompt_logprobs: the same of each prompt token but the first, given those before it.
        logprobs_mode: "raw": log-softmax of the model's own float32 logits; "processed": of the
            distribution that is sampled from, after all of the above.
        n: samples of the prompt, which is computed once for all of them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"

    def __post_init__(self):
        for name, (low, high, meaning) in RANGES.items():
            value = _number(f"SamplingParams.{name}", getattr(self, name))
            require(
                low <= value <= high and not (name == "top_p" and value == 0),
                f"SamplingParams.{name}={value} must be in "
                f"{'(' if name == 'top_p' else '['}{low:g}, {high:g}]; {meaning}.",
            )
            self._set(name, value)
        for name, (low, high) in INT_RANGES.items():
            if name not in OPTIONAL or getattr(self, name) is not None:
                self._set(name, _int(f"SamplingParams.{name}", getattr(self, name), low, high))
        require(
            self.min_tokens <= self.max_tokens,
            f"SamplingParams.min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}. "
            "Lower it or raise max_tokens.",
        )
        require(
            isinstance(self.ignore_eos, bool),
            f"SamplingParams.ignore_eos={self.ignore_eos!r} must be True or False.",
        )
        require(
            self.logprobs_mode in LOGPROBS_MODES,
            f"SamplingParams.logprobs_mode={self.logprobs_mode!r} is unknown. "
            f"Choose one of {', '.join(LOGPROBS_MODES)}.",
        )
        self._set("logit_bias", _bias(self.logit_bias))
        self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        require(
            self.allowed_token_ids != (),
            "SamplingParams.allowed_token_ids is empty. Use None to allow every token.",
        )
        self._set("bad_words", _words(self.bad_words))
        self._set("stop", _stops(self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        _require_fits("stop_token_ids", self.stop_token_ids, MAX_STOP_IDS)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with `changes`, validated."""
        return dataclasses.replace(self, **changes)

    def stop_ids(self, eos_ids: Iterable[int]) -> tuple[int, ...]:
        """The ids that end a row, ascending: EOS unless ignored, and `stop_token_ids`."""
        eos = () if self.ignore_eos else tuple(eos_ids)
        return tuple(sorted({*eos, *(self.stop_token_ids or ())}))

    def check(self, vocab_size: int, eos_ids: Iterable[int] = ()) -> None:
        """Raises ValueError unless these parameters can be applied to ids 0 .. vocab_size - 1."""
        words = self.bad_words or ()
        for word in words:
            require(
                not isinstance(word, str),
                f"SamplingParams.bad_words holds the string {word!r}, but only token ids are known "
                "here. Encode it with the tokenizer first.",
            )
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            require(
                count is None or count <= vocab_size,
                f"SamplingParams.{name}={count} exceeds the {vocab_size} ids of the model. "
                "Ask for fewer.",
            )
        stop_ids = self.stop_ids(eos_ids)
        fields = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [token for word in words for token in word],
            "stop_token_ids": self.stop_token_ids or (),
        }
        for name, ids in fields.items():
            largest = max(ids, default=0)
            require(
                largest < vocab_size,
                f"SamplingParams.{name} holds token id {largest}, but ids end at {vocab_size - 1}.",
            )
        require(
            len(stop_ids) <= MAX_STOP_IDS,
            f"SamplingParams.stop_token_ids and the model's EOS are {len(stop_ids)} ids, more than "
            f"{MAX_STOP_IDS}. Use fewer stop_token_ids.",
        )
        # With every token allowed, one more than the tables can forbid stand for them all.
        few = range(min(vocab_size, MAX_BAD_WORDS + MAX_STOP_IDS + 1))
        left = set(few if self.allowed_token_ids is None else self.allowed_token_ids)
        left -= {word[0] for word in words if len(word) == 1}
        require(
            bool(left), "SamplingParams.bad_words forbids every allowed token. Allow another one."
        )
        require(
            self.min_tokens == 0 or bool(left.difference(stop_ids)),
            f"SamplingParams.min_tokens={self.min_tokens} allows no stop id, but no other token is "
            "allowed. Use min_tokens=0 or allow another token.",
        )


def _number(name: str, value: Any) -> float:
    require(
        isinstance(value, numbers.Real) and not isinstance(value, bool),
        f"{name}={value!r} must be a number.",
    )
    return float(value)


def _int(name: str, value: Any, low: int | None, high: int | None) -> int:
    require(
        isinstance(value, numbers.Integral) and not isinstance(value, bool),
        f"{name}={value!r} must be an int.",
    )
    value = operator.index(value)
    require(
        (low is None or value >= low) and (high is None or value <= high),
        f"{name}={value} must be at least {low}"
        + ("." if high is None else f" and at most {high}."),
    )
    return value


def _items(name: str, values: Any) -> tuple:
    require(
        isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping),
        f"SamplingParams.{name}={values!r} must be a sequence.",
    )
    return tuple(values)


def _ids(name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    ids = _items(name, values)
    wrong = [v for v in ids if not isinstance(v, numbers.Integral) or isinstance(v, bool) or v < 0]
    require(not wrong, f"SamplingParams.{name} holds {wrong[:3]}; token ids are ints from 0 up.")
    return tuple(map(operator.index, ids))


def _require_fits(name: str, values: Any, most: int) -> None:
    count = len(values or ())
    require(
        count <= most,
        f"SamplingParams.{name} has {count} entries, more than the {most} of its table. Use fewer.",
    )


def _bias(values: Any) -> dict[int, float] | None:
    if values is None:
        return None
    require(
        isinstance(values, Mapping),
        f"SamplingParams.logit_bias={values!r} must map token ids to numbers.",
    )
    _require_fits("logit_bias", values, MAX_LOGIT_BIAS)
    biases = {}
    for key, value in values.items():
        token = _int("A token id of SamplingParams.logit_bias", key, 0, None)
        biases[token] = _number(f"SamplingParams.logit_bias[{token}]", value)
        require(
            -MAX_BIAS <= biases[token] <= MAX_BIAS,
            f"SamplingParams.logit_bias[{token}]={value} must be in [{-MAX_BIAS:g}, {MAX_BIAS:g}]. "
            "To forbid a token use bad_words.",
        )
    return biases


def _stops(stop: Any) -> tuple[str, ...] | None:
    """The stop strings as a tuple; None if there are none."""
    if stop is None:
        return None
    require(
        isinstance(stop, Sequence),
        f"SamplingParams.stop={stop!r} is neither a string nor a list of strings.",
    )
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in stops:
        require(
            isinstance(text, str) and text != "",
            f"SamplingParams.stop holds {text!r}. Use strings of at least one character.",
        )
    return stops or None


def _words(values: Any) -> tuple[str | tuple[int, ...], ...] | None:
    if values is None:
        return None
    words = tuple(_word(word) for word in _items("bad_words", values))
    _require_fits("bad_words", words, MAX_BAD_WORDS)
    return words


def _word(word: Any) -> str | tuple[int, ...]:
    require(
        isinstance(word, str | Iterable),
        f"SamplingParams.bad_words holds {word!r}, but a word is a string or a sequence of "
        "token ids. Use a list such as [[5], [6, 7]].",
    )
    ids = word if isinstance(word, str) else _ids("bad_words", word)
    require(bool(ids), "SamplingParams.bad_words holds an empty word. Leave it out.")
    assert ids is not None
    require(
        isinstance(ids, str) or len(ids) <= MAX_BAD_WORD_TOKENS,
        f"SamplingParams.bad_words holds a word of {len(ids)} tokens, more than "
        f"{MAX_BAD_WORD_TOKENS}. Use its last {MAX_BAD_WORD_TOKENS} tokens.",
    )
    return ids
