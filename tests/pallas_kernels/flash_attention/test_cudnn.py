"""cuDNN without a GPU: the calls in a program lowered for one, their meaning, and unsupported cases.

cuDNN itself runs nowhere here. Where values are compared, its two calls are replaced by what they are documented to
compute (`jax.nn.dot_product_attention`; Dao 2023, section 3), and all that JAX and we put around them is the real code.
"""

from __future__ import annotations

import functools
import re
import types

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as binding

from pallas_kernels import dispatch
from pallas_kernels.dispatch import JAX_VERSION, KernelError, Target
from pallas_kernels.flash_attention import IMPLEMENTATIONS, NAMES, Blocks, cudnn, flash_attention, gradients
from tests.pallas_kernels import device_check, on_device, real_sizes

A100 = "NVIDIA A100-SXM4-80GB"
B, S, H, K, D = 2, 24, 4, 2, 16
MASKS = [{}, *({"causal": True, "window": window} for window in (None, 1, 7, 99))]


@pytest.fixture
def card(monkeypatch):
    """Return a function that sets the GPU which this process seems to have, with cuDNN 9.15."""

    def insert(kind):
        monkeypatch.setattr(dispatch, "device", lambda: Target(kind, "cuda"))
        monkeypatch.setattr(jax, "device_count", lambda *_: 1)
        monkeypatch.setattr(cudnn, "_present", lambda kind: True)
        monkeypatch.setattr(binding, "check_cudnn_version", lambda: 91500)

    insert(A100)
    return insert


def arrays(s=S, t=S, h=H, kv=K, d=D, dtype=jnp.bfloat16):
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=x), dtype) for x in ((B, s, h, d), (B, t, kv, d), (B, t, kv, d)))


def loss(q, k, v, **options):
    return (flash_attention(q, k, v, **options).astype(jnp.float32) ** 2).sum()


def calls(text):
    return re.findall(r"custom_call @(__cudnn\$\w+)\(", text)


def eqns(jaxpr, name):
    """Return the parameters of every equation of a primitive, including nested ones."""
    inner = [j for e in jaxpr.eqns for j in jax.extend.core.jaxprs_in_params(e.params)]
    return [e.params for e in jaxpr.eqns if e.primitive.name == name] + [p for j in inner for p in eqns(j, name)]


# ---- choice


@pytest.mark.parametrize("kind", [A100, "NVIDIA B200", "NVIDIA GeForce RTX 4090"])
def test_a_program_for_a_gpu_that_is_not_hopper_calls_cudnn_in_both_directions(kind, card, caplog):
    card(kind)
    dispatch.forget()
    q, k, v = arrays()
    grad = jax.jit(jax.grad(functools.partial(loss, causal=True), (0, 1, 2)))
    text = grad.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert [m.partition("; not")[0] for m in caplog.messages] == [f"flash_attention on {kind}: cudnn"]
    assert calls(grad.trace(q, k, v).lower(lowering_platforms=("cpu",)).as_text()) == []


def test_hopper_kernels_come_first_and_xla_last(card):
    assert [one.name for one in IMPLEMENTATIONS] == ["mosaic_gpu", "cudnn", "mosaic_tpu", "xla"]
    card("NVIDIA H200")
    if JAX_VERSION >= (0, 11):
        with dispatch.choosing() as made:
            jax.eval_shape(functools.partial(flash_attention, causal=True), *arrays(s=256, t=256, d=64))
        assert [c.implementation for c in made.values()] == ["mosaic_gpu"]
    jax.eval_shape(functools.partial(flash_attention, implementation="cudnn"), *arrays())  # it can be named there


def _chosen(s=4096, d=128, h=2, kv=2, **options):
    shapes = [jax.ShapeDtypeStruct((1, s, n, d), jnp.bfloat16) for n in (h, kv, kv)]
    with dispatch.choosing() as made:
        jax.eval_shape(jax.grad(functools.partial(loss, **options), (0, 1, 2)), *shapes)
    return {choice.implementation for choice in made.values()}, dict(next(iter(made.values())).why_not)


def test_on_hopper_it_comes_first_where_it_was_measured_to_be_faster(card):
    card("NVIDIA H200")
    assert _chosen(causal=True) == ({"cudnn"}, {})
    assert _chosen(causal=True, implementation="mosaic_gpu")[0] == {"mosaic_gpu"} if JAX_VERSION >= (0, 11) else True
    for options in ({}, {"causal": True, "window": 512}, {"causal": True, "kv": 1}, {"causal": True, "s": 2048}):
        assert _chosen(**options)[0] == {"mosaic_gpu" if JAX_VERSION >= (0, 11) else "cudnn"}
    _, why = _chosen(causal=True, deterministic=True)
    assert "cuDNN's gradient may differ between runs" in why["cudnn"]


