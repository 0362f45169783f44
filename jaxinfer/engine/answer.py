"""`Answer`: the text of one request while its tokens come in."""

from __future__ import annotations

from jaxinfer.engine.engine import TokenOutput
from jaxinfer.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxinfer.sched import Request
from jaxinfer.text import IncrementalDetokenizer, StopMatcher, Tokenizer


class Answer:
    """The text of one request so far, and how much of it nobody has seen yet."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer):
        self.request = request
        self.has_news = False
        self._prompt = prompt
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stops = StopMatcher(request.params.stop or ())
        self._num_taken = 0
        self._text = ""
        self._num_seen = 0

    @property
    def is_over(self) -> bool:
        """Whether no more comes."""
        return self.request.finish_reason is not None

    def take(self, output: TokenOutput) -> int | None:
        """Adds the tokens of one step; how many to keep if a stop string ends them, or None."""
        self.has_news = True
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
        if self._num_taken < self.request.params.min_tokens:
            self._text += text
            return False
        certain, stopped = self._stops.add(text)
        self._text += certain
        return stopped

    def snapshot(self) -> RequestOutput:
        """The output so far; its delta is what came since the last snapshot."""
        request, delta = self.request, self._text[self._num_seen :]
        params = request.params
        self.has_news, self._num_seen = False, len(self._text)
        completion = CompletionOutput(
            token_ids=tuple(request.output_ids),
            text=self._text,
            text_delta=delta,
            finish_reason=request.finish_reason,
            logprobs=None if params.logprobs is None else tuple(request.logprobs),
        )
        return RequestOutput(
            request_id=request.id,
            prompt=self._prompt,
            prompt_token_ids=request.prompt_ids,
            seed=request.seed,
            cached_tokens=0,
            metrics=RequestMetrics.of(request),
            outputs=(completion,),
            prompt_logprobs=(
                None if params.prompt_logprobs is None else tuple(request.prompt_logprobs)
            ),
        )
