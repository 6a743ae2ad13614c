"""Forward mode and second derivatives of every op: XLA's equal a formula's in float64, a kernel's are refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import dispatch
from pallas_kernels.chunked_recurrence import chunked_recurrence
from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.derivatives import custom_vjp
from pallas_kernels.errors import KernelError
from pallas_kernels.fftconv import fftconv
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.grouped_experts import grouped_experts
from pallas_kernels.grouped_matmul import grouped_matmul, grouped_outer
from pallas_kernels.grouped_stored_matmul import grouped_stored_matmul
from pallas_kernels.routed_experts import gated_experts, routed_experts
from pallas_kernels.softmax import log_softmax, logsumexp, softmax
from pallas_kernels.stored_matmul import stored_matmul
from tests.pallas_kernels.grouped_stored_matmul import cases as grouped_stored
from tests.pallas_kernels.stored_matmul.cases import make

SIZES = np.array([2, 0, 3], np.int32)
GROUPS = np.repeat(np.arange(3), SIZES)
IDS = np.array([[0, 2], [1, 0], [2, 1], [0, 1]], np.int32)
TARGETS = np.array([1, 0, 6], np.int32)
DOCUMENTS = np.array([[0, 0, 0, 1, 1, 1]], np.int32)
WEIGHT, MATRIX = make("int4, groups of 128", 256, 128)
_, WEIGHTS, _, MATRICES = grouped_stored.arrays("int4, groups of 128", 256, 128, 8)


def _attention(q, k, v):
    seen = np.tril(np.ones((6, 6), bool)) & (DOCUMENTS[0][:, None] == DOCUMENTS)
    scores = jnp.einsum("bshd,bthd->bhst", q, jnp.repeat(k, 2, 2)) / np.sqrt(q.shape[-1])
    scores = 3 * jnp.tanh(scores / 3)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bhst,bthd->bshd", weights, jnp.repeat(v, 2, 2))


def _loss(x, w):
    logits = x @ w.T
    lse = jax.nn.logsumexp(logits, -1)
    return lse - logits[np.arange(3), TARGETS] + 0.1 * lse**2


def _convolution(x, kernel):
    shifted = [jnp.pad(x, ((0, 0), (j, 0), (0, 0)))[:, : x.shape[1]] for j in range(len(kernel))]
    return sum(kernel[j] * one for j, one in enumerate(shifted))


def _recurrence(q, k, v, decay, beta):
    state, outs = jnp.zeros((q.shape[-1], v.shape[-1]), q.dtype), []
    for t in range(q.shape[1]):
        state = jnp.exp(decay[0, t, 0]) * state
        state = state + jnp.outer(k[0, t, 0], beta[0, t, 0] * (v[0, t, 0] - k[0, t, 0] @ state))
        outs.append(q[0, t, 0] @ state)
    return jnp.stack(outs)[None, :, None], state[None, None]


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _grouped(rows, scale, gate, up, down):
    hidden = _swiglu(jnp.einsum("me,mef->mf", rows, gate[GROUPS]), jnp.einsum("me,mef->mf", rows, up[GROUPS]))
    return jnp.einsum("mf,mfe->me", scale[:, None] * hidden, down[GROUPS])


def _experts(x, factors, gate, up, down):
    hidden = _swiglu(jnp.einsum("te,nef->tnf", x, gate), jnp.einsum("te,nef->tnf", x, up))
    return jnp.einsum("tn,tnf,nfe->te", factors, hidden, down)


def _routed(x, weights, *matrices):
    return _experts(x, jnp.sum(jax.nn.one_hot(IDS, 3, dtype=x.dtype) * weights[..., None], 1), *matrices)


def _gated(x, router, *matrices):
    shares = jax.nn.softmax(x @ router)
    top = jnp.where(shares >= jnp.sort(shares, -1)[:, -2:-1], shares, 0)
    return _experts(x, top / jnp.sum(top, -1, keepdims=True), *matrices)


# name -> (op, formula, shapes of the arrays that both take)
_MATRICES = [(3, 4, 5), (3, 4, 5), (3, 5, 4)]
_HEADS = [(1, 5, 1, 3), (1, 5, 1, 3), (1, 5, 1, 2), (1, 5, 1), (1, 5, 1)]
OPS: dict[str, tuple[Any, Any, list[tuple[int, ...]]]] = {
    "softmax": (softmax, partial(jax.nn.softmax, axis=-1), [(3, 5)]),
    "log_softmax": (log_softmax, partial(jax.nn.log_softmax, axis=-1), [(3, 5)]),
    "logsumexp": (logsumexp, partial(jax.nn.logsumexp, axis=-1), [(3, 5)]),
    "flash_attention": (
        partial(flash_attention, causal=True, softcap=3.0, segment_ids=DOCUMENTS),
        _attention,
        [(1, 6, 2, 4), (1, 6, 1, 4), (1, 6, 1, 3)],
    ),
    "linear_cross_entropy": (
        lambda x, w, **o: linear_cross_entropy(x, w, TARGETS, z_loss=0.1, **o),
        _loss,
        [(3, 4), (7, 4)],
    ),
    "fftconv within documents": (
        lambda x, kernel, **o: fftconv(x, kernel, DOCUMENTS + 1, **o),
        lambda x, kernel: jnp.concatenate([_convolution(x[:, :3], kernel), _convolution(x[:, 3:], kernel)], 1),
        [(1, 6, 2), (3, 2)],
    ),
    "fftconv": (fftconv, _convolution, [(1, 6, 2), (3, 2)]),
    "chunked_recurrence": (
        lambda q, k, v, decay, beta, **o: chunked_recurrence(q, k, v, -(decay**2), beta, **o),
        lambda q, k, v, decay, beta: _recurrence(q, k, v, -(decay**2), beta),
        _HEADS,
    ),
    "grouped_matmul": (
        lambda rows, matrices, bias, **o: grouped_matmul(rows, matrices, SIZES, bias=bias, **o),
        lambda rows, matrices, bias: jnp.einsum("mk,mkn->mn", rows, matrices[GROUPS]) + bias[GROUPS],
        [(5, 4), (3, 4, 2), (3, 2)],
    ),
    "grouped_outer": (
        lambda left, right, **o: grouped_outer(left, right, SIZES, **o),
        lambda a, b: jax.ops.segment_sum(a[:, :, None] * b[:, None], GROUPS, 3),
        [(5, 4), (5, 2)],
    ),
    "grouped_experts": (
        lambda *arrays, **o: grouped_experts(*arrays, SIZES, **o),
        _grouped,
        [(5, 4), (5,), *_MATRICES],
    ),
    "routed_experts": (
        lambda x, weights, *matrices, **o: routed_experts(x, IDS, weights, *matrices, **o),
        _routed,
        [(4, 4), (4, 2), *_MATRICES],
    ),
    "gated_experts": (partial(gated_experts, top_k=2), _gated, [(4, 4), (4, 3), *_MATRICES]),
    "stored_matmul": (lambda x, **o: stored_matmul(x, WEIGHT, **o), lambda x: x @ MATRIX, [(2, 256)]),
    "grouped_stored_matmul": (
        lambda x, **o: grouped_stored_matmul(x, WEIGHTS, np.array([1, 0, 2, 1, 1], np.int32), **o),
        lambda x: jnp.einsum("mk,mkn->mn", x, MATRICES[np.array([0, 2, 2, 3, 4])]),
        [(5, 256)],
    ),
}


def _arrays(name: str, dtype: str) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    random = np.random.default_rng(0)
    both = [[jnp.asarray(random.normal(size=s) / 2, dtype) for s in OPS[name][2]] for _ in range(2)]
    return tuple(both[0]), tuple(both[1])


def _derivatives(op: Any, arrays: Any, tangents: Any) -> Any:
    """Return the result's tangent, the gradient of a sum of squares, and that gradient's tangent."""
    loss = lambda arrays: sum(jnp.sum(y**2) for y in jax.tree.leaves(op(*arrays)))  # noqa: E731
    return jax.jvp(op, arrays, tangents)[1], *jax.jvp(jax.grad(loss), (arrays,), (tangents,))


@pytest.mark.parametrize("name", OPS)
def test_forward_mode_and_hessians_of_an_op_by_xla_are_those_of_its_formula(name):
    op, formula, _ = OPS[name]
    got = jax.jit(partial(_derivatives, partial(op, implementation="xla")))(*_arrays(name, "float32"))
    with jax.enable_x64(True):
        want = jax.tree.leaves(jax.jit(partial(_derivatives, formula))(*_arrays(name, "float64")))
    for one, truth in zip(jax.tree.leaves(got), want, strict=True):
        np.testing.assert_allclose(one, truth, rtol=0, atol=2e-5 * np.abs(truth).max())


@pytest.mark.parametrize("name", ["softmax", "flash_attention"])
def test_a_kernel_without_forward_mode_refuses_it_and_names_what_has_it(name):
    run = lambda *arrays: jax.jvp(partial(OPS[name][0], implementation="mosaic_tpu"), arrays, arrays)  # noqa: E731
    with dispatch.interpreted(), pytest.raises(KernelError, match="no forward mode.*set implementation='xla', which"):
        jax.jit(run).lower(*_arrays(name, "float32")[0])


def test_attention_has_a_hessian_by_forward_over_reverse_mode():
    q, k, v = _arrays("flash_attention", "float32")[0]
    op, formula, _ = OPS["flash_attention"]
    got = jax.jit(jax.hessian(lambda v: jnp.sum(op(q, k, v) ** 2)))(v)
    with jax.enable_x64(True):
        q, k, v = _arrays("flash_attention", "float64")[0]
        want = jax.jit(jax.hessian(lambda v: jnp.sum(formula(q, k, v) ** 2)))(v)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


def _toy(log: list[str]) -> Any:
    """Return sum(x) of each row to a power, times y, of which a rule has both derivatives."""

    @partial(custom_vjp, nondiff_argnums=(0,))
    def power(n, x, index, y):
        log.append("plain")
        return jnp.sum(x, -1) ** n * y["y"], None

    def forward(n, x, index, y):
        log.append("forward")
        return (jnp.sum(x, -1) ** n * y["y"], None), (x, y["y"])

    def backward(n, saved, cts):
        log.append("backward")
        x, y = saved
        dx = (cts[0] * n * y * jnp.sum(x, -1) ** (n - 1))[..., None] * jnp.ones_like(x)
        return dx, None, {"y": jnp.sum(cts[0] * jnp.sum(x, -1) ** n)}

    power.defvjp(forward, backward)
    return lambda x, y, n=3: power(n, x, np.arange(2), {"y": y})[0]


X, Y = np.arange(6, dtype=np.float32).reshape(2, 3) / 4, np.float32(1.5)


def test_reverse_mode_runs_the_forward_and_the_backward_rule_once():
    log: list[str] = []
    run = _toy(log)
    dx = jax.grad(lambda x: jnp.sum(run(x, Y)))(X)
    assert log == ["forward", "backward"]
    np.testing.assert_allclose(dx, np.broadcast_to(3 * Y * X.sum(1, keepdims=True) ** 2, X.shape), rtol=1e-6)
    log.clear()
    run(X, Y)
    assert log == ["plain"]


@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("inner", [jax.jacfwd, jax.jacrev])
def test_second_derivatives_are_the_same_by_every_mixture_of_modes(outer, inner):
    run = _toy([])

    @jax.jit
    def twice(x, y):
        return outer(inner(lambda x, y: jax.vmap(run, (0, None))(x[:, None], y), argnums=(0, 1)), argnums=(0, 1))(x, y)

    plain = lambda x, y: jnp.sum(x, -1)[:, None] ** 3 * y  # noqa: E731
    want = jax.hessian(plain, argnums=(0, 1))(X, Y)
    for one, truth in zip(jax.tree.leaves(twice(X, Y)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, truth, rtol=1e-5, atol=1e-5)


def test_forward_mode_passes_through_scan_and_checkpoint():
    run = _toy([])
    step = jax.checkpoint(lambda x, _: (x + run(x, Y)[:, None] / 9, None))
    plain = lambda x, _: (x + (jnp.sum(x, -1) ** 3 * Y)[:, None] / 9, None)  # noqa: E731

    def derivatives(step):
        loss = lambda x: jnp.sum(jax.lax.scan(step, x / 9, length=2)[0] ** 2)  # noqa: E731
        return jax.jit(jax.hessian(loss))(X)

    np.testing.assert_allclose(derivatives(step), derivatives(plain), rtol=1e-5, atol=1e-6)


def test_a_shard_map_that_checks_what_differs_between_devices_has_no_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "device", lambda: dispatch.Target("TPU v6 lite", "tpu"))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    for check, name in ((True, "xla"), (False, "mosaic_tpu")):
        attend = partial(flash_attention, causal=True)
        sharded = jax.shard_map(attend, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=check)
        shape = jax.ShapeDtypeStruct((2, 1024, 2, 128), jnp.bfloat16)
        with dispatch.choosing() as made:
            jax.eval_shape(sharded, shape, shape, shape)
        assert [choice.implementation for choice in made.values()] == [name]
        assert not check or "give it check_vma=False" in dict(next(iter(made.values())).why_not)["mosaic_tpu"]


def test_devices_of_a_shard_map_differentiate_their_own_parts_and_sum_what_they_share():
    """With JAX's check of what differs between devices, which is on by default."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    random = np.random.default_rng(0)
    x, bias, matrices = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((600, 6), (6,), (3, 6, 6)))
    sizes = jnp.asarray([100, 0, 150], jnp.int32)

    def sharded(f):
        return jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))

    def products(implementation):
        return sharded(lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation))

    pairs = [(sharded(lambda x, b: softmax(x + b)), sharded(lambda x, b: jax.nn.softmax(x + b)), bias)]
    plain = sharded(lambda x, w: jax.lax.ragged_dot(x, w, sizes))
    pairs += [(products(name), plain, matrices) for name in ("xla", "xla_tiles")]

    def attention(implementation):
        def attend(x, b):
            q = jnp.concatenate([x, x])[None, :, None]  # 600 tokens on each device: some tiles are skipped
            return flash_attention(q, q * b, q, causal=True, implementation=implementation)[0, :, 0]

        return sharded(attend)

    pairs.append((attention("xla"), attention("dense"), bias))
    for ours, theirs, shared in pairs:
        move = (x, shared), (x**2, shared * 2)
        grads = [jax.jit(jax.grad(lambda p, f=f: jnp.sum(f(x, p) ** 2)))(shared) for f in (ours, theirs)]
        tangents = [jax.jit(lambda f=f, move=move: jax.jvp(f, *move)[1])() for f in (ours, theirs)]
        for got, want in (grads, tangents):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5 * float(jnp.abs(want).max()))
    few = jnp.asarray(random.normal(size=(2, 5)), jnp.float32)
    each = [
        jax.shard_map(jax.jacfwd(f), mesh=mesh, in_specs=P("x"), out_specs=P("x")) for f in (softmax, jax.nn.softmax)
    ]
    np.testing.assert_allclose(*(jax.jit(f)(few) for f in each), atol=1e-6)
