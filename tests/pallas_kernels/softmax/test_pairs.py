"""Sums of exponentials as pairs, and merging them on one device and on eight."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from jaxscale.parallel.reductions import sharded_logsumexp
from pallas_kernels.softmax import combine, combine_all, empty, partial
from pallas_kernels.softmax.pairs import pow2, split
from tests.pallas_kernels.softmax.cases import assert_as_exact_as, assert_same, edge_rows, gradient_truth, normal, truth
from tests.truth.long import short


@functools.partial(jax.jit, static_argnums=1)
def _in_two(x: jax.Array, at: int) -> jax.Array:
    return combine(partial(x[:, :at]), partial(x[:, at:])).logsumexp()


@pytest.mark.parametrize("scale", short(2, [1.0, 30.0, 1e4, 1e6]))
def test_a_row_cut_anywhere_adds_up_to_the_row(scale):
    x = normal((6, 101), scale=scale)
    for at in (1, 50, 100):
        assert_as_exact_as(_in_two(x, at), jax.nn.logsumexp(x, axis=-1), truth("logsumexp", x), f"{scale}, {at}")


def test_merging_is_commutative_and_associative_to_rounding():
    a, b, c = (partial(normal((50, 7), seed=i, scale=s)) for i, s in enumerate((1.0, 20.0, 60.0)))
    for one, other in (
        (combine(a, b), combine(b, a)),
        (combine(combine(a, b), c), combine(a, combine(b, c))),
        (combine(combine(a, b), c), combine_all(jax.tree.map(lambda *x: jnp.stack(x), a, b, c))),
    ):
        np.testing.assert_array_equal(one.exponent, other.exponent)
        np.testing.assert_allclose(one.mantissa, other.mantissa, rtol=3e-7)


def test_merging_multiplies_by_powers_of_two_alone():
    a, b = partial(jnp.zeros((1, 3))), partial(jnp.full((1, 3), 20.0))
    want = np.float32(np.float64(a.mantissa) * 2.0 ** float(a.exponent[0] - b.exponent[0]) + np.float64(b.mantissa))
    np.testing.assert_array_equal(combine(a, b).mantissa, want)


def test_the_sum_of_nothing_changes_nothing():
    a = partial(edge_rows()[:4])
    for total in (combine(a, empty((4,))), combine(empty(), a)):
        assert_same(total.logsumexp(), a.logsumexp())
    assert combine(empty(), empty()).logsumexp() == -jnp.inf


def test_infinities_nan_and_huge_inputs_come_out_as_from_jax_nn():
    rows = edge_rows()
    rows = jnp.where(jnp.abs(rows) == jnp.finfo(jnp.float32).max, jnp.sign(rows) * 1e38, rows)
    assert_same(partial(rows).logsumexp(), jax.nn.logsumexp(rows, axis=-1))
    assert_same(combine(partial(rows[:, :1]), partial(rows[:, 1:])).logsumexp(), jax.nn.logsumexp(rows, axis=-1))


def test_a_number_splits_into_a_mantissa_near_one_and_a_whole_exponent():
    x = np.float32(np.concatenate([np.linspace(-120, 120, 4001), [1e4, -3e4, 12345.0]]))
    mantissa, exponent = map(np.float64, split(jnp.asarray(x)))
    assert (exponent == np.round(exponent)).all() and (mantissa > 0.7).all() and (mantissa < 1.43).all()
    # log of both sides, in float64: what the exponent leaves is in the mantissa, to float32's rounding
    np.testing.assert_allclose(np.log(mantissa), np.float64(x) - exponent * np.log(2.0), atol=2e-7)
    n = np.arange(-126, 1)
    np.testing.assert_array_equal(pow2(jnp.asarray(n, jnp.float32)), np.float32(2.0) ** n)
    assert pow2(jnp.float32(-3e38)) == 0


def test_gradients_pass_through_merging_and_are_finite_where_a_part_is_empty():
    x, g = normal((4, 10)), normal((4,), seed=1)
    where = jnp.arange(10) < 6

    def f(x):
        parts = (partial(x, where=where), partial(x, where=~where), partial(x, where=jnp.zeros(10, bool)))
        return (combine(combine(parts[0], parts[2]), parts[1]).logsumexp() * g).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(f))(x), gradient_truth("logsumexp", x, g), rtol=1e-5, atol=1e-7)
    assert not jax.grad(lambda x: partial(x).logsumexp().sum())(jnp.full((2, 3), -jnp.inf)).any()


def by_maximum(x, axis_name):
    """The usual method: first the maximum, then the sum."""
    top = lax.pmax(lax.stop_gradient(jnp.max(x, axis=-1)), axis_name)
    return top + jnp.log(lax.psum(jnp.sum(jnp.exp(x - top[..., None]), axis=-1), axis_name))


@pytest.mark.parametrize(
    ("f", "collectives"),
    [(sharded_logsumexp, ["all-gather"]), (by_maximum, ["all-reduce", "all-reduce"])],
    ids=["pairs", "maximum"],
)
def test_a_sharded_vocabulary_takes_one_collective_as_pairs_and_two_by_its_maximum(f, collectives):
    mesh = jax.make_mesh((8,), ("tensor",), axis_types=(AxisType.Auto,))
    shards, whole = PartitionSpec(None, "tensor"), PartitionSpec()
    mapped = jax.shard_map(
        lambda x: f(x, "tensor"), mesh=mesh, in_specs=shards, out_specs=whole, check_vma=False
    )  # fmt: skip
    x, g = normal((3, 64), scale=20.0).at[0, :8].set(-jnp.inf), normal((3,), seed=1)
    run = jax.jit(lambda x, g: jax.vjp(mapped, x)[1](g)[0])
    compiled = jax.jit(mapped).lower(x).compile()
    assert_as_exact_as(compiled(x), jax.nn.logsumexp(x, axis=-1), truth("logsumexp", x), "value")
    np.testing.assert_allclose(run(x, g), gradient_truth("logsumexp", x, g), rtol=1e-5, atol=1e-7)
    collectives_in_hlo = re.findall(
        r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text()
    )
    assert collectives_in_hlo == collectives
