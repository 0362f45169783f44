"""`AsyncLLM`: text in, text out, for asyncio: a thread of its own does the work of one engine."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxinfer.compute.decoder import Params
from jaxinfer.config import require
from jaxinfer.engine.answer import Answer
from jaxinfer.engine.delivery import Delivery, wake
from jaxinfer.engine.frontend import SCORING, Frontend, Messages, Prompt, scores_of
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.requests import require_new
from jaxinfer.engine.worker import Worker
from jaxinfer.sampling_params import SamplingParams
from jaxinfer.text import encode_chat

T = TypeVar("T")
MOST_NAMED = 8  # requests that an error names


class AsyncLLM(Frontend):
    """A loaded model that streams its answers to any number of tasks at once.

        async with AsyncLLM("smollm2-135m", compile_ahead=True) as llm:
            async for output in llm.generate("Once upon a time"):
                print(output.outputs[0].text_delta, end="")

    Its methods may be called in any event loop, of any thread. A request is checked where it is
    made, and one that cannot run raises ValueError there, at once. If a step of the engine fails,
    every stream ends with its error, and every later call raises it.
    """

    def __init__(
        self,
        model: str,
        *,
        max_waiting: int | None = None,
        step_timeout_s: float = 300.0,
        **options: Any,
    ):
        """Loads the model, here and now, as `LLM` does: in a running event loop, use
        `await asyncio.to_thread(AsyncLLM, ...)`.

        Args:
            max_waiting: most requests that may have come and not yet run; more are refused with
                `asyncio.QueueFull`. None: any number.
            step_timeout_s: when a step takes longer, every stream ends with a RuntimeError, and
                this is of no use any more. A step compiles what it is the first to need, unless
                `compile_ahead`: allow for it.
            options: those of `LLM`; `progress` is not told of generating.
        """
        require(
            max_waiting is None or max_waiting >= 1,
            f"max_waiting={max_waiting} lets no request in. Use at least 1, or None for no limit.",
        )
        require(
            0 < step_timeout_s <= threading.TIMEOUT_MAX,
            f"step_timeout_s={step_timeout_s} must be above 0 and at most "
            f"{threading.TIMEOUT_MAX:g}. Choose more than the longest step takes.",
        )
        super().__init__(model, **options)
        self._max_waiting, self._step_timeout_s = max_waiting, step_timeout_s
        self._lock = threading.Lock()
        # Of what is under way, by the name of each request; guarded by the lock.
        self._deliveries: dict[str, Delivery] = {}
        self._worker = Worker(
            lambda: self._deliver(self._step()),
            lambda: self._engine.has_work,
            on_failure=self._fail,
            stuck=self._stuck,
            timeout_s=step_timeout_s,
        )

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *exception) -> None:
        await self.close()

    async def close(self) -> None:
        """Returns None; every request under way has ended as "cancelled", and so has the thread.

        Without it the thread stays, and with it the model, until the process ends.
        """
        closed = RuntimeError("This AsyncLLM is closed. Make a new one.")
        with self._lock:
            ended = self._worker.stop(self._end_all, closed)
        await asyncio.wrap_future(ended)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncStream:
        """The outputs of one request, which is under way from now on, as they grow.

        Each is a snapshot of all so far, with what came since the one before as its deltas: who
        looks seldom gets more at a time. Leaving the stream cancels the request, see `AsyncStream`.

        Args:
            prompt: a text or token ids. A text is encoded in the caller's thread.
            request_id: a name that no request under way has; None: one of its own.
            priority: by the engine's policy "priority" a lower one goes first.

        Raises:
            ValueError: the request can never run.
            asyncio.QueueFull: `max_waiting` requests wait.
            Exception: of the step that failed. RuntimeError: this was closed.
        """
        ids = self._encode(prompt)
        return self._submit(ids, prompt, params, request_id=request_id, priority=priority)

    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template: Any,
    ) -> AsyncStream:
        """`generate` for a conversation, through the model's chat template, which `template` goes
        on to.
        """
        ids = encode_chat(self.tokenizer, messages, **template)
        return self._submit(ids, None, params, request_id=request_id, priority=priority)

    async def score(self, token_ids: Prompt) -> np.ndarray:
        """float32 `[T - 1]`: the log-probability of each token given those before it, the first
        left out. See `LLM.score`.
        """
        stream = self._submit(self._encode_scored(token_ids), token_ids, SCORING)
        output = await anext(stream)  # its one token is there, and so are all scores
        if output.outputs[0].finish_reason == "cancelled":
            raise RuntimeError(
                "This AsyncLLM was closed before the score was there. Make a new one."
            )
        return scores_of(output)

    async def abort(self, request_id: str) -> None:
        """Returns None; a request of that name is over, its pages are free.

        Its stream ends with one more output, "cancelled", that has all there is of it.
        """

        def end() -> None:
            delivery = self._deliveries.get(request_id)
            if delivery is not None:
                self._end(delivery)

        await self._between_steps(end)

    async def metrics(self) -> dict[str, Any]:
        """What was counted between two steps: see `LLM.metrics`."""
        return await self._between_steps(self._metrics)

    async def update_params(self, params: Params) -> None:
        """Returns None once later steps use `params`: see `LLM.update_params`.

        The change falls between two steps: of a request under way, each token is of the old
        weights or of the new, and none of the new comes before one of the old.
        """
        await self._between_steps(lambda: self._engine.update_params(params))

    async def check_integrity(self) -> None:
        """Returns None if every page and row is accounted for between two steps: see `Engine`."""
        await self._between_steps(self._engine.check_integrity)

    async def _between_steps(self, function: Callable[[], T]) -> T:
        """What `function` returns, called by the engine's thread between two steps."""
        return await asyncio.wrap_future(self._worker.call(function))

    def _submit(
        self,
        ids: Sequence[int],
        prompt: Prompt | None,
        params: SamplingParams | None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncStream:
        name = uuid.uuid4().hex if request_id is None else request_id
        answer = self._ask(ids, prompt, params, request_id=name, priority=priority)
        delivery = Delivery(answer)
        with self._lock:
            self._worker.check()
            self._require_room(answer)
            self._deliveries.update((request.id, delivery) for request in answer.requests)
            self._worker.post(lambda: self._begin(answer))
        return AsyncStream(self, delivery)

    def _require_room(self, answer: Answer) -> None:
        """Returns None if names and number of the requests under way let `answer` in."""
        require_new(answer.requests, self._deliveries)
        if self._max_waiting is None:
            return
        num_waiting = sum(delivery.is_waiting for delivery in self._under_way())
        if num_waiting >= self._max_waiting:
            raise asyncio.QueueFull(
                f"{num_waiting} requests wait already, and max_waiting={self._max_waiting}. "
                "Ask again later, or raise max_waiting."
            )

    def _under_way(self) -> list[Delivery]:
        """One for each prompt, in the order in which they came."""
        return list(dict.fromkeys(self._deliveries.values()))

    def _fail(self, error: BaseException) -> None:
        """Returns None; no stream brings more than it has; they ask the worker for the error."""
        with self._lock:
            wake([delivery.fail() for delivery in self._under_way()])

    def _stuck(self, seconds: float, place: str) -> RuntimeError:
        """The error of a step that has not come back."""
        with self._lock:
            under_way = self._under_way()
        running = [d.answer.requests[0].id for d in under_way if not d.is_waiting]
        names = running[:MOST_NAMED] + ["..."] * (len(running) > MOST_NAMED)
        return RuntimeError(
            f"A step has taken {seconds:.1f} s, more than step_timeout_s={self._step_timeout_s:g}, "
            f"and stands in {place} (running: {', '.join(names) or 'no request'}; waiting: "
            f"{len(under_way) - len(running)}). Make a new AsyncLLM; if a step compiles for so "
            "long, use compile_ahead=True or raise step_timeout_s."
        )

    # What follows runs in the engine's thread alone.

    def _deliver(self, answers: Iterable[Answer]) -> None:
        """Returns None; who waits for one of the answers gets what it has so far."""
        waiters = []
        for answer in answers:
            delivery, is_last = self._deliveries[answer.requests[0].id], answer.is_over
            if is_last:  # first, so that who sees the end may use the name again
                with self._lock:
                    for request in answer.requests:
                        del self._deliveries[request.id]
            waiters.append(delivery.put(answer.snapshot(), is_last=is_last))
        wake(waiters)

    def _end(self, delivery: Delivery) -> None:
        """Returns None; what is not over of the request is cancelled."""
        if not delivery.is_over:
            self._cancel(delivery.answer)
            self._deliver([delivery.answer])

    def _end_all(self) -> None:
        for delivery in self._under_way():
            self._end(delivery)


class AsyncStream(AsyncIterator[RequestOutput]):
    """The outputs of one request as they grow, for one task at a time.

    The request is cancelled, and its pages are free after the step that is being made, when the
    stream is closed or dropped (as by leaving an `async for` over it), or when a task that waits
    for its next output is cancelled, as `asyncio.wait_for` does. It then brings nothing more.

    Attributes:
        request_id: what `AsyncLLM.abort` knows it by.
    """

    def __init__(self, llm: AsyncLLM, delivery: Delivery):
        self.request_id = delivery.answer.requests[0].id
        self._llm, self._delivery = llm, delivery

    async def __anext__(self) -> RequestOutput:
        try:
            output = await self._delivery.take()
        except asyncio.CancelledError:
            self._close()
            raise
        if output is None:
            if self._delivery.has_failed and not self._delivery.is_closed:
                self._llm._worker.check()
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Returns None; the request is, or will be after this step, over."""
        self._close()

    def _close(self) -> None:
        delivery, llm = self._delivery, self._llm
        if not (delivery.is_over or delivery.is_closed):
            llm._worker.post(lambda: llm._end(delivery))
        delivery.is_closed = True

    def __del__(self):
        self._close()
