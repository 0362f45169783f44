"""What the TPU compiler makes of whole steps over a mesh; no device is needed."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer import ParallelConfig
from jaxinfer.bench.compiled import tpu_devices
from jaxinfer.models import NAMED_SHAPES
from scripts import bench_sharded

from ..conftest import needs_tpu_compiler

pytestmark = [pytest.mark.aot, needs_tpu_compiler]

LLAMA = NAMED_SHAPES["llama-3-8b"]
SMALL = dataclasses.replace(LLAMA, hidden_size=1024, intermediate_size=2048, vocab_size=4096)
LOGIT_BYTES = 32 * LLAMA.vocab_size // 8 * 4  # of 32 rows on one of 8 devices


def step_of(topology, config=LLAMA, model=8, **options):
    return bench_sharded.make_step(
        config, ParallelConfig(model=model), tpu_devices(topology), **options
    )


def assert_lean(step, temp_bytes):
    """In place, the weights and the cache once each, two sums over the devices a layer."""
    program = step.compile()
    (kernel,) = program.kernels()
    exchanges = program.exchanges()
    assert {one.operation for one in exchanges} == {"all-reduce"}
    assert kernel.computation in program.loops
    assert [one.computation for one in exchanges].count(kernel.computation) == 2, "of a layer"
    assert len(exchanges) == 3, "and the embedding"
    assert step.is_in_place(program)
    held = step.weight_bytes + step.cache_bytes + step.state_bytes
    assert program.argument_bytes <= 1.02 * held
    assert program.temp_bytes <= temp_bytes
    # Those that are started ahead are activations, from memory to VMEM or back.
    assert not [one for one in program.moved(bench_sharded.LARGE) if one.operation != "copy-start"]


def test_a_small_step():
    step = step_of("v5e:2x4", SMALL, num_rows=8, context=256)
    # A token's keys and values in all layers, in bfloat16, on one of 8 devices.
    assert step.cache_bytes == 8 * 256 * SMALL.kv_bytes_per_token("bfloat16") // 8
    assert_lean(step, 2**20)


def test_three_chips_of_eight():
    """As SmolLM2 wants it, whose three kv heads can be split by nothing else."""
    config = dataclasses.replace(NAMED_SHAPES["smollm2-135m"], num_layers=2)
    step = step_of("v6e:2x4", config, model=3)
    program = step.compile()
    assert len(program.exchanges()) == 3
    assert step.is_in_place(program)


@pytest.mark.parametrize("topology", ["v5e:2x4", pytest.param("v6e:2x4", marks=pytest.mark.slow)])
def test_decode(topology):
    """Llama 3 8B, 32 rows of one token with 2048 tokens of context."""
    step = step_of(topology)
    assert step.cache_bytes == 1_073_741_824
    assert_lean(step, 2 * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_prefill(topology):
    """A chunk of 512 tokens of one prompt."""
    assert_lean(step_of(topology, num_rows=1, num_tokens=512), 10 * 2**20)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x4", "v6e:2x4"])
def test_the_sampler_gathers_no_logits(topology):
    step = step_of(topology, sampler=True)
    program = step.compile()
    assert step.is_in_place(program)
    # Shards tell each other 128 candidates of each row, as pairs of a value and an id.
    gathered = [one for one in program.exchanges() if one.operation != "all-reduce"]
    assert [one.num_bytes for one in gathered] == [8 * 32 * 128 * (4 + 4)]
    assert max(one.num_bytes for one in program.exchanges()) < LOGIT_BYTES
    assert program.temp_bytes <= 3.5 * LOGIT_BYTES


@pytest.mark.slow
def test_unrolled_layers_are_what_a_tpu7x_wants():
    """Scanned, it re-lays the stacked weights each step, 1.6 GB of them; unrolled, no weight."""
    step = step_of("tpu7x:2x2x1", stacked=False)
    program = step.compile()
    assert len(program.kernels()) == LLAMA.num_layers
    assert step.is_in_place(program)
    assert program.temp_bytes <= 32 * 2**20
    held = step.weight_bytes + step.cache_bytes + step.state_bytes
    assert program.argument_bytes <= 1.02 * held


def test_the_table(capsys, monkeypatch):
    """Of a model that fits, and of one that does not: that has its bytes all the same."""
    huge = dataclasses.replace(SMALL, intermediate_size=10**6)
    shapes = {"small": SMALL, "huge": huge}
    monkeypatch.setattr(bench_sharded, "named_shape", shapes.__getitem__)
    sizes = ["--num-rows", "16", "--context", "256", "--topology", "v5e:2x4"]
    assert bench_sharded.main(["--shapes", "small,huge", "--model", "8", *sizes]) == 0
    *_, small, large = capsys.readouterr().out.splitlines()
    counts = small.split("|")[-1].split()
    assert counts[:2] == ["2", "1"]
    assert int(counts[2]) > 0
    assert large.split("|")[-1].strip() == "does not fit"
    feed_forward = 3 * huge.hidden_size * huge.intermediate_size * huge.num_layers
    megabytes = float(large.split("|")[1].split()[0])
    assert 1 <= megabytes / (2 * feed_forward / 8e6) <= 1.1
