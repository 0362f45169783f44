"""`LLM`: text in, text out, over one engine. The offline interface: the caller's thread does the
work.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

import numpy as np

from jaxinfer.checkpoint import load_params, open_checkpoint, resolve
from jaxinfer.checkpoint.loading import Checkpoint
from jaxinfer.compute.decoder import Decoder, Params
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.config import EngineConfig, require
from jaxinfer.engine.answer import Answer
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.programs import keep_compiled_programs
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text import Tokenizer, encode_chat, load_tokenizer, tokenizer_from_gguf

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Report = Callable[[str, int, int], None]

DEFAULT_MODEL_LEN = 2048


class LLM:
    """A loaded model that answers prompts.

    Args:
        model: an alias ("smollm2-135m"), a GGUF file, a Hugging Face or Orbax folder, or a hub id.
        dtype: of the weights: "bfloat16", "float32" or "float16". kv_dtype: of the cache; None: the
            same.
        max_model_len: most tokens of a request, prompt and output; None: 2048, or what the model
            can.
        max_num_seqs: requests that are computed at the same time.
        page_size: cache slots per page. num_pages: pages in all; None: enough for every request.
        prefill_chunk: most prompt tokens computed at once, and so the longest that others wait for
            it.
        max_window: most decode steps between two looks of the host.
        max_logprobs: most likely tokens whose log-probabilities a request may ask for; at most 128.
        prefix_cache: whether requests share the pages of equal beginnings.
        attention: a backend of `pallas_kernels.paged_attention` by name; None: the platform's.
        logits_hook: pure `(logits_BV, sampling_state) -> logits_BV`, applied first at every step.
        compile_ahead: compile every program now, rather than each when it is first needed. Compiled
            programs are kept on disk, in JAX's persistent compilation cache.
        progress: called with (what, done, total) while loading, compiling and generating.

    Raises:
        ValueError, FileNotFoundError: the model cannot be had, or an option is wrong.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "bfloat16",
        kv_dtype: str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        page_size: int = 32,
        num_pages: int | None = None,
        prefill_chunk: int = 512,
        max_window: int = 8,
        max_logprobs: int = 20,
        prefix_cache: bool = True,
        attention: str | None = None,
        logits_hook: LogitsHook | None = None,
        compile_ahead: bool = False,
        progress: Report | None = None,
    ):
        checkpoint = open_checkpoint(resolve(model))
        if max_model_len is None:
            longest = min(DEFAULT_MODEL_LEN, checkpoint.config.max_position)
            require(
                1 <= page_size <= longest,
                f"page_size={page_size} must be in 1 .. {longest}, the tokens of a request.",
            )
            max_model_len = longest - longest % page_size
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            page_size=page_size,
            num_pages=num_pages,
            prefill_chunk=prefill_chunk,
            max_window=max_window,
            max_logprobs=max_logprobs,
            prefix_cache=prefix_cache,
            kv_dtype=kv_dtype or dtype,
        )
        self.tokenizer = _tokenizer_of(checkpoint)
        keep_compiled_programs()
        self._progress = progress
        self._engine = Engine(
            Decoder(checkpoint.config, attention),
            load_params(checkpoint, dtype=dtype, progress=self._reporter("loading")),
            config,
            eos_ids=sorted({*checkpoint.config.eos_ids, *self.tokenizer.eos_ids}),
            num_valid_ids=min(self.tokenizer.vocab_size, checkpoint.config.vocab_size),
            logits_hook=logits_hook,
            compile_ahead=compile_ahead,
            progress=self._reporter("compiling"),
        )
        self._answers: dict[str, Answer] = {}

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
        """What was counted since the start: see `Engine.metrics`."""
        return self._engine.metrics()

    def update_params(self, params: Params) -> None:
        """Returns None; later steps use `params`, in place: see `Engine.update_params`."""
        self._engine.update_params(params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The finished outputs of the prompts (texts or token-id lists), in their order.

        One `params` serves all prompts, or there is one for each. Raises ValueError before anything
        is computed if one of them cannot run; the message says which.
        """
        return self._run(_as_prompts(prompts), self._encode, params)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation or several, through the model's chat template.

        `template` goes on to it (`tools`, `documents`, `add_generation_prompt`, ...).
        """
        one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], [messages] if one else messages)
        encode = functools.partial(encode_chat, self.tokenizer, **template)
        return self._run(conversations, encode, params)

    def score(self, token_ids: Prompt | Sequence[Prompt]) -> np.ndarray | list[np.ndarray]:
        """float32 `[T - 1]`: the log-probability of each token given those before it, the first
        left out; a list of such arrays for a list of prompts.

        They are "raw": the log-softmax of the model's own logits. Text is encoded as `generate`
        does. Raises ValueError for fewer than 2 tokens, or for as many as `max_model_len`.
        """

        def encode(prompt: Prompt) -> list[int]:
            ids = self._encode(prompt)
            require(
                len(ids) >= 2,
                f"score is given {len(ids)} tokens and needs at least 2: the first has none "
                "before it. Give it more.",
            )
            return ids

        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        outputs = self._run(_as_prompts(token_ids), encode, params)
        scores = [
            np.array([one.logprob for one in output.prompt_logprobs or () if one], np.float32)
            for output in outputs
        ]
        return scores[0] if _is_prompt(token_ids) else scores

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """An iterator of outputs that grow as tokens arrive; closing it cancels the request."""
        return RequestStream(self, self._submit(self._encode(prompt), prompt, params))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, **template: Any
    ) -> RequestStream:
        """`stream` for a conversation."""
        ids = encode_chat(self.tokenizer, messages, **template)
        return RequestStream(self, self._submit(ids, None, params))

    def _run(
        self, prompts: Sequence[Any], encode: Callable[[Any], list[int]], params
    ) -> list[RequestOutput]:
        """The finished outputs of prompts or conversations; an error cancels all of them."""
        per_prompt = (
            [params] * len(prompts) if isinstance(params, SamplingParams | None) else params
        )
        require(
            len(per_prompt) == len(prompts),
            f"{len(per_prompt)} SamplingParams were given for {len(prompts)} prompts. "
            "Give one, or one for each.",
        )
        report = self._reporter("generating") or (lambda done, total: None)
        answers: list[Answer] = []
        try:
            for prompt, one in zip(prompts, per_prompt, strict=True):
                try:
                    answers.append(self._submit(encode(prompt), prompt, one))
                except ValueError as error:
                    raise ValueError(f"Prompt {len(answers)}: {error}") from error
            while not all(answer.is_over for answer in answers):
                self._step()
                report(sum(answer.is_over for answer in answers), len(answers))
            return [answer.snapshot() for answer in answers]
        finally:
            for answer in answers:
                self._cancel(answer)

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        # Nothing at all to go on from means the beginning of a text, where the model knows one.
        bos = self.tokenizer.bos_id
        return [bos] if not ids and bos is not None else ids

    def _submit(
        self, ids: Sequence[int], prompt: Prompt | None, params: SamplingParams | None
    ) -> Answer:
        params = self._with_word_ids(params or SamplingParams())
        requests = self._engine.add_samples(ids, params)
        text = prompt if isinstance(prompt, str) else None
        answer = Answer(requests, text, self.tokenizer)
        self._answers.update((request.id, answer) for request in requests)
        return answer

    def _with_word_ids(self, params: SamplingParams) -> SamplingParams:
        """`params` with each bad word that is text as ids: as it is, and behind a space."""
        words: list[Sequence[int]] = []
        for word in params.bad_words or ():
            if not isinstance(word, str):
                words.append(word)
                continue
            for text in dict.fromkeys((word, " " + word.lstrip())):
                words.append(self.tokenizer.encode(text, add_special=False))
        return dataclasses.replace(params, bad_words=words) if words else params

    def _step(self) -> None:
        """Advances every request; what is new waits in its answer."""
        for output in self._engine.step():
            answer = self._answers.get(output.request.id)
            if answer is None:  # cancelled while its tokens lay ready behind an interrupted step
                continue
            num_output = answer.take(output)
            if num_output is not None:
                self._engine.stop(output.request, num_output)
            if output.request.finish_reason is not None:
                del self._answers[output.request.id]

    def _cancel(self, answer: Answer) -> None:
        for request in answer.requests:
            if self._answers.pop(request.id, None) is not None:
                self._engine.cancel(request.id)

    def _reporter(self, what: str) -> Callable[[int, int], None] | None:
        report = self._progress
        return None if report is None else lambda done, total: report(what, done, total)


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


def _is_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether it is one prompt, a text or token ids, and not a list of them."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts, one or several, as a list."""
    return cast(Sequence[Prompt], [prompts] if _is_prompt(prompts) else prompts)


def _tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with the weights."""
    metadata = checkpoint.reader.metadata
    # An Orbax folder keeps the form of tokenizer that its source had.
    if checkpoint.path.is_file() or "tokenizer.ggml.model" in metadata:
        return tokenizer_from_gguf(metadata)
    return load_tokenizer(checkpoint.path)
