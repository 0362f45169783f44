"""What the compiler for TPUs makes of a decode step over a mesh; no device is needed."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from jaxinfer import ParallelConfig
from jaxinfer.models import NAMED_SHAPES
from scripts import bench_sharded

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu"),
]
LLAMA = NAMED_SHAPES["llama-3-8b"]
MB = 1e6


def check(config, topology, attention_bytes, **sizes):
    """One decode step without the sampler, over 8 shards of the model."""
    devices = bench_sharded.tpu_devices(topology)
    step = bench_sharded.compile_decode(
        config, ParallelConfig(model=8), devices, sampling=False, **sizes
    )
    memory = step.compiled.memory_analysis()
    inside, outside = bench_sharded.collectives(step.compiled)
    assert inside == {"all-reduce": 2}, "in the loop over the layers"
    assert outside == {"all-reduce": 1}, "of the embedding"
    assert memory.alias_size_in_bytes >= step.cache_bytes
    assert memory.temp_size_in_bytes <= 2 * MB + attention_bytes
    return step


def test_a_small_step(capfd):
    small = dataclasses.replace(LLAMA, hidden_size=1024, intermediate_size=2048, vocab_size=4096)
    step = check(small, "v5e:2x4", 0, num_rows=8, context=256)
    # A token's keys and values in all layers, in bfloat16, on one of 8 devices.
    assert step.cache_bytes == 8 * 256 * small.kv_bytes_per_token("bfloat16") // 8


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_llama_3_8b(topology):
    """32 rows of 2048 tokens. What attention reads for a layer may be copied; nothing else may."""
    sizes = dict(num_rows=32, context=2048)
    device = bench_sharded.tpu_devices(topology)[0]
    step = check(LLAMA, topology, bench_sharded.attention_temp(LLAMA, 8, device, **sizes), **sizes)
    assert step.cache_bytes == 1_073_741_824
    gathered = "bf16[32,64,32,256]"  # of each row its pages, of one layer
    assert set(bench_sharded.large_copies(step.compiled, 8 << 20)) <= {gathered}


@pytest.mark.slow
def test_the_sampler_gathers_no_logits():
    devices = bench_sharded.tpu_devices("v6e:2x4")
    step = bench_sharded.compile_decode(LLAMA, ParallelConfig(model=8), devices)
    _, outside = bench_sharded.collectives(step.compiled)
    assert outside["all-gather"] <= 1, "128 candidates of each shard"
    columns = 32 * LLAMA.vocab_size // 8 * 4  # bytes of the logits on a device
    assert step.compiled.memory_analysis().temp_size_in_bytes <= 6 * columns
