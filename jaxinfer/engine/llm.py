"""`LLM`: text in, text out, over one engine. The offline interface: the caller's thread does the
work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np

from jaxinfer.compute.decoder import Params
from jaxinfer.config import require
from jaxinfer.engine.answer import Answer
from jaxinfer.engine.frontend import SCORING, Frontend, Messages, Prompt, scores_of
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text import encode_chat


class LLM(Frontend):
    """A loaded model that answers prompts. Not thread-safe."""

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        """Returns None; every request under way is cancelled. Device memory goes with the last
        reference.
        """
        for answer in list(self._answers.values()):
            self._cancel(answer)

    def metrics(self) -> dict[str, Any]:
        """What was counted since the start: see `Engine.metrics`; and `load_s`: seconds of reading
        the checkpoint.
        """
        return self._metrics()

    def update_params(self, params: Params) -> None:
        """Returns None; later steps use `params`, in place: see `Engine.update_params`."""
        self._engine.update_params(params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """The finished outputs of the prompts (texts or token-id lists), in their order.

        One `params` serves all prompts, or there is one for each; so with `priority`: by policy
        "priority" a lower one goes first. Raises ValueError before anything is computed if one of
        them cannot run; the message says which.
        """
        return self._run(_as_prompts(prompts), self._encode, params, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        **template: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation or several, through the model's chat template.

        `template` goes on to it (`tools`, `documents`, `add_generation_prompt`, ...).
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], [messages] if one else messages)
        encode = functools.partial(encode_chat, self.tokenizer, **template)
        return self._run(conversations, encode, params, priority)

    def score(self, token_ids: Prompt | Sequence[Prompt]) -> np.ndarray | list[np.ndarray]:
        """float32 `[T - 1]`: the log-probability of each token given those before it, the first
        left out; a list of such arrays for a list of prompts.

        They are "raw": the log-softmax of the model's own logits. Text is encoded as `generate`
        does. Raises ValueError for fewer than 2 tokens, or for as many as `max_model_len`.
        """
        outputs = self._run(_as_prompts(token_ids), self._encode_scored, SCORING)
        scores = [scores_of(output) for output in outputs]
        return scores[0] if _is_prompt(token_ids) else scores

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0
    ) -> RequestStream:
        """An iterator of outputs that grow as tokens arrive; closing it cancels the request."""
        return RequestStream(self, self._submit(self._encode(prompt), prompt, params, priority))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **template: Any,
    ) -> RequestStream:
        """`stream` for a conversation."""
        ids = encode_chat(self.tokenizer, messages, **template)
        return RequestStream(self, self._submit(ids, None, params, priority))

    def _run(
        self,
        prompts: Sequence[Any],
        encode: Callable[[Any], list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] = 0,
    ) -> list[RequestOutput]:
        """The finished outputs of prompts or conversations; an error cancels all of them."""
        all_params = _for_each(prompts, params, SamplingParams | None, "SamplingParams")
        priorities = _for_each(prompts, priority, Integral, "priorities")
        report = self._reporter("generating") or (lambda done, total: None)
        answers: list[Answer] = []
        try:
            for prompt, *its in zip(prompts, all_params, priorities, strict=True):
                try:
                    answers.append(self._submit(encode(prompt), prompt, *its))
                except ValueError as error:
                    raise ValueError(f"Prompt {len(answers)}: {error}") from error
            while not all(answer.is_over for answer in answers):
                self._step()
                report(sum(answer.is_over for answer in answers), len(answers))
            return [answer.snapshot() for answer in answers]
        finally:
            for answer in answers:
                self._cancel(answer)

    def _submit(
        self, ids: Sequence[int], prompt: Any, params: SamplingParams | None, priority: int
    ) -> Answer:
        """The answer that is now under way."""
        answer = self._ask(ids, prompt, params, priority=priority)
        self._begin(answer)
        return answer


class RequestStream(Iterator[RequestOutput]):
    """The outputs of one request as they grow. `close`, or leaving a `with` of `closing`, cancels
    it.
    """

    def __init__(self, llm: LLM, answer: Answer):
        self._llm, self._answer = llm, answer

    def __next__(self) -> RequestOutput:
        answer = self._answer
        while not answer.has_news:
            if answer.is_over:
                raise StopIteration
            self._llm._step()
        return answer.snapshot()

    def close(self) -> None:
        """Returns None; the request is over, its pages are free."""
        self._llm._cancel(self._answer)
        self._answer.has_news = False

    def __del__(self):
        self.close()


def _for_each(prompts: Sequence[Any], given: Any, kind: Any, name: str) -> Sequence[Any]:
    """What was `given` for each prompt: one of that kind for all of them, or one for each."""
    if isinstance(given, kind):
        return [given] * len(prompts)
    require(
        len(given) == len(prompts),
        f"{len(given)} {name} were given for {len(prompts)} prompts. Give one, or one for each.",
    )
    return given


def _is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is one prompt, a text or token ids, and not a list of them."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts, one or several, as a list."""
    return cast(Sequence[Prompt], [prompts] if _is_prompt(prompts) else prompts)
