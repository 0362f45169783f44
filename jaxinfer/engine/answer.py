"""`Answer`: the texts of the samples of one prompt while their tokens come in."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.engine.engine import TokenOutput
from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxinfer.sched import Request
from jaxinfer.text import IncrementalDetokenizer, StopMatcher, Tokenizer


class Answer:
    """The samples of one prompt so far, and whether there is anything nobody has seen yet."""

    def __init__(self, requests: Sequence[Request], prompt: str | None, tokenizer: Tokenizer):
        self.requests = tuple(requests)
        self.has_news = False
        self._prompt = prompt
        self._samples = {request.id: _Sample(request, tokenizer) for request in requests}

    @property
    def is_over(self) -> bool:
        """Whether no more comes."""
        return all(request.finish_reason is not None for request in self.requests)

    def take(self, output: TokenOutput) -> int | None:
        """Adds the tokens of one step; how many to keep if a stop string ends them, or None."""
        self.has_news = True
        return self._samples[output.request.id].take(output)

    def snapshot(self) -> RequestOutput:
        """The output so far; its deltas are what came since the last snapshot."""
        self.has_news = False
        first = self.requests[0]
        asks_prompt = first.params.prompt_logprobs is not None
        return RequestOutput(
            request_id=first.id,
            prompt=self._prompt,
            prompt_token_ids=first.prompt_ids,
            seed=first.seed,
            cached_tokens=first.num_cached,
            metrics=RequestMetrics.of(self.requests),
            outputs=tuple(sample.snapshot() for sample in self._samples.values()),
            prompt_logprobs=tuple(first.prompt_logprobs) if asks_prompt else None,
        )


class _Sample:
    """The text of one request so far, and how much of it nobody has seen yet."""

    def __init__(self, request: Request, tokenizer: Tokenizer):
        self._request = request
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopMatcher(request.params.stop or ())
        self._num_taken = 0
        self._text = ""
        self._num_seen = 0

    def take(self, output: TokenOutput) -> int | None:
        for i, token in enumerate(output.new_ids):
            self._num_taken += 1
            is_end = output.finish_reason == "stop" and i == len(output.new_ids) - 1
            if self._add("" if is_end else self._detokenizer.add(token)):
                return self._num_taken
        if output.finish_reason is not None:
            if self._add(self._detokenizer.finish()):
                return self._num_taken
            self._text += self._stops.finish()
        return None

    def _add(self, text: str) -> bool:
        """Whether `text`, now added as far as it is certain, completes a stop string."""
        if self._num_taken < self._request.params.min_tokens:
            self._text += text
            return False
        certain, stopped = self._stops.add(text)
        self._text += certain
        return stopped

    def snapshot(self) -> CompletionOutput:
        request, delta = self._request, self._text[self._num_seen :]
        self._num_seen = len(self._text)
        return CompletionOutput(
            token_ids=tuple(request.output_ids),
            text=self._text,
            text_delta=delta,
            finish_reason=request.finish_reason,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
        )
