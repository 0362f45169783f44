"""Serves requests by transformers' `generate`, batch after batch, and prints when tokens came.

    python scripts/peer_transformers.py < job.json

Needs torch and transformers, and nothing of this project: `bench_peers.py` runs it where those are.
The job has `model` (a folder), `dtype`, `num_threads`, `batch_size` and `requests`, a list of
[prompt ids, output tokens]. The result has, for each request, the seconds from the start of its
batch until each of its tokens; and the seconds, of the clock and of the processor, of them all.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import transformers


class Clock(transformers.StoppingCriteria):
    """Takes the time of each step; a row is over when it has as many tokens as it asked for."""

    def __init__(self, num_output: list[int]):
        self.times_s: list[float] = []
        self._num_output = torch.tensor(num_output)
        self._start_s = time.perf_counter()

    def __call__(self, input_ids, scores, **keywords):
        self.times_s.append(time.perf_counter() - self._start_s)
        return len(self.times_s) >= self._num_output


def serve(model, batch: list[tuple[list[int], int]]) -> list[list[float]]:
    """When each token of each request of the batch came; prompts are padded on the left."""
    longest = max(len(prompt) for prompt, _ in batch)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in batch])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
    clock = Clock([count for _, count in batch])
    with torch.inference_mode():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max(count for _, count in batch),
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
    return [clock.times_s[:count] for _, count in batch]


def main() -> None:
    """Reads the job from stdin and prints the result, both JSON."""
    job = json.load(sys.stdin)
    torch.set_num_threads(job["num_threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=getattr(torch, job["dtype"])
    ).eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # and no end of text
    requests, size = job["requests"], job["batch_size"]
    serve(model, [(prompt[:32], 4) for prompt, _ in requests[:size]])  # warms up
    times, start_s, start_cpu_s = [], time.perf_counter(), time.process_time()
    for first in range(0, len(requests), size):
        times += serve(model, requests[first : first + size])
    result = {
        "times_s": times,
        "duration_s": time.perf_counter() - start_s,
        "cpu_s": time.process_time() - start_cpu_s,
        "num_threads": torch.get_num_threads(),
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