def test_on_a_mesh_of_hopper_gpus_each_device_calls_it(card):
    card("NVIDIA H200")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]).reshape(2), ("tensor",))
    spec = jax.sharding.PartitionSpec(None, None, "tensor")
    attend = functools.partial(flash_attention, causal=True)
    split = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
    shape = jax.ShapeDtypeStruct((1, 4096, 4, 128), jnp.bfloat16)
    grad = jax.jit(jax.grad(lambda *x: split(*x).astype(jnp.float32).sum(), (0, 1, 2)))
    text = grad.trace(shape, shape, shape).lower(lowering_platforms=("cuda",)).as_text()
    assert calls(text) == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]


@pytest.mark.parametrize(
    ("kind", "serves"),
    [("NVIDIA A10G", True), ("NVIDIA GeForce RTX 3090 Ti", True), ("NVIDIA RTX A6000", True), ("NVIDIA GB200", True)]
    + [("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", True), ("NVIDIA H100 80GB HBM3", True)]
    + [("Tesla T4", False), ("Tesla V100-SXM2-16GB", False), ("Quadro RTX 4000", False), ("Quadro RTX 5000", False)]
    + [("NVIDIA GeForce RTX 2080 Ti", False), ("NVIDIA GeForce GTX 1080", False), ("", False)],
)
def test_it_is_for_gpus_from_ampere_on(kind, serves, card):
    why = cudnn._missing(Target(kind, "cuda"))
    assert why is None if serves else why is not None and "from Ampere on" in why


def _refused(q=None, *, implementation="cudnn", **options):
    q, k, v = q or arrays()
    return jax.eval_shape(lambda *a: flash_attention(*a, implementation=implementation, **options), q, k, v)


