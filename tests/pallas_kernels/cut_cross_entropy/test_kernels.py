"""The kernels: values and gradients interpreted with race detection, unsupported cases, compiling, and dispatch."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.layout import Layout
from jaxscale.parallel import sharded_cross_entropy
from pallas_kernels import chosen, tiles
from pallas_kernels.aot import compile_kernel, devices_of, kernel_reports, why_no_gpu
from pallas_kernels.cut_cross_entropy import (
    Logits,
    Merged,
    examples,
    gpu_backward,
    gradients,
    linear_cross_entropy,
    parts,
    tpu,
    tpu_backward,
)
from pallas_kernels.dispatch import JAX_VERSION, KernelError, Target, forget, interpreted, on_device
from pallas_kernels.gate import TPUS, configurations
from tests.pallas_kernels.flash_attention.cases import assert_as_exact_as, covering, name_of
from tests.truth.long import short

TPU = covering(
    {"dtype": ("float32", "bfloat16"), "w_dtype": (None, "float32"), "sizes": ((32, 512), (37, 300), (5, 100))}
    | {"w_layout": ("ve", "ev"), "softcap": (None, 2.0), "summed": (False, True), "entropy": (False, True)}
)
GRADIENTS = covering(
    {"dtype": ("float32", "bfloat16"), "w_dtype": (None, "float32"), "sizes": ((64, 768), (37, 500), (5, 100))}
    | {"w_layout": ("ve", "ev"), "softcap": (None, 2.0), "summed": (False, True), "entropy": (False, True)}
)
GPU = [
    {"dtype": "bfloat16", "sizes": (256, 512), "w_layout": "ve", "softcap": None, "summed": False, "entropy": False},
    {"dtype": "bfloat16", "sizes": (37, 587), "w_layout": "ve", "softcap": 2.0, "summed": True, "entropy": True},
    {"dtype": "float16", "sizes": (37, 587), "w_layout": "ev", "softcap": None, "summed": False, "entropy": True},
]
GPU_GRADIENTS = covering(
    {"dtype": ("bfloat16", "float16"), "w_dtype": (None, "float32"), "sizes": ((130, 600), (256, 768), (5, 300))}
    | {"w_layout": ("ve", "ev"), "softcap": (None, 2.0), "summed": (False, True), "entropy": (False, True)}
)
TILES = {
    "mosaic_tpu": {"tokens": 16, "words": 256},  # two registers wide, of which the last tile has less
    "mosaic_gpu": {"words": 256, "slots": 2, "span": 2, "buffers": 2},
}
NEEDS_GPU_INTERPRETER = pytest.mark.skipif(JAX_VERSION < (0, 11), reason="the Mosaic GPU interpreter came with 0.11")
BOTH = ["mosaic_tpu", pytest.param("mosaic_gpu", marks=NEEDS_GPU_INTERPRETER)]
GATE = {name: (fn, shapes) for name, fn, shapes in configurations("cut_cross_entropy", "gpu")}


@pytest.fixture(autouse=True)
def small_tiles(request):
    name = request.node.callspec.params.get("implementation") if hasattr(request.node, "callspec") else None
    if name is None:
        yield
        return
    with tiles.trying("cut_cross_entropy", TILES[name]):
        yield


def arrays(n, v, width, dtype, w_dtype=None, w_layout="ve", seed=0):
    """Return x, w, and a target for each token; some targets are in other shards of the vocabulary."""
    random = np.random.default_rng(seed)
    x, w = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((n, width), (v, width)))
    x, w = x.astype(dtype), w.astype(w_dtype or dtype)
    return x, w if w_layout == "ve" else w.T, jnp.asarray(random.integers(-v // 4, v + v // 4, n), jnp.int32)


def truth(x, w, rows, logits):
    """Return the log-sum-exp, the target's logit, the sum of logits and the entropy, in float64."""
    x, w, rows = np.asarray(x, np.float64), np.asarray(w.astype(x.dtype), np.float64), np.asarray(rows)
    y = x @ (w.T if logits.w_layout == "ve" else w)
    y = y if logits.softcap is None else logits.softcap * np.tanh(y / logits.softcap)
    inside = (rows >= 0) & (rows < y.shape[1])
    hit = np.where(inside, y[np.arange(len(y)), np.where(inside, rows, 0)], 0)
    top = y.max(1)
    lse = top + np.log(np.exp(y - top[:, None]).sum(1))
    logprobs = y - lse[:, None]
    entropy = -(np.exp(logprobs) * logprobs).sum(1)
    return lse, hit, y.sum(1) if logits.summed else None, entropy if logits.entropy else None


