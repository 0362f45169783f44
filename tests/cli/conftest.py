"""A language model that only echoes, so that the commands are tested alone."""

from __future__ import annotations

import math
import signal
from dataclasses import dataclass, field

import pytest

import jaxinfer
from jaxinfer.sched import TokenLogprobs

LOGPROBS = [
    None,
    TokenLogprobs(5, -0.5, {7: -0.25, 5: -0.5}),
    TokenLogprobs(6, -math.inf, {9: 0.0, 0: -math.inf}),
]


@dataclass
class FakeCompletion:
    text: str
    token_ids: list[int]
    text_delta: str = ""
    finish_reason: str | None = None
    logprobs: list | None = None


@dataclass
class FakeMetrics:
    ttft_s: float | None = 0.25
    tpot_s: float | None = 0.01


@dataclass
class FakeOutput:
    outputs: list[FakeCompletion]
    prompt_token_ids: list[int]
    seed: int = 99
    cached_tokens: int = 0
    metrics: FakeMetrics = field(default_factory=FakeMetrics)
    prompt_logprobs: list | None = None


class FakeLLM:
    """Echoes the prompt, or the last message, word by word; records every call in `calls`.

    A prompt of "refuse" raises, "fail" ends in an error, "ctrl-c ..." presses
    Ctrl-C at its second word.
    """

    calls: list[tuple]

    def __init__(self, model, *, progress=None, **keywords):
        self.calls = [("LLM", model, keywords)]
        self.closed = False
        self.cancelled = 0

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.closed = True

    def generate(self, prompts, params):
        self.calls.append(("generate", prompts, params))
        outputs = [list(self._echo(prompt))[-1] for prompt in prompts]
        for output in outputs:
            output.outputs *= params.n
            if params.logprobs is not None:
                output.outputs[0].logprobs = LOGPROBS[1:]
            if params.prompt_logprobs is not None:
                output.prompt_logprobs = LOGPROBS
        return outputs

    def chat(self, messages, params):
        self.calls.append(("chat", messages, params))
        return [list(self._echo(one[-1]["content"]))[-1] for one in messages]

    def stream(self, prompt, params):
        self.calls.append(("stream", prompt, params))
        return self._echo(prompt)

    def stream_chat(self, messages, params):
        self.calls.append(("stream_chat", messages, params))
        return self._echo(messages[-1]["content"])

    def metrics(self):
        return {"load_s": 2.0, "compile_s": 3.25, "programs": 19, "cached_programs": 17}

    def _echo(self, prompt):
        if prompt == "refuse":
            raise ValueError("The prompt is refused.")
        words = prompt.split(" ")
        text = ""
        try:
            for count, word in enumerate(words, start=1):
                delta = word if count == 1 else " " + word
                text += delta
                last = count == len(words)
                reason = ("error" if prompt == "fail" else "stop") if last else None
                completion = FakeCompletion(text, list(range(count)), delta, reason)
                if prompt.startswith("ctrl-c") and count == 2:
                    signal.raise_signal(signal.SIGINT)
                yield FakeOutput([completion], [7] * len(words))
        except GeneratorExit:
            self.cancelled += 1
            raise


@pytest.fixture
def fakes() -> dict[str, type]:
    """Public name -> the class that stands in for it, and for what hangs on it."""
    return {
        "RequestOutput": FakeOutput,
        "CompletionOutput": FakeCompletion,
        "RequestMetrics": FakeMetrics,
        "LLM": FakeLLM,
    }


@pytest.fixture
def llms(monkeypatch) -> list[FakeLLM]:
    """The fake models that the commands have opened so far."""
    opened = []

    def open_llm(*args, **keywords):
        opened.append(FakeLLM(*args, **keywords))
        return opened[-1]

    monkeypatch.setitem(jaxinfer.__dict__, "LLM", open_llm)
    return opened