IDS = np.ones((B, S), np.int32)


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ({"dtype": jnp.float32}, {}, "float32 is left to XLA"),
        ({"d": 136}, {}, "multiples of 8 up to 128, not 136"),
        ({"d": 20}, {}, "multiples of 8 up to 128, not 20"),
        ({"t": 40}, {"causal": True}, "24 queries with the first of 40 keys"),
        ({"s": 1}, {}, "a single query"),
        ({"s": 23, "t": 23}, {}, "even lengths; 23 queries and 23 keys"),
        ({}, {"segment_ids": IDS}, "segment ids"),
        ({}, {"positions": IDS}, "positions"),
        ({}, {"softcap": 5.0}, "soft-cap"),
        ({}, {"bias": jnp.zeros((1, 1, 1, S))}, "round a bias to bfloat16"),
        ({}, {"kind": "sigmoid"}, "softmax"),
        ({}, {"scale": 0.0}, "positive scale"),
        ({}, {"window": 3}, "window is causal"),
        ({}, {"return_lse": True}, "log-sum-exp"),
        ({}, {"deterministic": True}, "deterministic=True"),
        ({}, {"blocks": Blocks.of(np.ones((3, 3), bool), query=8, key=8)}, "block-sparse"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_an_unsupported_case_raises_for_cudnn_by_name_and_runs_on_xla_otherwise(shapes, options, words, card):
    inputs = arrays(**shapes)
    with pytest.raises(KernelError, match=re.escape(words)) as caught:
        _refused(inputs, **options)
    assert "\n" not in str(caught.value)
    with dispatch.choosing() as made:
        _refused(inputs, implementation=None, **options)
    (choice,) = made.values()
    assert choice.implementation == "xla" and words in dict(choice.why_not)["cudnn"]


def test_values_of_another_width_and_parts_of_keys_are_refused(card):
    q, k, v = arrays()
    with pytest.raises(KernelError, match="values as wide as keys; widths 8 and 16"):
        _refused((q, k, v[..., :8]))
    with pytest.raises(KernelError, match="log-sum-exp"):
        gradients(q, k, v, q, jnp.zeros((B, S, H)), q, implementation="cudnn")


@pytest.mark.parametrize(
    ("version", "words"),
    [(90100, "needs cuDNN 9.8.0, and this is 9.1.0"), (91001, "cuDNN 9.10.1 has known bugs"), (None, "no cuDNN")],
)
def test_a_cudnn_that_is_missing_old_or_broken_is_a_sentence(version, words, card, monkeypatch):
    def check():
        if version is None:
            raise RuntimeError("cuDNN is not detected.")
        return version

    monkeypatch.setattr(binding, "check_cudnn_version", check)
    with pytest.raises(KernelError, match=re.escape(words)):
        _refused()


def test_compute_capability_10_3_needs_a_newer_cudnn(card, monkeypatch):
    monkeypatch.setattr(binding, "check_cudnn_version", lambda: 90900)
    assert cudnn._missing(Target("NVIDIA B200", "cuda")) is None
    assert "needs cuDNN 9.11.0, and this is 9.9.0" in (cudnn._missing(Target("NVIDIA B300 SXM6 AC", "cuda")) or "")


def test_rules_that_jax_moved_or_changed_are_a_sentence(card, monkeypatch):
    monkeypatch.setattr(binding, "_dot_product_attention_bwd_rule", lambda res, grad: None)
    with pytest.raises(KernelError, match="parameters that this module does not know"):
        _refused()
    monkeypatch.delattr(binding, "_dot_product_attention_fwd_rule")
    with pytest.raises(KernelError, match="does not have the rules for cuDNN's attention"):
        _refused()


def test_a_gpu_that_is_not_of_this_process_is_left_to_xla(card, monkeypatch):
    monkeypatch.undo()
    assert "this process, which has no NVIDIA A100" in (cudnn._missing(Target(A100, "cuda")) or "")


def test_a_mesh_without_devices_is_left_to_xla(card):
    mesh, inputs = jax.sharding.AbstractMesh((1,), ("data",)), arrays()
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(KernelError, match="the mesh in scope is abstract"):
        _refused(inputs)


# ---- meaning


PUBLIC = functools.partial(jax.nn.dot_product_attention, scale=0.3)


def of_jax(options):
    """Return the public function's arguments for one of `MASKS`."""
    window = options.get("window") or S
    expected = {"is_causal": options.get("causal", False)}
    return expected | ({"local_window_size": (window - 1, 0)} if window < S else {})


@pytest.mark.parametrize("options", MASKS, ids=str)
@pytest.mark.parametrize("kv", [H, K, 1])
def test_cudnn_is_called_as_by_the_public_function_of_jax(options, kv, card):
    def public(*a):
        return (PUBLIC(*a, **of_jax(options), implementation="cudnn").astype(jnp.float32) ** 2).sum()

    ours = functools.partial(loss, scale=0.3, implementation="cudnn", **options)
    made = [jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(*arrays(kv=kv)).jaxpr for f in (ours, public)]
    for name in ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"):
        mine, theirs = (eqns(jaxpr, name) for jaxpr in made)
        assert len(mine) == 1 and mine == theirs


@pytest.mark.parametrize("options", MASKS, ids=str)
def test_the_public_function_computed_by_xla_is_the_reference(options):
    def both(f):
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a) ** 2).sum(), (0, 1, 2)))(*arrays(dtype=jnp.float32))

    got = both(functools.partial(PUBLIC, **of_jax(options), implementation="xla"))
    want = both(functools.partial(flash_attention, scale=0.3, implementation="dense", **options))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


def _scores(q, k, scale, mask_type, window):
    """Return float32 (B, H, S, T), -inf where cuDNN masks: later keys, and those `window` or more before."""
    k = jnp.repeat(k, q.shape[2] // k.shape[2], 2).astype(jnp.float32)
    scores = jnp.einsum("bsnd,btnd->bnst", q.astype(jnp.float32), k) * scale
    i, j = jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = (j <= i) | (mask_type != binding.MaskType.CAUSAL)
    return jnp.where(seen if window is None else seen & (j > i - window), scores, -jnp.inf)


def _forward(q, k, v, *_, scale, mask_type, sliding_window_length, is_training, **options):
    assert is_training and options["layout"] == binding.AttentionLayout.BTNH.value and options["dropout_rate"] == 0
    scores = _scores(q, k, scale, mask_type, sliding_window_length)
    v = jnp.repeat(v, q.shape[2] // v.shape[2], 2).astype(jnp.float32)
    out = jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores), v).astype(q.dtype)
    return [out, jax.nn.logsumexp(scores, -1)]