def true_gradients(x, w, rows, logits, lse, entropy, slopes):
    """Return the cotangents of x and w, in float64."""
    x, w, rows = np.asarray(x, np.float64), np.asarray(w.astype(x.dtype), np.float64), np.asarray(rows)
    w = w if logits.w_layout == "ve" else w.T
    y, bent = x @ w.T, 1.0
    if (cap := logits.softcap) is not None:
        bent = 1 - np.tanh(y / cap) ** 2
        y = cap * np.tanh(y / cap)
    d_lse, d_hit, d_summed, d_entropy = (d[:, None].astype(np.float64) for d in slopes)
    logprobs = y - lse[:, None]
    d = d_lse * np.exp(logprobs) + d_hit * (rows[:, None] == np.arange(y.shape[1]))
    d = d - d_entropy * np.exp(logprobs) * (logprobs + entropy[:, None]) if logits.entropy else d
    d = (d + d_summed if logits.summed else d) * bent
    return d @ w, d.T @ x if logits.w_layout == "ve" else x.T @ d


def check(case, implementation, width):
    x, w, rows = arrays(*case["sizes"], width, case["dtype"], case.get("w_dtype"), case["w_layout"])
    logits = Logits(case["w_layout"], case["softcap"], case["summed"], case["entropy"])
    run = jax.jit(
        lambda x, w, rows, implementation: parts(x, w, rows, logits, implementation).merged(), static_argnums=3
    )
    with interpreted(races=True):
        got = run(x, w, rows, implementation)
    theirs, want = run(x, w, rows, "dense"), truth(x, w, rows, logits)
    for name, a, b, c in zip(got._fields, got, theirs, want, strict=True):
        if c is not None:
            # Where XLA's sums, which have another order, happen to be exact.
            assert_as_exact_as(a, b, c, name, units=4.0)


@pytest.mark.parametrize("implementation", ["mosaic_tpu"])
@pytest.mark.parametrize("case", short(4, TPU), ids=name_of)
def test_the_tpu_kernel_is_as_exact_as_all_logits_at_once(case, implementation, capsys):
    check(case, implementation, width=24)
    assert "RACE" not in capsys.readouterr().out


def check_gradients(case, implementation, width):
    x, w, rows = arrays(*case["sizes"], width, case["dtype"], case.get("w_dtype"), case["w_layout"])
    logits = Logits(case["w_layout"], case["softcap"], case["summed"], case["entropy"])
    random = np.random.default_rng(2)
    slopes = [random.normal(size=rows.shape).astype(np.float32) for _ in range(4)]
    lse, *_, entropy = truth(x, w, rows, logits)
    needed = (True, True, logits.summed, logits.entropy)
    run = jax.jit(
        lambda implementation: gradients(
            x,
            w,
            rows,
            jnp.asarray(lse, jnp.float32),
            Merged(*(jnp.asarray(d) if need else None for d, need in zip(slopes, needed, strict=True))),
            logits,
            implementation,
            dw_dtype="float32",
            entropy=jnp.asarray(entropy, jnp.float32) if logits.entropy else None,
        ),
        static_argnums=0,
    )
    with interpreted(races=True):
        got = run(implementation)
    for name, a, b, c in zip(
        ("dx", "dw"), got, run("dense"), true_gradients(x, w, rows, logits, lse, entropy, slopes), strict=True
    ):
        assert_as_exact_as(a, b, c, name, units=4.0, dtype=x.dtype)  # cotangents of logits have x's dtype


@pytest.mark.parametrize("implementation", ["mosaic_tpu"])
@pytest.mark.parametrize("case", short(2, GRADIENTS), ids=name_of)
def test_the_tpu_gradients_are_as_exact_as_those_of_all_logits_at_once(case, implementation, capsys, monkeypatch):
    monkeypatch.setattr(tpu_backward, "TILE", (32, 384))  # pieces of which the last begins inside of the one before
    check_gradients(case, implementation, width=24)
    assert "RACE" not in capsys.readouterr().out


