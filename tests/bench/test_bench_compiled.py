"""What is read of a compiled program, of programs of which it is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.bench.compiled import bytes_of, compile_for, read_program


class Text:
    """A compiled program of that text."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text

    def memory_analysis(self):
        return jax.jit(lambda x: x).lower(0).compile().memory_analysis()


SPOKEN = """\
HloModule jit_step, is_scheduled=true

%body.1 (carry: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %sum = (f32[8,16]{1,0:T(8,128)}, f32[]) all-reduce(%a, %b), to_apply=%add
  %ahead = (bf16[64]{0}, bf16[512]{0}) all-gather-start(%c), dimensions={0}
  %done = bf16[512]{0} all-gather-done(%ahead)
  %moved = (s4[32,16]{1,0:T(8,128)S(1)}, s4[32,16]{1,0}, u32[]) copy-start(%d)
  ROOT %called = bf16[8,16]{1,0} custom-call(%e), custom_call_target="tpu_custom_call"
}

ENTRY %main.2 (x: pred[3]) -> pred[3] {
  %x = pred[3]{0} parameter(0)
  %order = token[] after-all()
  %loop = (s32[], bf16[8,16]{1,0}) while(%init), condition=%cond.3, body=%body.1
  ROOT %turned = pred[3]{0} transpose(%x), dimensions={0}
}
"""


def test_the_text_is_read_line_by_line():
    program = read_program(Text(SPOKEN))
    assert program.loops == {"body.1"}
    operations = [(one.operation, one.computation, one.num_bytes) for one in program.results]
    assert operations == [
        ("all-reduce", "body.1", 8 * 16 * 4 + 4),
        ("all-gather", "body.1", 1024),
        ("all-gather-done", "body.1", 1024),
        ("copy-start", "body.1", 256),
        ("custom-call", "body.1", 256),
        ("parameter", "main.2", 3),
        ("after-all", "main.2", 0),
        ("while", "main.2", 4 + 256),
        ("transpose", "main.2", 3),
    ]
    assert [one.operation for one in program.exchanges()] == ["all-reduce", "all-gather"]
    assert [one.operation for one in program.moved(4)] == ["copy-start"]
    assert [one.operation for one in program.moved(3)] == ["copy-start", "transpose"]
    (kernel,) = program.kernels()
    assert [one.computation for one in program.results].count(kernel.computation) == 5


def test_a_donated_argument_is_an_alias_and_a_second_use_a_copy():
    def step(cache, row):
        return cache.at[3].set(row)

    cache = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    row = jax.ShapeDtypeStruct((256,), jnp.float32)
    in_place = compile_for("cpu", jax.jit(step, donate_argnums=0), cache, row)
    assert in_place.alias_bytes == bytes_of(cache) == 2**20
    assert in_place.argument_bytes == 2**20 + 1024
    assert in_place.temp_bytes < 2**10
    assert not in_place.moved(2**20)
    copied = compile_for("cpu", jax.jit(step), cache, row)
    assert copied.alias_bytes == 0
    assert [one.arrays for one in copied.moved(2**20)] == [(("f32", (1024, 256)),)]
