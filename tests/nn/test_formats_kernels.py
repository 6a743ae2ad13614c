"""Products with stored weights by the kernel: on one device and sharded, against the product with the dense kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.nn import project
from jaxscale.nn.formats import FORMATS, StoredWeight
from jaxscale.nn.formats.kernels import MOST_ROWS, kernel_product
from jaxscale.parallel import Arithmetic
from jaxscale.plan import compile_for
from pallas_kernels import tiles
from pallas_kernels.dispatch import JAX_VERSION, choosing, interpreted, on_device
from tests.truth.long import short

RNG = np.random.default_rng(0)
CASES = {
    "outputs of heads": ((256, 8, 32), ("embed", "heads", "head_dim"), (0,)),
    "inputs of heads": ((8, 128, 256), ("heads", "head_dim", "embed"), (0, 1)),
    "mlp down": ((1024, 128), ("mlp", "embed"), (0,)),
}


def made(name, case):
    shape, axes, summed = CASES[case]
    kernel = jnp.asarray(RNG.normal(size=shape) * 0.1, jnp.float32)
    return FORMATS[name][0].encode(kernel, summed), axes, summed


def by_kernel(x, weight, axes, summed):
    names = [weight.names("", a.shape, axes) for a in jax.tree.leaves(weight)]
    y = kernel_product(x, weight, axes, names, summed, jnp.float32, jnp.float32, implementation="mosaic_tpu")
    assert y is not None
    return y


@pytest.mark.parametrize(
    ("name", "case", "mesh", "backward"),
    short(
        1,
        [
            ("uint4", "mlp down", "fsdp=2,tensor=2", False),
            ("mxfp4", "inputs of heads", None, True),
            pytest.param("nf4_double", "mlp down", "tensor=2", True, marks=pytest.mark.long),
            pytest.param("int4", "outputs of heads", "fsdp=2,tensor=2", True, marks=pytest.mark.long),
        ],
    ),
)
def test_the_kernels_product_is_that_of_the_dense_kernel_on_every_layout(name, case, mesh, backward):
    weight, axes, summed = made(name, case)
    rest = tuple(d for d in range(len(axes)) if d not in summed)
    over = rest if backward else summed
    x = jnp.asarray(RNG.normal(size=(4, 3, *(weight.shape[d] for d in over))), jnp.float32)
    want = np.tensordot(np.asarray(x, np.float64), np.asarray(weight.dense(), np.float64), (range(2, x.ndim), over))
    with interpreted(), tiles.trying("stored_matmul", {"rows": 256, "columns": 128}):
        if mesh is None:
            got = jax.jit(lambda x, w: by_kernel(x, w, axes, over))(x, weight)
        else:
            with js.Layout(mesh):
                got = jax.jit(lambda x, w: by_kernel(x, w, axes, over))(x, weight)
    assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize(
    ("shape", "axes", "summed", "rows"),
    [
        ((512, 256), ("vocab", "embed"), (1,), 8),  # packed along the last dimension
        ((256, 512), ("embed", "mlp"), (0,), MOST_ROWS + 1),
    ],
    ids=["head", "rows"],
)
def test_what_has_no_kernel_is_left_to_the_dense_kernel(shape, axes, summed, rows):
    weight = FORMATS["int4"][0].encode(jnp.ones(shape), summed)
    names = [weight.names("", a.shape, axes) for a in jax.tree.leaves(weight)]
    x = jnp.ones((rows, shape[summed[0]]))
    assert kernel_product(x, weight, axes, names, summed, jnp.float32, jnp.float32, "mosaic_tpu") is None


@pytest.mark.skipif(JAX_VERSION < (0, 11), reason="kernels for Hopper need jax 0.11")
@pytest.mark.parametrize(
    ("kind", "rows", "ran"),
    [("NVIDIA H200", 8, ["mosaic_gpu"]), ("NVIDIA H200", 129, []), ("NVIDIA A100-SXM4-80GB", 8, [])],
)
def test_hopper_gpus_multiply_few_rows_by_a_kernel(kind, rows, ran):
    weight = jax.eval_shape(lambda k: FORMATS["int4"][0].encode(k, (0,)), jax.ShapeDtypeStruct((1024, 512), "float32"))
    x = jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16)
    with on_device(kind), choosing() as made:
        jax.eval_shape(lambda x, w: project(x, w, ("mlp", "embed"), (0,), Arithmetic.cast("bfloat16")), x, weight)
    assert [choice.implementation for choice in made.values()] == ran


@pytest.mark.tpu_aot
@pytest.mark.parametrize("mesh", ["tensor=4"])
def test_a_product_on_tpus_runs_the_kernel_and_has_no_dense_kernel(mesh):
    layout, shape, axes = js.Layout(mesh), (4096, 8192), ("mlp", "embed")
    weight = jax.eval_shape(lambda k: FORMATS["int4"][0].encode(k, (0,)), jax.ShapeDtypeStruct(shape, jnp.float32))
    x = jax.ShapeDtypeStruct((8, 1, shape[0]), jnp.bfloat16)

    def multiply(w: StoredWeight, x: jax.Array) -> jax.Array:
        return project(x, w, axes, (0,), Arithmetic.cast("bfloat16"))

    text = compile_for(multiply, "v5e:2x2", weight, x, layout=layout).as_text()
    assert "tpu_custom_call" in text
    rows = shape[0] // (4 if mesh == "tensor=4" else 1)
    assert f"[{rows},{shape[1]}]" not in text
