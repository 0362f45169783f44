"""`Frontend`: a loaded model, texts in and answers out: what `LLM` and `AsyncLLM` stand on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.checkpoint import load_params, open_checkpoint, resolve
from jaxinfer.checkpoint.loading import Checkpoint
from jaxinfer.compute.decoder import Decoder, stack_where_scanned
from jaxinfer.compute.logits import LogitsHook
from jaxinfer.compute.sharding import fit_config, make_mesh
from jaxinfer.config import EngineConfig, ParallelConfig, require
from jaxinfer.engine.answer import Answer
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.programs import keep_compiled_programs
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text import Tokenizer, load_tokenizer, tokenizer_from_gguf

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
Report = Callable[[str, int, int], None]

DEFAULT_MODEL_LEN = 2048
# What a prompt that is scored asks for: its own log-probabilities, and as little more as can be.
SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


class Frontend:
    """A loaded model: its engine, its tokenizer, and the answers under way. Abstract."""

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
        token_budget: int | None = None,
        policy: str = "fcfs",
        max_overtakes: int = 100,
        parallel: ParallelConfig | None = None,
        attention: str | None = None,
        batch_invariant: bool = False,
        logits_hook: LogitsHook | None = None,
        compile_ahead: bool = False,
        progress: Report | None = None,
    ):
        """Loads the model.

        Args:
            model: an alias ("smollm2-135m"), a GGUF file, a Hugging Face or Orbax folder, a hub id.
            dtype: of the weights: "bfloat16", "float32" or "float16". kv_dtype: of the cache; None:
                the same.
            max_model_len: most tokens of a request, prompt and output; None: 2048, or what the
                model can.
            max_num_seqs: requests that are computed at the same time.
            page_size: cache slots per page. num_pages: pages in all; None: enough for all requests.
            prefill_chunk: most prompt tokens computed at once, and so the longest that others wait
                for it.
            max_window: most decode steps between two looks of the host.
            max_logprobs: most likely tokens whose log-probabilities a request may ask for; at most
                128.
            prefix_cache: whether requests share the pages of equal beginnings.
            token_budget: most tokens of one step, one for each request that decodes and the rest
                for prefill; None: a whole chunk beside all of them.
            policy: "fcfs": first come, first served; "priority": requests of lower priority first.
            max_overtakes: later requests that may go before a waiting one, by priority.
            parallel: how many devices to spread the model over; max_num_seqs and num_pages are then
                those of each data shard. None: one device.
            attention: a backend of `pallas_kernels.paged_attention` by name; None: the platform's.
            batch_invariant: give a prompt bitwise the same tokens and log-probabilities whatever
                else is computed; on CPU, and slower.
            logits_hook: pure `(logits_BV, sampling_state) -> logits_BV`, applied first at every
                step.
            compile_ahead: compile every program now, rather than each when it is first needed.
                Compiled programs are kept on disk, in JAX's persistent compilation cache.
            progress: called with (what, done, total) while loading, compiling and generating.

        Raises:
            ValueError, FileNotFoundError: the model cannot be had, or an option is wrong.
        """
        parallel = parallel or ParallelConfig()
        mesh = make_mesh(parallel)
        path, start = resolve(model), time.perf_counter()
        checkpoint = open_checkpoint(path)
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
            token_budget=token_budget,
            policy=policy,
            max_overtakes=max_overtakes,
            kv_dtype=kv_dtype or dtype,
            batch_invariant=batch_invariant,
        )
        self.tokenizer = _tokenizer_of(checkpoint)
        keep_compiled_programs()
        self._progress = progress
        report = self._reporter("loading")
        params = load_params(checkpoint, dtype=dtype, mesh=mesh, progress=report)
        params = stack_where_scanned(params, mesh)
        self._load_s = time.perf_counter() - start
        self._engine = Engine(
            Decoder(fit_config(checkpoint.config, parallel.model), attention, mesh=mesh),
            params,
            config,
            eos_ids=sorted({*checkpoint.config.eos_ids, *self.tokenizer.eos_ids}),
            num_valid_ids=min(self.tokenizer.vocab_size, checkpoint.config.vocab_size),
            logits_hook=logits_hook,
            compile_ahead=compile_ahead,
            progress=self._reporter("compiling"),
        )
        self._answers: dict[str, Answer] = {}

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        # Nothing at all to go on from means the beginning of a text, where the model knows one.
        bos = self.tokenizer.bos_id
        return [bos] if not ids and bos is not None else ids

    def _encode_scored(self, prompt: Prompt) -> list[int]:
        """The ids of a prompt to be scored."""
        ids = self._encode(prompt)
        require(
            len(ids) >= 2,
            f"score is given {len(ids)} tokens and needs at least 2: the first has none "
            "before it. Give it more.",
        )
        return ids

    def _ask(
        self,
        ids: Sequence[int],
        prompt: Any,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Answer:
        """The answer to come, checked and not yet under way; `prompt` is what was asked, if a text.

        Raises ValueError if it can never run. Any thread may call this at any time.
        """
        params = self._with_word_ids(params or SamplingParams())
        requests = self._engine.make_samples(ids, params, request_id=request_id, priority=priority)
        return Answer(requests, prompt if isinstance(prompt, str) else None, self.tokenizer)

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

    def _metrics(self) -> dict[str, Any]:
        """What the engine counted, and `load_s`: seconds of reading the checkpoint."""
        return {**self._engine.metrics(), "load_s": self._load_s}

    def _begin(self, answer: Answer) -> None:
        """Returns None; the answer is under way."""
        self._engine.add(answer.requests)
        self._answers.update((request.id, answer) for request in answer.requests)

    def _step(self) -> list[Answer]:
        """The answers that a step of the engine has made longer."""
        grown: dict[Answer, None] = {}
        for output in self._engine.step():
            answer = self._answers.get(output.request.id)
            if answer is None:  # cancelled while its tokens lay ready behind an interrupted step
                continue
            grown[answer] = None
            num_output = answer.take(output)
            if num_output is not None:
                self._engine.stop(output.request, num_output)
            if output.request.finish_reason is not None:
                del self._answers[output.request.id]
        return list(grown)

    def _cancel(self, answer: Answer) -> None:
        """Returns None; what is not over of the answer is cancelled."""
        for request in answer.requests:
            if self._answers.pop(request.id, None) is not None:
                self._engine.cancel(request.id)

    def _reporter(self, what: str) -> Callable[[int, int], None] | None:
        report = self._progress
        return None if report is None else lambda done, total: report(what, done, total)


def scores_of(output: RequestOutput) -> np.ndarray:
    """float32 `[T - 1]`: the prompt's log-probabilities in the answer to `SCORING`."""
    return np.array([one.logprob for one in output.prompt_logprobs or () if one], np.float32)


def _tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with the weights."""
    metadata = checkpoint.reader.metadata
    # An Orbax folder keeps the form of tokenizer that its source had.
    if checkpoint.path.is_file() or "tokenizer.ggml.model" in metadata:
        return tokenizer_from_gguf(metadata)
    return load_tokenizer(checkpoint.path)
