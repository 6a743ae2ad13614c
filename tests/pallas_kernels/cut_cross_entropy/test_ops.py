"""The cut loss besides its values: memory, targets, shards, the filter's report, and errors."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.parallel import sharded_cross_entropy
from pallas_kernels import chosen, cut_cross_entropy
from pallas_kernels.cut_cross_entropy import (
    NAMES,
    Logits,
    Merged,
    filtered_share,
    gradients,
    linear_cross_entropy,
    merge,
    parts,
    xla,
)
from pallas_kernels.dispatch import KernelError
from tests.pallas_kernels.cut_cross_entropy.cases import arrays_in

N, V, E = 40, 90, 8


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", (16, 24))
    monkeypatch.setattr(xla, "FILTER_TILE", (8, 10))


def arrays(dtype=jnp.float32, seed=0, spread=1.0):
    random = np.random.default_rng(seed)
    x, w = (jnp.asarray(random.normal(size=shape) * spread, dtype) for shape in ((N, E), (V, E)))
    return x, w, random.integers(0, V, N).astype(np.int32)


def close(got, want, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), got, want)


# ---- memory


@pytest.mark.parametrize("options", [{}, {"filter": 0.1, "label_smoothing": 0.1, "softcap": 3.0}], ids=str)
def test_no_array_is_as_large_as_the_logits_forward_or_backward(options):
    x, w, targets = arrays()
    f = lambda x, w: linear_cross_entropy(x, w, targets, **options).sum()  # noqa: E731
    largest = lambda f: max(math.prod(a.shape) for a in arrays_in(jax.make_jaxpr(f)(x, w).jaxpr))  # noqa: E731
    assert largest(f) <= V * E
    assert largest(jax.grad(f, (0, 1))) <= V * E
    assert largest(lambda x, w: linear_cross_entropy(x, w, targets, implementation="dense")) == N * V


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_compiled_program_holds_a_few_tiles_and_one_gradient(dtype, monkeypatch):
    monkeypatch.setattr(xla, "TILE", (128, 128))
    n, v, e = 1000, 5000, 64
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((n, e), dtype), ((v, e), dtype), ((n,), "int32"))]
    f = lambda x, w, t: linear_cross_entropy(x, w, t, softcap=3.0).sum()  # noqa: E731
    temporaries = [
        jax.jit(g).lower(*shapes).compile().memory_analysis().temp_size_in_bytes for g in (f, jax.grad(f, (0, 1)))
    ]
    tiles = 4 * 4 * (128 * 128 + 2 * 128 * e) + 10 * 4 * n
    assert temporaries[0] <= tiles and temporaries[1] <= tiles + 4 * n * e, temporaries
    assert tiles + 4 * n * e < 0.1 * 4 * n * v


# ---- targets


@pytest.mark.parametrize("wrong", [-1, V, 2**31 - 1])
def test_a_target_out_of_range_is_never_a_number_in_a_traced_program(wrong):
    x, w, targets = arrays()
    targets[3] = wrong

    @jax.jit
    def value(x, w, targets):
        f = lambda x, w: linear_cross_entropy(x, w, targets)  # noqa: E731
        loss, pull = jax.vjp(f, x, w)
        return loss, *pull(jnp.ones_like(loss))

    loss, dx, dw = value(x, w, targets)
    assert np.flatnonzero(np.isnan(loss)).tolist() == [3]
    assert np.isnan(dx[3]).all() and np.isfinite(np.delete(dx, 3, 0)).all() and np.isnan(dw).any()


def test_a_target_out_of_range_is_named_where_it_is_known():
    x, w, targets = arrays()
    targets[3] = V
    with pytest.raises(KernelError, match=r"the target 90 at \(3,\) is not in a vocabulary of 90.*ignore_index"):
        linear_cross_entropy(x, w, targets)
    jax.eval_shape(lambda x, w: linear_cross_entropy(x, w, targets, ignore_index=V), x, w)


@pytest.mark.parametrize("dtype", ["uint8", "uint32"])
def test_targets_of_any_integer_type_are_the_same_targets(dtype):
    x, w, targets = arrays()
    f = jax.jit(linear_cross_entropy)
    close(f(x, w, targets.astype(dtype)), f(x, w, targets))


def test_all_ignored_is_zero_with_no_gradient():
    x, w, _ = arrays()
    f = lambda x, w: linear_cross_entropy(x, w, np.full(N, -100), ignore_index=-100, z_loss=0.1).sum()  # noqa: E731
    loss, grads = jax.jit(jax.value_and_grad(f, (0, 1)))(x, w)
    assert loss == 0 and not any(np.asarray(g).any() for g in grads)


def test_no_tokens_are_no_losses():
    x, w, _ = arrays()
    f = lambda x, w: linear_cross_entropy(x, w, np.zeros(0, np.int32)).sum()  # noqa: E731
    dx, dw = jax.jit(jax.grad(f, (0, 1)))(x[:0], w)
    assert dx.shape == (0, E) and not dw.any()


# ---- pieces of a vocabulary


def test_pieces_of_the_vocabulary_merge_to_the_whole_gradients_too():
    x, w, targets = arrays()
    logits = Logits(softcap=3.0, summed=True, entropy=True)
    slopes = Merged(*jnp.asarray(np.random.default_rng(1).normal(size=(4, N)), jnp.float32))

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def run(count, implementation, x, w, targets):
        pieces = [(piece, targets - i * (V // count)) for i, piece in enumerate(jnp.split(w, count))]
        pieces_parts = [parts(x, *piece, logits, implementation) for piece in pieces]
        merged = merge(jax.tree.map(lambda *a: jnp.stack(a), *pieces_parts))
        whole = merged.lse, slopes, logits, implementation
        grads = [gradients(x, *piece, *whole, entropy=merged.entropy) for piece in pieces]
        return merged, sum(dx for dx, _ in grads), jnp.concatenate([dw for _, dw in grads])

    want = run(1, "dense", x, w, targets)
    for count, implementation in ((1, "xla"), (3, "xla"), (3, "dense")):
        close(run(count, implementation, x, w, targets), want)


def test_entropies_of_shards_have_all_digits_where_logits_are_large():
    x, w = jnp.full((2, 1), 1e4), jnp.ones((V, 1))
    pieces = [parts(x, piece, jnp.zeros(2, jnp.int32), Logits(entropy=True)) for piece in jnp.split(w, 3)]
    merged = merge(jax.tree.map(lambda *a: jnp.stack(a), *pieces))
    np.testing.assert_allclose(merged.entropy, math.log(V), rtol=1e-6)


def test_the_weights_gradient_has_the_requested_dtype():
    x, w, targets = arrays(jnp.bfloat16)
    slopes = Merged(jnp.ones(N), -jnp.ones(N), None)
    f = lambda dtype: gradients(x, w, targets, jnp.full(N, 5.0), slopes, Logits(), dw_dtype=dtype)[1]  # noqa: E731
    wide, narrow = jax.jit(lambda: (f("float32"), f("bfloat16")))()
    assert wide.dtype == jnp.float32 and narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)


# ---- the filter


def blocks_below(x, w, targets, threshold):
    """Return the share of 8 x 10 blocks of probabilities less labels that nowhere exceed a threshold, in float64."""
    logits = np.float64(x) @ np.float64(w).T
    share = np.exp(logits - logits.max(1, keepdims=True))
    share /= share.sum(1, keepdims=True)
    share[np.arange(N), targets] -= 1
    blocks = np.abs(share).reshape(N // 8, 8, V // 10, 10)
    return (blocks.max((1, 3)) <= threshold).mean()


def test_the_filters_report_is_what_is_below_the_threshold():
    x, w, targets = arrays(spread=3.0)
    for threshold in (2.0**-12, 1e-2):
        share = float(filtered_share(x, w, targets, filter=threshold))
        assert share == pytest.approx(blocks_below(x, w, targets, threshold), abs=1e-6)
        assert 0.02 < share < 0.9


def test_the_filter_changes_a_gradient_by_less_than_the_threshold_but_not_by_nothing():
    x, w, targets = arrays(spread=3.0)
    f = lambda x, **options: linear_cross_entropy(x, w, targets, **options).sum()  # noqa: E731
    exact, got = (jax.jit(jax.grad(functools.partial(f, filter=share)))(x) for share in (None, 1e-2))
    error = np.abs(np.asarray(got - exact))
    assert error.max() > 1e-3 and (error <= 1e-2 * np.abs(w).sum(0)).all()


def test_tokens_that_do_not_count_keep_no_block():
    x, w, targets = arrays()
    weights = np.zeros(N, np.float32)
    assert float(filtered_share(x, w, targets, filter=0.0, weights=weights)) == 1
    assert float(filtered_share(x, w, targets, filter=0.0)) == 0


# ---- composition


def test_it_goes_under_vmap_scan_remat_and_grad():
    x, w, targets = arrays(jnp.bfloat16)
    f = lambda x, t: linear_cross_entropy(x, w, t, filter=0.0).sum()  # noqa: E731
    want = jax.jit(jax.grad(f))(x, targets).reshape(4, -1, E)
    xs, ts = x.reshape(4, -1, E), targets.reshape(4, -1)

    def scanned(xs):
        body = jax.checkpoint(lambda total, xs: (total + f(*xs), None), prevent_cse=False)
        return jax.lax.scan(body, 0.0, (xs, ts))[0]

    for got in (jax.jit(jax.grad(scanned))(xs), jax.jit(jax.vmap(jax.grad(f)))(xs, ts)):
        close(got.astype(jnp.float32), want.astype(jnp.float32), 2e-2)


@pytest.mark.parametrize("filter", [None, 0.0])
def test_in_a_shard_map_that_checks_what_differs_it_is_the_same(filter):
    x, w, targets = arrays()

    def run(x, w, targets):
        f = functools.partial(linear_cross_entropy, return_entropy=True, filter=filter)
        (loss, entropy), pull = jax.vjp(lambda x, w: f(x, w, targets), x, w)
        return loss, entropy, *pull((jnp.ones_like(loss), jnp.cos(entropy)))

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = jax.P("data"), jax.P()
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(split, whole, split), out_specs=(split, split, split, whole))
    close(jax.jit(mapped)(x, w, targets), jax.jit(run)(x, w, targets))


@pytest.mark.parametrize("op", [linear_cross_entropy, sharded_cross_entropy], ids=["op", "sharded"])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_policy_that_saves_its_names_keeps_the_forward_from_running_again(op, entropy):
    x, w, targets = arrays()
    x, targets = x[None], targets[None]
    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)

    def f(x):
        return jnp.sum(jnp.stack(op(x, w, targets, return_lse=True, return_entropy=entropy)))

    count = lambda f: str(jax.make_jaxpr(jax.grad(f))(x)).count("dot_general")  # noqa: E731
    assert count(jax.checkpoint(f, policy=policy)) == count(f) < count(jax.checkpoint(f))


def test_the_choice_is_recorded():
    jax.eval_shape(linear_cross_entropy, *arrays())
    assert chosen("linear_cross_entropy")[-1].implementation == "xla"


# ---- refusals

X, W, T = jnp.zeros((6, 4)), jnp.zeros((9, 4)), np.zeros(6, np.int32)


@pytest.mark.parametrize(
    ("inputs", "options", "words"),
    [
        ((X.astype(jnp.int32), W, T), {}, ("x is int32", "x.astype")),
        ((X, W.astype(jnp.int8), T), {}, ("w is int8", "w.astype")),
        ((X[0], W, T), {}, ("(tokens, width)", "(4,)")),
        ((X, W[0], T), {}, ("w has to be a matrix", "(4,)")),
        ((X, jnp.zeros((9, 5)), T), {}, ("no axis of w", "(9, 5)", "4")),
        ((X, jnp.zeros((4, 4)), T), {}, ("either axis of w", "w_layout='ve'")),
        ((X, W, T), {"w_layout": "ev"}, ("(9, 4)", "w_layout='ev'", "width of 9", "4")),
        ((X, W, T), {"w_layout": "vw"}, ("'ve'", "'vw'")),
        ((X, W, T[:5]), {}, ("targets of shape (6,)", "(5,)")),
        ((X, W, T * 1.0), {}, ("targets have to be integers", "float")),
        ((X, W, T), {"weights": T}, ("weights have to be floating", "int32")),
        ((X, W, T), {"weights": np.ones(5, np.float32)}, ("weights", "(6,)", "(5,)")),
        ((X, W, T), {"softcap": 0.0}, ("softcap", "greater than 0", "0.0")),
        ((X, W, T), {"z_loss": -1.0}, ("z_loss", "at least 0", "-1.0")),
        ((X, W, T), {"z_loss": "big"}, ("z_loss", "a number", "'big'")),
        ((X, W, T), {"label_smoothing": 1.0}, ("label_smoothing", "at least 0 and below 1", "1.0")),
        ((X, W, T), {"filter": -0.1}, ("filter", "at least 0 and below 1", "-0.1")),
        ((X, W, T), {"ignore_index": 1.5}, ("ignore_index", "integer", "1.5")),
        ((X, W, T.astype(np.uint8)), {"ignore_index": -100}, ("uint8", "ignore_index=-100", "int32")),
        ((X, W, T), {"implementation": "xlaa"}, ("xlaa", "did you mean 'xla'")),
        ((X, W, T), {"implementation": "dense", "filter": 0.1}, ("'dense'", "has no filter", "filter=None")),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) and isinstance(x[0], str) else "",
)
def test_arguments_that_do_not_fit_raise_one_sentence(inputs, options, words):
    with pytest.raises(KernelError) as caught:
        linear_cross_entropy(*inputs, **options)
    message = str(caught.value)
    assert "\n" not in message and all(w in message for w in words), message


def test_an_option_that_is_being_traced_is_refused():
    with pytest.raises(KernelError, match="z_loss has to be known before tracing"):
        jax.jit(lambda z: linear_cross_entropy(X, W, T, z_loss=z))(1.0)


def test_either_axis_may_be_the_vocabulary_of_a_square_weight():
    x, w, targets = arrays()
    w, targets = w[:E], targets % E
    f = lambda w, n: jax.jit(functools.partial(linear_cross_entropy, w_layout=n))(x, w, targets)  # noqa: E731
    ve, ev = f(w, "ve"), f(w.T, "ev")
    close(ve, ev)


def test_the_old_name_of_arguments_is_answered_with_the_new_one():
    with pytest.raises(AttributeError, match="no attribute 'Given'; it is now 'Arguments'"):
        cut_cross_entropy.Given  # noqa: B018
