"""How often a row is read: counted in the programs, twice by the kernel, three times or more by XLA's programs."""

from __future__ import annotations

import itertools
import math
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.aot import compile_kernel
from pallas_kernels.dispatch import Target
from pallas_kernels.gate import TPUS
from pallas_kernels.softmax import tpu

ROWS, COLUMNS, CHUNK = 64, 4096, 512


def moved_by_the_kernel(chunk):
    """How many times the input is copied to VMEM and the output from it: blocks whose index changes along the grid."""

    def softmax(x):
        return tpu._read_twice(Target("TPU v5 lite", "tpu"), "softmax", [x], chunk)

    jaxpr = jax.make_jaxpr(softmax)(jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32))
    (call,) = (e for e in jaxpr.eqns if e.primitive.name == "pallas_call")
    mapping, counts = call.params["grid_mapping"], []
    for block in mapping.block_mappings:
        index = block.index_map_jaxpr
        at = [
            tuple(map(int, jax.core.eval_jaxpr(index.jaxpr, index.consts, *map(jnp.int32, i))))
            for i in itertools.product(*map(range, mapping.grid))
        ]
        copies = 1 + sum(a != b for a, b in itertools.pairwise(at))
        size = math.prod(getattr(n, "block_size", n) for n in block.block_shape)
        counts.append(copies * size / (ROWS * COLUMNS))
    return counts


def moved_by_xla(text, x):
    """How many times the instructions of a compiled program's entry read and write an array of the input's size."""
    entry = re.sub(r"\{[^{}]*\}", "", text[text.index("\nENTRY") :]).splitlines()[2:]  # without layouts
    whole = re.compile(rf"f32\[{x.shape[0]},{x.shape[1]}\]")
    made = {m[1]: m[2] for line in entry if (m := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\S+)", line))}
    reads = writes = 0
    for line in entry:
        op = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*?) ?([\w-]+)\(([^)]*)\)", line)
        if op is None or op[3] in ("parameter", "bitcast", "get-tuple-element", "tuple", "constant"):
            continue
        operands = re.findall(r"%([\w.-]+)", op[4])
        reads += sum(bool(whole.match(made.get(o, ""))) for o in operands)
        writes += len(whole.findall(op[2]))
    return reads, writes


def test_the_kernel_reads_long_rows_twice_and_xla_on_a_cpu_three_times_or_more():
    assert moved_by_the_kernel(CHUNK) == [2, 1]
    x = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
    # maximum, exponentials, sum (one with the exponentials in jax 0.12), quotient of exponentials that were written
    reads, writes = moved_by_xla(jax.jit(jax.nn.softmax).lower(x).compile().as_text(), x)
    assert reads in (3, 4) and writes == 2


@pytest.mark.tpu_aot
def test_xla_reads_long_rows_three_times_on_a_tpu():
    x = jax.ShapeDtypeStruct((256, 2**20), jnp.float32)
    assert moved_by_xla(compile_kernel(jax.nn.softmax, x, topology=TPUS[0]).as_text(), x) == (3, 1)
