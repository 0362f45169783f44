"""The comparison with and without a KV cache: its counts are those of what the model is given."""

import jax
import numpy as np
import pytest

import jaxinfer
from jaxinfer.compute import Decoder
from scripts import bench_kv_cache


@pytest.fixture
def seen(tiny_llama, monkeypatch):
    """(tokens, tokens with padding) of every run of the model that the script loads, in order."""
    calls = []

    class CountingDecoder(Decoder):
        def __call__(self, params, cache, tokens_BT, *where):
            query_lens_B, padded = where[-1], tokens_BT.size
            jax.debug.callback(lambda n: calls.append((int(n), padded)), query_lens_B.sum())
            return super().__call__(params, cache, tokens_BT, *where)

    model = CountingDecoder(tiny_llama.model.config)
    monkeypatch.setattr(jaxinfer, "load", lambda name, dtype: (model, tiny_llama.params))
    return calls


def test_counts_and_tokens(seen, capsys, tmp_path):
    path = tmp_path / "plot.png"
    args = ["--prompt-len", "5", "--lengths", "4", "--plot", str(path)]
    assert bench_kv_cache.main(args) == 0
    jax.effects_barrier()
    cached, plain = [(5, 5), (1, 1), (1, 1), (1, 1)], [(5, 9), (6, 9), (7, 9), (8, 9)]
    # A run of each before the clock starts, and one of each on the clock.
    assert sorted(seen) == sorted(2 * (cached + plain))
    numbers = capsys.readouterr().out.splitlines()[3].replace("|", " ").split()
    totals = [sum(n for n, _ in calls) for calls in (cached, plain)]
    assert numbers[:5] == ["4", *map(str, totals), str(sum(n for _, n in plain)), "3.2"]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_tokens_without_the_cache_fail(seen, capsys, monkeypatch):
    answers = [1.0, 2.0], [np.array([3, 4]), np.array([3, 5])]
    monkeypatch.setattr(bench_kv_cache, "measure", lambda *args: answers)
    assert bench_kv_cache.main(["--lengths", "2"]) == 1
    assert capsys.readouterr().out.endswith("THE TOKENS DIFFER.\n")
