"""Compiled programs are kept on disk, the short ones too: a second start compiles nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Prints how many programs JAX looked for on disk in vain, how many it found, and an answer.
START = """
import sys
from collections import Counter
import jax
from jaxinfer import LLM, SamplingParams

seen = Counter()
jax.monitoring.register_event_listener(lambda event, **_: seen.update([event.split("/")[-1]]))
llm = LLM(
    sys.argv[1], dtype="float32", max_model_len=32, max_num_seqs=1, page_size=8,
    prefill_chunk=16, max_window=2, max_logprobs=0,
)
(output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4))
print(seen["cache_misses"], seen["cache_hits"], *output.outputs[0].token_ids)
"""


def start(folder, cache_folder):
    """`(misses, hits, ids)` of a process of its own."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    environment |= {"XDG_CACHE_HOME": str(cache_folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", START, str(folder)]
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    misses, hits, *ids = map(int, done.stdout.split())
    return misses, hits, ids


def test_a_second_process_compiles_nothing(checkpoint, tmp_path):
    misses, hits, ids = start(checkpoint, tmp_path)
    assert misses > 5
    assert start(checkpoint, tmp_path) == (0, misses + hits, ids)
