"""What attention moves: two algorithms run on a machine that counts, and our kernels' own block index maps."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from experiments.calculators.attention_io import Machine, Traffic, flash, gpu_traffic, needed, small_cache, tpu_traffic
from jaxscale.errors import ConfigError
from pallas_kernels.dispatch import Target
from pallas_kernels.flash_attention.inputs import Inputs, Score
from pallas_kernels.flash_attention.masks import Mask, Tokens
from pallas_kernels.flash_attention.tpu_backward import backward
from pallas_kernels.flash_attention.tpu_forward import forward
from pallas_kernels.flash_attention.tpu_steps import Cut
from tests.truth.errors import raises_saying

N, D = 32, 16
TPU = Target("TPU v5 lite", "tpu")


def _arrays(seed=0):
    return np.random.default_rng(seed).normal(size=(3, N, D))


def _dense(q, k, v):
    weights = np.exp(q @ k.T)
    return weights / weights.sum(1, keepdims=True) @ v


def _moved(algorithm, memory):
    machine = Machine(memory)
    np.testing.assert_allclose(algorithm(machine, *_arrays()), _dense(*_arrays()), rtol=1e-12)
    assert machine.most <= memory
    assert machine.held == 0
    return machine.moved


def test_both_algorithms_move_what_is_counted_by_hand():
    # 115 numbers hold 2 rows: (115 - 16) // 35; 16 times 32 keys and values, and queries and outputs once.
    assert _moved(flash, 115) == 16 * 32 * 2 * D + 2 * N * D
    # 60 numbers make tiles of 6 x 6: 6 of them a side (6, 6, 6, 6, 6, 2). Scores: columns of q and k for each of 36,
    # scores, and 4 rows of statistics for each; then scores and values for 6 x 3 tiles of the output, and 2 rows each.
    scores = 6 * 2 * N * D + N * N + 6 * 4 * N
    outputs = 3 * N * N + 6 * N * D + N * D + 3 * 2 * N
    assert _moved(small_cache, 60) == scores + outputs


def test_the_small_cache_algorithm_wins_below_d_squared():
    assert _moved(small_cache, D * D // 2) < _moved(flash, D * D // 2)
    assert _moved(small_cache, D * D // 4) < _moved(flash, D * D // 4) / 2
    assert _moved(flash, D * D) < _moved(small_cache, D * D)


def test_what_is_needed_changes_over_at_d_squared():
    assert needed(N, D, D * D) == N * N
    assert needed(N, D, 4 * D * D) == N * N / 4
    assert needed(N, D, D * D // 4) == 2 * N * N


def test_a_memory_that_holds_too_little_is_said():
    with raises_saying(ConfigError, "51", "50"):
        flash(Machine(50), *_arrays())
    with raises_saying(ConfigError, "4 numbers"):
        small_cache(Machine(4), *_arrays())
    assert _moved(small_cache, 5) > 0


def _cut(n, tile, d):
    return Cut(Mask(), 1, n, n, 1, 1, tile, tile, segments=False, positions=False), d, d


@pytest.mark.parametrize("tile", [128, 256, 512])
def test_the_kernels_tiles_follow_n_squared_d_squared_over_m(tile):
    """Moved, as a multiple of N^2 d^2 / M: the same constant whatever N, d and M, where tiles are as wide as heads."""
    for n, d in itertools.product((16384, 32768), (tile // 2, tile)):
        traffic = tpu_traffic(*_cut(n, tile, d))
        constant = traffic.moved / needed(n, d, traffic.held)
        # 2 N^2 d / tile moved, and tile (4 d + tile) held
        assert constant == pytest.approx(2 * (4 + tile / d), rel=0.05)


def test_causal_attention_moves_half():
    whole, causal = (
        gpu_traffic(Mask(causal=c), b=1, s=8192, t=8192, h=1, d=64, dv=64, keys=128) for c in (False, True)
    )
    assert whole.read == 8192 * 64 + 64 * 8192 * 128
    assert causal.read == 8192 * 64 + 64 * 65 // 2 * 128 * 128


# ---- against the program


def _evaluate(jaxpr, consts, args):
    """A jaxpr's outputs; arrays stand for the references of which it reads one number at a time."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda v: v.val if isinstance(v, Literal) else values[v]  # noqa: E731
    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        out = operands[0][operands[1]] if eqn.primitive.name == "get" else eqn.primitive.bind(*operands, **eqn.params)
        values |= dict(zip(eqn.outvars, out if eqn.primitive.multiple_results else [out], strict=True))
    return [read(v) for v in jaxpr.outvars]


def _place(jaxpr, consts, lists, step):
    return jnp.stack(_evaluate(jaxpr, consts, [*step, *lists]))


def _counted(fn, *arrays, least):
    """Reads and writes of each kernel of a program, by its own block index maps along its own grid."""
    closed = jax.make_jaxpr(fn)(*arrays)
    known = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    result = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name != "pallas_call":
            continue
        mapping = eqn.params["grid_mapping"]
        steps = jnp.asarray(list(itertools.product(*map(range, mapping.grid))), jnp.int32)
        lists = [jnp.asarray(known[v]) for v in eqn.invars[: mapping.num_index_operands]]
        moved = [0, 0]
        for n, block in enumerate(mapping.block_mappings):
            size = math.prod(
                getattr(s, "block_size", s) for s in block.block_shape if isinstance(s, int) or hasattr(s, "block_size")
            )
            if size < least:  # a number for each row
                continue
            maps = block.index_map_jaxpr
            index = functools.partial(_place, maps.jaxpr, maps.consts, lists)
            at = np.asarray(jax.jit(jax.vmap(index))(steps))
            moved[n >= mapping.num_inputs] += size * (1 + int((at[1:] != at[:-1]).any(1).sum()))
        result.append(tuple(moved))
    return result


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_counts_are_those_of_the_kernels_own_index_maps(causal):
    b, s, t, h, kv, d = 2, 2048, 3072, 4, 2, 128
    mask, score = Mask(causal=causal), Score("softmax", d**-0.5, None, 0.0)
    q, k = (jax.ShapeDtypeStruct((b, n, heads, d), jnp.bfloat16) for n, heads in ((s, h), (t, kv)))
    lse = jax.ShapeDtypeStruct((b, s, h), jnp.float32)
    inputs = lambda q, k: Inputs(q, k, k, None, Tokens())  # noqa: E731

    def both(q, k, lse):
        return forward(TPU, inputs(q, k), mask, score), backward(TPU, inputs(q, k), mask, score, q, lse, q, lse)

    cuts = [Cut.of_inputs(TPU, name, inputs(q, k), mask) for name in ("forward", "backward", "backward")]
    ours = [tpu_traffic(c, d, d, own) for c, own in zip(cuts, (None, "keys", "queries"), strict=True)]
    assert [(o.read, o.written) for o in ours] == _counted(both, q, k, lse, least=128 * d)


def test_traffic_adds_up():
    assert Traffic(3, 4, 5).moved == 7
