"""Dispatch: the platform that a program is lowered for decides, and the choice is recorded."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, KernelError, Target
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.flash_attention.gpu_walk import Walk
from pallas_kernels.flash_attention.masks import Visits
from pallas_kernels.softmax import logsumexp


def _nowhere(target: Target, **case) -> str | None:
    return None


def _toy(supported=_nowhere) -> tuple[Implementation, ...]:
    """Return three implementations that multiply by different factors."""
    times = lambda k: lambda target, x, **case: x * k  # noqa: E731
    return (
        Implementation("mosaic_tpu", ("tpu",), supported, times(3.0)),
        Implementation("mosaic_gpu", ("cuda",), supported, times(5.0)),
        Implementation("xla", (), _nowhere, times(2.0)),
    )


@pytest.fixture(autouse=True)
def empty_record():
    dispatch.forget()


def _trace(ways, case):
    """Dispatch without running: the device need not exist."""
    jax.eval_shape(lambda x: dispatch.dispatch("toy", ways, (x,), case), jax.ShapeDtypeStruct((4,), jnp.float32))


def _factor(text: str) -> set[str]:
    return {k for k in ("2.0", "3.0", "5.0") if f"dense<{k}" in text}


@pytest.mark.parametrize("platform, factor", [("cpu", "2.0"), ("tpu", "3.0"), ("cuda", "2.0")])
def test_the_lowering_platform_chooses(platform, factor):
    with dispatch.on_device("TPU v5 lite"):
        f = jax.jit(lambda x: dispatch.dispatch("toy", _toy(), (x,), {}))
        text = f.trace(jax.ShapeDtypeStruct((4,), jnp.float32)).lower(lowering_platforms=(platform,)).as_text()
    assert _factor(text) == {factor}


def test_a_device_in_scope_decides_for_its_own_platform():
    with dispatch.on_device("NVIDIA H200"):
        f = jax.jit(lambda x: dispatch.dispatch("toy", _toy(), (x,), {}))
        text = f.trace(jax.ShapeDtypeStruct((4,), jnp.float32)).lower(lowering_platforms=("cuda",)).as_text()
    assert _factor(text) == {"5.0"}
    assert [(c.kind, c.implementation) for c in dispatch.chosen("toy")] == [("NVIDIA H200", "mosaic_gpu")]


def test_the_record_has_the_reasons():
    with dispatch.on_device("TPU v5 lite"):
        _trace(_toy(lambda target, **case: f"{target.kind} is too old"), {})
    (choice,) = dispatch.chosen("toy")
    assert str(choice) == "toy on TPU v5 lite: xla; not mosaic_tpu: TPU v5 lite is too old"


def test_support_may_depend_on_the_case():
    refuse = lambda target, *, size: "size 3 is odd" if size % 2 else None  # noqa: E731
    for size, expected in ((3, "xla"), (4, "mosaic_tpu")):
        dispatch.forget()
        with dispatch.on_device("TPU v5 lite"):
            _trace(_toy(refuse), {"size": size})
        assert [c.implementation for c in dispatch.chosen()] == [expected]


def test_a_named_implementation_never_falls_back():
    with pytest.raises(KernelError, match="toy: implementation='mosaic_tpu' is not supported here: it is for tpu"):
        dispatch.dispatch("toy", _toy(), (jnp.ones(4),), {}, "mosaic_tpu")


def test_an_unknown_implementation_gets_the_nearest_name():
    with pytest.raises(KernelError, match="no implementation 'mosaic_tpv'; it has .*did you mean 'mosaic_tpu'"):
        dispatch.dispatch("toy", _toy(), (jnp.ones(4),), {}, "mosaic_tpv")


def test_interpreted_runs_the_named_kernel_on_this_machine():
    with dispatch.interpreted():
        got = dispatch.dispatch("toy", _toy(), (jnp.ones(4),), {}, "mosaic_gpu")
    np.testing.assert_array_equal(got, 5.0)


def test_a_trace_made_interpreted_is_not_reused_outside():
    seen = []

    def run(target, x):
        seen.append(target.interpret)
        return x

    ways = (Implementation("mosaic_tpu", ("tpu",), _nowhere, run), _toy()[-1])
    f = jax.jit(lambda x: dispatch.dispatch("toy", ways, (x,), {}, "mosaic_tpu"))
    with dispatch.interpreted():
        f(jnp.ones(4))
    with pytest.raises(KernelError):
        f(jnp.ones(4))
    assert seen == [True]


def _in_scope(kind, platform):
    """Put a mesh of eight such devices, with one axis, in scope."""
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def test_a_kernel_is_not_left_to_the_partitioner():
    call = lambda x: dispatch.dispatch("toy", _toy(), (x,), {}, "mosaic_tpu")  # noqa: E731
    x, spec = jax.ShapeDtypeStruct((8,), jnp.float32), PartitionSpec("data")
    with _in_scope("TPU v5 lite", "tpu"):
        with pytest.raises(KernelError, match="leaves data=8 to the partitioner.*sharded_op"):
            jax.eval_shape(call, x)
        jax.eval_shape(jax.shard_map(call, in_specs=spec, out_specs=spec, check_vma=False), x)
        dispatch.forget()
        jax.eval_shape(lambda x: dispatch.dispatch("toy", _toy(), (x,), {}), x)
    assert "xla; not mosaic_tpu: the mesh in scope leaves data=8" in str(dispatch.chosen()[0])


def test_several_devices_without_a_mesh_might_hold_pieces(monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: Target("TPU v5 lite", "tpu"))
    with pytest.raises(KernelError, match="there are 8 devices and no mesh in scope"):
        jax.eval_shape(lambda x: dispatch.dispatch("toy", _toy(), (x,), {}, "mosaic_tpu"), jnp.ones(4))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    jax.eval_shape(lambda x: dispatch.dispatch("toy", _toy(), (x,), {}, "mosaic_tpu"), jnp.ones(4))


@pytest.mark.parametrize(
    "kind, message", [("NVIDIA A100-SXM4-80GB", "written for Hopper"), ("", "no device is known"), ("NVIDIA H200", "")]
)
def test_hopper_kernels_are_for_hopper(kind, message):
    why = dispatch.hopper(Target(kind, "cuda"))
    if dispatch.JAX_VERSION < (0, 11) and "A100" not in kind:  # where no version of JAX would help
        message = "need jax 0.11"
    assert message in (why or "") and bool(why) == bool(message)


@pytest.mark.parametrize("kind, runs", [("NVIDIA GB200", True), ("NVIDIA GeForce RTX 5090", False)])
def test_kernels_without_products_are_for_blackwell_too(kind, runs):
    why = dispatch.hopper(Target(kind, "cuda"), blackwell=True) or ""
    assert ("Hopper (H100, H200) and Blackwell (B200), and this is" in why) != runs
    assert "written for Hopper" in dispatch.hopper(Target(kind, "cuda"))


def test_too_few_threads_to_interpret_a_gpu_kernel_raise(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(jax, "device_count", lambda _: 1)
    with pytest.raises(KernelError, match="takes 4 threads.*jax_num_cpu_devices"):
        Target("NVIDIA H200", "cuda", interpret=True).gpu()
    assert Target("NVIDIA H200", "cuda").gpu() == {}


def test_on_a_gpu_without_a_kernel_the_choice_is_logged_once(caplog, monkeypatch):
    gpu = Implementation("mosaic_gpu", ("cuda",), lambda target, **_: "it is written for Hopper", lambda *_: None)
    ways = (gpu, Implementation("xla", (), lambda target, **_: None, lambda target, x: x))
    dispatch.forget()
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "cpu"):
        platform = "cpu" if kind == "cpu" else "cuda"
        monkeypatch.setattr(dispatch, "device", functools.partial(Target, kind, platform))
        jax.eval_shape(lambda x: dispatch.dispatch("toy", ways, (x,), {}), jnp.ones(4))
    lines = [r.getMessage() for r in caplog.records]
    assert lines == ["toy on NVIDIA A100-SXM4-80GB: xla; not mosaic_gpu: it is written for Hopper"]


def test_on_an_amd_gpu_the_choice_is_logged_once(caplog):
    dispatch.forget()
    for _ in range(2):
        with dispatch.on_device("AMD Instinct MI300X"):
            _trace(_toy(), {})
    assert caplog.messages == ["toy on AMD Instinct MI300X: xla; not mosaic_gpu: it is for NVIDIA GPUs"]


@pytest.mark.parametrize(
    ("kind", "platform"),
    [("NVIDIA A100-SXM4-80GB", "cuda"), ("Tesla T4", "cuda"), ("AMD Instinct MI300X", "rocm"), ("gfx942", "rocm")],
)
def test_a_gpu_is_amds_or_nvidias_by_its_kind(kind, platform):
    with dispatch.on_device(kind):
        assert dispatch.device() == Target(kind, platform)


def test_persistent_kernels_take_the_multiprocessors_of_the_device():
    with dispatch.on_device("NVIDIA H20", cores=78):
        h20 = dispatch.device()
    assert h20.cores == 78
    one = np.ones((1, 512), np.int32)
    assert Walk.of(h20, 1, 1, 1, Visits(one[..., None], one, one), 1).blocks == 78
    with dispatch.on_device("NVIDIA H200"):
        assert dispatch.device().cores == 132


@pytest.mark.parametrize(
    "op", [lambda x, i: logsumexp(x, implementation=i), lambda x, i: flash_attention(x, x, x, implementation=i)],
    ids=["logsumexp", "flash_attention"],
)  # fmt: skip
def test_a_second_derivative_of_a_kernel_is_refused_and_the_advice_gives_it(op):
    x = jax.random.normal(jax.random.key(0), (1, 8, 1, 8), jnp.float32)

    def second(implementation):
        first = jax.grad(lambda x: jnp.sum(op(x, implementation) ** 2))
        return jax.grad(lambda x: jnp.sum(first(x) ** 2))

    with dispatch.interpreted(), pytest.raises(KernelError, match="no second derivative; set implementation='xla'"):
        jax.eval_shape(second("mosaic_tpu"), x)
    assert np.isfinite(second("xla")(x)).all()
