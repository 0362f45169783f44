"""The suite runs on CPU, whatever the machine has; equal programs are compiled once."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import load
from jaxinfer.compute.cutoff import open_cutoff
from jaxinfer.compute.sampling import Distribution

DATA = Path(__file__).parent / "data"
TINY = DATA / "tiny"
TINY_NAMES = sorted(path.parent.name for path in TINY.glob("*/refs.npz"))

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory):
    """JAX's persistent cache, for this run of the suite only."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="session")
def tiny_llama():
    """A random 2-layer Llama (4 heads, 2 kv heads, llama3 rope) and another library's float32
    results.
    """
    model, params = load(DATA / "tiny" / "llama", dtype="float32")
    with np.load(DATA / "tiny" / "llama" / "refs.npz") as refs:
        return SimpleNamespace(model=model, params=params, refs=dict(refs))


@pytest.fixture
def argmax_only(monkeypatch):
    """Greedy sampling alone: the sampler has tests of its own, and takes most of a compile."""

    def argmax(logits_BV, sampling, positions_B, *, logits_hook=None, mesh=None):
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw(logits_BV, sampling, positions_B, *, logits_hook=None, mesh=None):
        best_B = argmax(logits_BV, sampling, positions_B)
        return best_B, Distribution(
            logits_BV, best_B, jnp.max(logits_BV, -1), open_cutoff(logits_BV)
        )

    names = ("jaxinfer.compute.steps", "jaxinfer.compute.generate")
    steps, whole = map(importlib.import_module, names)
    monkeypatch.setattr(steps, "draw", draw)
    monkeypatch.setattr(whole, "sample", argmax)