@NEEDS_GPU_INTERPRETER
@pytest.mark.parametrize("implementation", ["mosaic_gpu"])
@pytest.mark.parametrize("case", short(1, GPU_GRADIENTS), ids=name_of)
def test_the_gpu_gradients_are_as_exact_as_those_of_all_logits_at_once(case, implementation, capsys, monkeypatch):
    # pieces, and in a piece tiles, of which the last begins inside of the one before
    monkeypatch.setattr(gpu_backward, "TILE", (128, 384))
    check_gradients(case, implementation, width=64)
    assert "RACE" not in capsys.readouterr().out


@NEEDS_GPU_INTERPRETER
@pytest.mark.parametrize("implementation", ["mosaic_gpu"])
@pytest.mark.parametrize("case", GPU, ids=name_of)
def test_the_gpu_kernel_is_as_exact_as_all_logits_at_once(case, implementation, capsys):
    check(case, implementation, width=128)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize("implementation", BOTH)
def test_its_loss_and_gradients_are_those_of_xla(implementation):
    x, w, targets = arrays(37, 320, 64, "bfloat16")
    targets = jnp.abs(targets) % 320
    options = {"softcap": 3.0, "z_loss": 0.1, "label_smoothing": 0.1, "ignore_index": 7}
    options |= {"return_lse": True, "return_entropy": True}
    d = jnp.asarray(np.random.default_rng(1).normal(size=(3, 37)), jnp.float32)

    def run(implementation):
        f = lambda x, w: linear_cross_entropy(x, w, targets, **options, implementation=implementation)  # noqa: E731
        y, pull = jax.vjp(f, x, w)
        return *y, *pull(tuple(d))

    with interpreted():
        got = jax.jit(run, static_argnums=0)(implementation)
    for a, b in zip(got, jax.jit(run, static_argnums=0)("xla"), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        eps = 2.0**-22 if a.ndim == 1 else 2.0**-8  # losses are float32, gradients have their array's type
        np.testing.assert_allclose(a, b, rtol=2 * eps, atol=eps * np.abs(b).max())


@pytest.mark.parametrize("implementation", BOTH)
def test_filtered_gradients_of_a_named_kernel_are_those_of_xla(implementation):
    forget()
    x, w, targets = arrays(16, 300, 64, "bfloat16")
    f = lambda x: linear_cross_entropy(x, w, jnp.abs(targets) % 300, filter=0.1, implementation=implementation).sum()  # noqa: E731
    with interpreted():
        jax.eval_shape(jax.grad(f), x)
    ran = {dict(c.case)["direction"]: c.implementation for c in chosen("linear_cross_entropy")}
    assert ran == {"forward": implementation, "backward": "xla"}


# ---- what they refuse


@pytest.mark.parametrize(
    ("implementation", "changes", "words"),
    [
        ("mosaic_tpu", {"dtype": "float16"}, "XLA converts float16"),
        ("mosaic_tpu", {"w_dtype": "float16"}, "XLA converts float16"),
        ("mosaic_tpu", {"width": 32768}, "x of width 32768 leaves no VMEM.* is about"),
        ("mosaic_tpu", {"n": 0}, "there are no tokens"),
        ("mosaic_gpu", {"dtype": "float32"}, "bfloat16 and float16.* not float32"),
        ("mosaic_gpu", {"w_dtype": "float32"}, "the same for x and w, not bfloat16 and float32"),
        ("mosaic_gpu", {"width": 100}, "multiple of 64 in a kernel, not 100"),
        ("mosaic_gpu", {"v": 100}, "a vocabulary of 100 is smaller than a tile of 256 words"),
        ("mosaic_gpu", {"n": 0}, "there are no tokens"),
    ],
    ids=["tpu x", "tpu w", "tpu width", "tpu nothing", "gpu x", "gpu w", "gpu width", "gpu vocabulary", "gpu nothing"],
)
def test_an_unsupported_case_raises_with_the_reason(implementation, changes, words):
    if implementation == "mosaic_gpu" and JAX_VERSION < (0, 11):
        words = "kernels for GPUs need jax 0.11"
    case = {"n": 8, "v": 1024, "width": 64, "dtype": "bfloat16"} | changes
    like = jax.ShapeDtypeStruct
    x = like((case["n"], case["width"]), case["dtype"])
    w = like((case["v"], case["width"]), case.get("w_dtype", case["dtype"]))
    f = lambda x, w, t: linear_cross_entropy(x, w, t, implementation=implementation)  # noqa: E731
    with interpreted(), pytest.raises(KernelError, match=words):
        jax.eval_shape(f, x, w, like((case["n"],), "int32"))


# ---- what they compile to, and where they are chosen


@pytest.mark.gpu_aot
@pytest.mark.parametrize(
    "name",
    [
        "bfloat16 4096 ve 128256 softcap sum entropy",
        "bfloat16 4096 ev 50257",
        "bfloat16 4096 ev 50257 softcap sum entropy backward",
    ],
)
def test_the_gpu_kernel_compiles_without_spills_and_fits_in_shared_memory(name):
    fn, shapes = GATE[name]
    reports = kernel_reports(fn, *shapes)
    assert reports and not [r.problem for r in reports if r.problem]


@pytest.mark.tpu_aot
@pytest.mark.parametrize("topology", TPUS)
def test_the_tpu_kernel_compiles_for_every_generation(topology):
    for direction in ("forward", "backward"):
        options = examples.CASES["ev 50257 softcap sum"] | {"entropy": True}
        fn, shapes = examples.case(
            tpu.run, Target("", "tpu"), **options, width=1000, dtype="bfloat16", direction=direction
        )
        assert "tpu_custom_call" in compile_kernel(fn, *shapes, topology=topology).as_text()


def kernels_in(lowered):
    return re.findall(r"custom_call @(\S*?(?:mosaic_gpu|tpu_custom_call)\S*?)\(", lowered.as_text())


@pytest.mark.parametrize(
    ("kind", "platform", "kernel", "count"),
    [
        ("NVIDIA H200", "cuda", "mosaic_gpu", 2),
        ("TPU v6 lite", "tpu", "tpu_custom_call", 2),
        ("NVIDIA A100", "cuda", "", 0),
    ],
)
def test_lowering_chooses_the_kernels_of_the_platform(kind, platform, kernel, count):
    if platform == "cuda" and why_no_gpu() is not None:
        pytest.skip(str(why_no_gpu()))
    like = jax.ShapeDtypeStruct
    shapes = like((256, 512), jnp.bfloat16), like((4096, 512), jnp.bfloat16), like((256,), jnp.int32)
    f = jax.value_and_grad(lambda x, w, t: linear_cross_entropy(x, w, t).mean(), (0, 1))
    with on_device(kind):
        calls = kernels_in(jax.jit(f).trace(*shapes).lower(lowering_platforms=(platform,)))
    assert len(calls) == count and all(kernel in c for c in calls), calls


@pytest.mark.parametrize(
    ("slice_of", "implementation_there"),
    [
        pytest.param("v5e", "mosaic_tpu", marks=pytest.mark.tpu_aot),
        pytest.param("h200:4", "mosaic_gpu", marks=pytest.mark.gpu_aot),
    ],
)
def test_a_vocabulary_cut_by_a_layout_gets_the_kernel_on_every_device(slice_of, implementation_there):
    layout = Layout("data=2,tensor=2").on(devices_of(slice_of))
    f = jax.value_and_grad(lambda x, w, t: sharded_cross_entropy(x, w, t).mean(), (0, 1))
    forget()
    with layout:

        def like(shape, dtype, *axes, kind="activations"):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=layout.sharding(axes, kind=kind))

        lowered = jax.jit(f).lower(
            like((4, 128, 512), jnp.bfloat16, "batch", "seq", "embed"),
            like((4096, 512), jnp.bfloat16, "vocab", "embed", kind="params"),
            like((4, 128), jnp.int32, "batch", "seq"),
        )
    calls = kernels_in(lowered)
    on_gpu = implementation_there == "mosaic_gpu"
    assert len(calls) == 2 and all(("mosaic_gpu" in c) == on_gpu for c in calls), calls
    ran = {dict(c.case)["direction"]: (c.implementation, dict(c.case)["w"]) for c in chosen("linear_cross_entropy")}
    assert ran == dict.fromkeys(("forward", "backward"), (implementation_there, (2048, 512)))
