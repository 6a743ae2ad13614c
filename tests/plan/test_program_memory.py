"""What a program holds at its fullest: as by hand where it is written by hand, and beside the compiler's total."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxscale.plan.program_memory import device_bytes, program_memory


@pytest.mark.parametrize(
    "kind, size",
    [
        ("f32[3,5]", 60),
        ("f32[3,5]{1,0:T(8,128)}", 8 * 128 * 4),
        ("bf16[2,9,130]{2,1,0:T(8,128)(2,1)}", 2 * 16 * 256 * 2),
        ("bf16[2,9,130]{0,2,1:T(8,128)(2,1)}", 9 * 136 * 128 * 2),  # the first dimension is the minor one
        ("f32[130]{0:T(128)}", 256 * 4),
        ("f32[64,64]{1,0:T(8,128)S(1)}", 0),  # not in the device's main memory
        ("pred[7]", 7),
        ("s4[6]", 3),
        ("token[]", 0),
    ],
)
def test_an_arrays_bytes_are_those_of_its_layout(kind, size):
    assert device_bytes(kind) == size


HLO = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, entry_computation_layout={()->()}

%fused (p0: f32[4,100], p1: f32[1,100], p2: s32[]) -> f32[4,100] {
  %p0 = f32[4,100] parameter(0)
  %p1 = f32[1,100] parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[4,100] dynamic-update-slice(%p0, %p1, %p2, %zero), metadata={op_name="jit(step)/jvp(runs/0)/while/body/dynamic_update_slice"}
}

%body (t: (s32[], f32[100], f32[4,100])) -> (s32[], f32[100], f32[4,100]) {
  %t = (s32[], f32[100], f32[4,100]) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[100] get-tuple-element(%t), index=1
  %stack = f32[4,100] get-tuple-element(%t), index=2
  %wide = f32[300] custom-call(%x), custom_call_target="widen", metadata={op_name="jit(step)/jvp(runs/0)/while/body/blocks/0/mlp/up/dot_general"}
  %y = f32[100] custom-call(%wide), custom_call_target="narrow", metadata={op_name="jit(step)/jvp(runs/0)/while/body/blocks/0/mlp/down/dot_general"}
  %row = f32[1,100] bitcast(%x)
  %filled = f32[4,100] fusion(%stack, %row, %i), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[100], f32[4,100]) tuple(%i, %y, %filled)
}

%condition (c: (s32[], f32[100], f32[4,100])) -> pred[] {
  %c = (s32[], f32[100], f32[4,100]) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (w: f32[50], b: f32[100]) -> (f32[50], f32[]) {
  %w = f32[50] parameter(0), metadata={op_name="state.params['embed']['weight']"}
  %b = f32[100] parameter(1), metadata={op_name="batch['tokens']"}
  %start = f32[100] custom-call(%b), custom_call_target="embed", metadata={op_name="jit(step)/jvp(embed)/take"}
  %none = s32[] constant(0)
  %empty = f32[4,100] custom-call(), custom_call_target="AllocateBuffer"
  %carried = (s32[], f32[100], f32[4,100]) tuple(%none, %start, %empty)
  %loop = (s32[], f32[100], f32[4,100]) while(%carried), condition=%condition, body=%body
  %kept = f32[4,100] get-tuple-element(%loop), index=2
  %new = f32[50] custom-call(%kept), custom_call_target="gradient", metadata={op_name="jit(step)/transpose(jvp(embed))/scatter-add"}
  %loss = f32[] custom-call(%new), custom_call_target="sum", metadata={op_name="jit(step)/optimizer/reduce_sum"}
  ROOT %done = (f32[50], f32[]) tuple(%new, %loss)
}
"""  # noqa: E501


@dataclasses.dataclass
class Stats:
    """As `memory_analysis` gives it."""

    argument_size_in_bytes: int = 600
    output_size_in_bytes: int = 204
    alias_size_in_bytes: int = 200
    temp_size_in_bytes: int = 3300
    host_argument_size_in_bytes: int = 0
    host_output_size_in_bytes: int = 0
    host_alias_size_in_bytes: int = 0
    host_temp_size_in_bytes: int = 0


class Written:
    """A compiled program that was written by hand."""

    def as_text(self):
        return HLO

    def memory_analysis(self):
        return Stats()


def test_a_program_written_by_hand_is_counted_as_by_hand():
    """Fullest in the loop: the stream, the stack that the loop fills in place, the feed-forward's inner layer. What the
    loop hands on lies where it came from, and the new weight where the old one was."""
    result = program_memory(Written())
    assert [(b.name, b.shape, b.bytes) for b in result.buffers] == [
        ("runs/0", "f32[4,100]", 1600),
        ("runs/0/blocks/0/mlp/up", "f32[300]", 1200),
        ("batch/tokens", "f32[100]", 400),
        ("runs/0/blocks/0/mlp/down", "f32[100]", 400),
        ("params/embed/weight", "f32[50]", 200),
    ]
    assert "while/body" in result.moment
    assert result.total == 600 + 204 - 200 + 3300
    assert result.groups == {"parameters": 200, "other arguments": 400, "activations": 3200, "between buffers": 104}


def test_what_is_found_is_what_a_compiler_allocates():
    """Of a scanned network with its gradient, to a few per cent."""

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

    w, x = jax.ShapeDtypeStruct((6, 64, 64), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32)
    result = program_memory(jax.jit(jax.grad(loss)).lower(w, x).compile())
    seen = sum(b.bytes for b in result.buffers)
    assert seen > 2 * 6 * 64 * 64 * 4 + 6 * 512 * 64 * 4  # weights and gradients, and each layer's activation
    assert abs(result.groups["between buffers"]) < 0.15 * result.total
