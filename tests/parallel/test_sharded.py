"""sharded_op: a function of shards gives the result of the whole arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout
from jaxscale.parallel import sharded_op
from tests.truth.errors import raises_saying

AXES = ("batch", "seq", "heads")


def _softmax_rows(x):
    """Independent over all dimensions but the last, like a kernel."""
    return jax.nn.softmax(x, -1)


@pytest.mark.parametrize("mesh", ["data=8", "data=2,tensor=4", "context=2,fsdp=4", "data=1"])
def test_sharded_equals_whole(mesh):
    x = jax.random.normal(jax.random.key(0), (8, 8, 4, 16))
    axes = (*AXES, None)
    with Layout(mesh):
        got = jax.jit(lambda x: sharded_op(_softmax_rows, x, axes=(axes,), out_axes=axes))(x)
    np.testing.assert_allclose(got, _softmax_rows(x), rtol=1e-6)


def test_it_sees_local_arrays_only():
    seen = []
    with Layout("data=2,tensor=4"):
        f = lambda x: (seen.append(x.shape), x)[1]  # noqa: E731
        jax.jit(lambda x: sharded_op(f, x, axes=(AXES,), out_axes=AXES))(jnp.ones((8, 8, 4)))
    assert seen == [(4, 8, 1)]


@pytest.mark.parametrize("mesh", ["pipeline=2,data=4", "pipeline=8"])
def test_inside_another_shard_map_nothing_is_left_to_the_partitioner(mesh):
    # a TPU kernel refuses axes that are left to the partitioner, also of size 1
    seen = []

    def inner(x):
        now = jax.sharding.get_abstract_mesh()
        seen.append(set(now.axis_names) - set(now.manual_axes))
        return x

    with Layout(mesh):
        outer = lambda x: sharded_op(inner, x, axes=(AXES,), out_axes=AXES)  # noqa: E731
        whole = jax.P()
        f = jax.shard_map(outer, in_specs=whole, out_specs=whole, axis_names={"pipeline"}, check_vma=False)
        jax.jit(f)(jnp.ones((8, 8, 4)))
    assert seen == [set()]


def test_without_a_layout_it_is_a_call():
    seen = []
    sharded_op(lambda x: (seen.append(x.shape), x)[1], jnp.ones((8, 8, 4)), axes=(AXES,), out_axes=AXES)
    assert seen == [(8, 8, 4)]


def test_inside_another_shard_map_it_takes_the_axes_that_are_left():
    x = jax.random.normal(jax.random.key(0), (8, 8, 4))
    seen = []

    def inner(x):
        seen.append(x.shape)
        return x + 1

    def outer(x):
        return sharded_op(inner, x, axes=(AXES,), out_axes=AXES)

    with Layout("data=2,tensor=4"):
        spec = jax.P("data")
        f = jax.shard_map(outer, in_specs=spec, out_specs=spec, axis_names={"data"}, check_vma=False)
        np.testing.assert_array_equal(jax.jit(f)(x), x + 1)
    assert seen == [(4, 8, 1)]


def test_gradients_pass_through():
    x = jax.random.normal(jax.random.key(0), (8, 8, 4))
    loss = lambda x: jnp.sum(jnp.sin(sharded_op(jnp.square, x, axes=(AXES,), out_axes=AXES)))  # noqa: E731
    want = jax.grad(loss)(x)
    with Layout("data=2,tensor=4"):
        got = jax.jit(jax.grad(loss))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_several_outputs_have_names_in_their_own_tree():
    with Layout("data=2,tensor=4"):
        f = lambda x, y: {"sum": x.sum(-1) + y, "x": x}  # noqa: E731
        got = jax.jit(
            lambda x, y: sharded_op(f, x, y, axes=(("batch", None), ("batch",)),
                                    out_axes={"sum": ("batch",), "x": ("batch", None)})
        )(jnp.ones((8, 4)), jnp.arange(8.0))  # fmt: skip
    np.testing.assert_array_equal(got["sum"], 4 + np.arange(8.0))


def test_a_dimension_that_does_not_divide_is_named():
    with Layout("data=8"), raises_saying(LayoutError, "the rows", "(6, 4)", "batch"):
        sharded_op(jnp.square, jnp.ones((6, 4)), axes=(("batch", None),), out_axes=("batch", None), name="the rows")


def test_a_misspelt_name_is_refused_with_or_without_a_layout():
    with raises_saying(LayoutError, "'batchh'", "batch"):
        sharded_op(jnp.square, jnp.ones((8, 4)), axes=(("batchh", None),), out_axes=("batch", None))


def test_names_for_another_number_of_arrays_are_refused():
    with raises_saying(LayoutError, "1 arrays and axes for 2", "as (('batch', None)"):
        sharded_op(jnp.square, jnp.ones((8, 4)), axes=("batch", None), out_axes=("batch", None))


def test_a_stack_that_stages_do_not_divide_comes_out_where_it_went_in():
    x, axes = jnp.arange(3 * 8 * 4.0).reshape(3, 8, 4), ("layers", "embed", "mlp")
    with Layout("pipeline=2,data=2", "zero2"):
        got = jax.jit(lambda x: sharded_op(jnp.square, x, axes=(axes,), out_axes=axes, kind="opt_state"))(x)
    np.testing.assert_array_equal(got, x**2)