def _backward(q, k, v, *others, scale, mask_type, sliding_window_length, **_):
    *_, lse, out, dout = others
    assert lse.dtype == jnp.float32 and lse.shape == (q.shape[0], q.shape[2], q.shape[1]), "as cuDNN has it: B N T"
    groups, f32 = q.shape[2] // k.shape[2], jnp.float32
    weights = jnp.exp(_scores(q, k, scale, mask_type, sliding_window_length) - lse[..., None])
    wide = lambda x: jnp.repeat(x.astype(f32), groups, 2)  # noqa: E731
    dweights = jnp.einsum("bsnd,btnd->bnst", dout.astype(f32), wide(v))
    delta = (out.astype(f32) * dout.astype(f32)).sum(-1).swapaxes(1, 2)[..., None]
    dscores = weights * (dweights - delta) * scale
    narrow = lambda x: x.reshape(*k.shape[:3], groups, -1).sum(3)  # noqa: E731
    dq = jnp.einsum("bnst,btnd->bsnd", dscores, wide(k))
    dk = narrow(jnp.einsum("bnst,bsnd->btnd", dscores, q.astype(f32)))
    dv = narrow(jnp.einsum("bnst,bsnd->btnd", weights, dout.astype(f32)))
    return [x.astype(q.dtype) for x in (dq, dk, dv)]


@pytest.fixture
def stand_ins(card, monkeypatch):
    """Replace both of cuDNN's calls by their documented results, under JAX's own rules."""
    for name, meaning in (("fwd", _forward), ("bwd", _backward)):
        monkeypatch.setattr(binding, f"_dot_product_attention_{name}_p_wrapper", types.SimpleNamespace(bind=meaning))


def _close(got, want):
    error = lambda a, b: float(jnp.linalg.norm((a - b).astype(jnp.float32)) / jnp.linalg.norm(b.astype(jnp.float32)))  # noqa: E731
    assert max(jax.tree.leaves(jax.tree.map(error, got, want))) < 0.01  # two roundings to bfloat16


@pytest.mark.parametrize("options", [MASKS[0], MASKS[3]], ids=str)
def test_values_and_gradients_are_the_references(options, stand_ins):
    both = lambda implementation: jax.jit(  # noqa: E731
        jax.value_and_grad(functools.partial(loss, implementation=implementation, **options), (0, 1, 2))
    )
    (value, grads), (want, true) = both("cudnn")(*arrays()), both("dense")(*arrays())
    np.testing.assert_allclose(value, want, rtol=0.01)
    _close(grads, true)


def test_examples_that_vmap_adds_may_lie_anywhere_or_be_shared(stand_ins):
    q, k, v = arrays()
    many = jnp.stack([q, 2 * q, -q], axis=2)

    def grads(implementation):
        f = jax.grad(functools.partial(loss, causal=True, implementation=implementation), (0, 1, 2))
        return jax.jit(jax.vmap(f, in_axes=(2, None, None)))(many, k, v)

    _close(grads("cudnn"), grads("dense"))


def test_under_vmap_cudnn_gets_a_larger_batch(card):
    q, k, v = arrays()
    f = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2)), in_axes=(2, None, None)))
    text = f.trace(jnp.stack([q] * 3, axis=2), k, v).lower(lowering_platforms=("cuda",)).as_text()
    made = [line for line in text.splitlines() if "@__cudnn$" in line]
    assert len(made) == 2 and all(f"tensor<{3 * B}x{S}x{K}x{D}xbf16>" in line for line in made)


def test_residuals_that_a_checkpoint_policy_saves_are_not_recomputed(card):
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    saved = jax.checkpoint(functools.partial(loss, causal=True), policy=policy)
    jaxpr = jax.make_jaxpr(jax.grad(saved))(*arrays()).jaxpr
    assert [len(eqns(jaxpr, f"dot_product_attention_{name}_wrapper")) for name in ("fwd", "bwd")] == [1, 1]


# ---- the check of a device


def test_the_check_of_a_device_runs_cudnn_where_no_log_sum_exp_is_wanted(card):
    backends = device_check.backends("gpu", A100)
    mine = lambda small: [  # noqa: E731
        w for w in real_sizes.works(small) if "cudnn" in on_device.serving(w.op, w.parts, backends)
    ]
    assert len(mine(False)) >= 6 and not any(device_check.may_vary(w, "cudnn", "out") for w in mine(False))
    made = mine(True)[-1].make(0)
    for outputs in (jax.eval_shape(made.ours("cudnn"), *made.arrays), jax.eval_shape(made.plain)):
        assert [x.shape for x in outputs] == [made.arrays[i].shape for i in (0, 0, 1, 2)]
