"""compile_for: compiling for hardware that this machine does not have."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError, LayoutError
from jaxscale.models import Transformer
from jaxscale.parallel import sharded_op
from jaxscale.plan import compile_for, compile_step, topology_devices
from tests.truth.errors import raises_saying


def _matmul(x, w):
    return x @ w


SHAPES = (jax.ShapeDtypeStruct((512, 512), jnp.bfloat16), jax.ShapeDtypeStruct((512, 512), jnp.bfloat16))


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", ["v5e:2x2", "v6e:2x2"])
def test_a_program_compiles_for_a_tpu(topology):
    compiled = compile_for(_matmul, topology, *SHAPES)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 512 * 512 * 2


@pytest.mark.tpu_aot
def test_the_layout_in_force_is_that_of_the_topology():
    def rows(x):
        return sharded_op(lambda x: jax.nn.softmax(x, -1), x, axes=(("batch", None),), out_axes=("batch", None))

    layout = js.Layout("data=4")
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    compiled = compile_for(rows, "v5e:2x2", x, layout=layout)
    assert compiled.output_shardings.spec[0] == "data"
    assert len(compiled.output_shardings.device_set) == 4


@pytest.mark.tpu_aot
def test_a_training_step_compiles_for_a_slice_that_is_not_here():
    config = js.TrainConfig(
        model=Transformer.Config(depth=2, width=256, heads=2, vocab=256), layout=js.Layout("fsdp=4"),
        batch_size=8, seq_len=64, prompt=None,
    )  # fmt: skip
    compiled = compile_step(config, "v5e:2x2")
    params = sum(i.nbytes for i in jax.tree.leaves(js.step.describe_model(config.model)[1]))
    held = compiled.memory_analysis().argument_size_in_bytes
    assert 0.9 * 3 * params / 4 < held < 1.2 * 3 * params / 4  # parameters and two moments, a quarter each


@pytest.mark.gpu_aot
def test_a_program_compiles_for_a_gpu():
    compiled = compile_for(_matmul, "h200", *SHAPES)
    assert compiled.memory_analysis().argument_size_in_bytes == 2 * 512 * 512 * 2


@pytest.mark.tpu_aot
@pytest.mark.parametrize("mesh", ["data=16,fsdp=16,tensor=4", "data=64,fsdp=4,tensor=4", "pipeline=4,data=64,tensor=4"])
def test_a_mesh_axis_may_be_a_part_of_a_torus(mesh):
    devices = js.Layout(mesh).on(topology_devices("v5p:8x8x16")).device_mesh.devices
    assert len({d.id for d in devices.flat}) == 1024
    places = np.array([d.coords for d in devices.flat]).reshape(*devices.shape, 3)
    assert (np.abs(np.diff(places, axis=-2)).sum(-1) == 1).all(), "neighbours along tensor are one link apart"


@pytest.mark.tpu_aot
def test_a_mesh_larger_than_the_topology_is_refused():
    with raises_saying(LayoutError, "fsdp=16", "needs 16 devices", "there are 4"):
        compile_for(_matmul, "v5e:2x2", *SHAPES, layout=js.Layout("fsdp=16"))


def test_unknown_hardware_is_named():
    with raises_saying(LayoutError, "no hardware 'v9z:2x2'", "v5p"):
        compile_for(_matmul, "v9z:2x2", *SHAPES)


def test_a_run_without_a_layout_cannot_be_laid_out():
    with raises_saying(ConfigError, "layout=None"):
        compile_step(js.TrainConfig(model=Transformer.Config(vocab=256), layout=None), "v5e:2x2")
