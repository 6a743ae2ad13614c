"""sharded_cross_entropy: the same loss and gradients on every layout, with one merge."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import LayoutError
from jaxscale.layout import Layout, Rules
from jaxscale.parallel import sharded_cross_entropy
from pallas_kernels.cut_cross_entropy import linear_cross_entropy
from pallas_kernels.errors import KernelError
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.long import short

B, S, E, V = 8, 4, 16, 64
OPTIONS = dict(softcap=2.0, z_loss=0.1, label_smoothing=0.1, return_lse=True, return_entropy=True)
# A vocabulary over two axes, as in a pipeline; the outer one is named second in the mesh.
TWO = Rules(
    params={"vocab": ("tensor", "expert")},
    activations={"batch": "data", "vocab": ("tensor", "expert")},
)
# Layout -> the collectives of a forward pass, and the additional ones of the backward pass.
LAYOUTS = {
    Layout("data=8", "replicated"): ([], ["all-reduce"]),
    Layout("fsdp=8"): (["all-gather"], ["all-gather", "reduce-scatter"]),
    Layout("data=2,fsdp=4", "zero2"): ([], ["reduce-scatter"]),
    Layout("data=2,tensor=4"): (["all-gather"], ["all-reduce"] * 2),
    Layout("context=2,fsdp=2,tensor=2"): (["all-gather"] * 2, ["all-gather", *["all-reduce"] * 2, "reduce-scatter"]),
    Layout("data=2,expert=2,tensor=2", TWO): (["all-gather"], ["all-reduce"] * 2),
}  # fmt: skip


def arrays(dtype=jnp.float32):
    random = np.random.default_rng(0)
    x, w, d = (jnp.asarray(random.normal(size=s), jnp.float32) for s in ((B, S, E), (V, E), (3, B, S)))
    return x.astype(dtype), w, d, jnp.asarray(random.integers(0, V, (B, S)), jnp.int32)


def both_ways(f, **options):
    def run(x, w, d, targets):
        y, pull = jax.vjp(lambda x, w: f(x, w, targets, **options), x, w)
        return *y, *pull(tuple(d[: len(y)]))

    return run


def collectives(compiled):
    names = r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return sorted(re.findall(names, compiled.as_text()))


@functools.cache
def whole():
    return jax.jit(both_ways(linear_cross_entropy, **OPTIONS))(*arrays())


@pytest.mark.parametrize("layout", short(3, LAYOUTS), ids=str)
def test_sharded_equals_whole_with_one_merge(layout):
    x, w, d, targets = arrays()
    forward, backward = LAYOUTS[layout]
    with layout:
        place = lambda a, *axes, kind="activations": jax.device_put(a, layout.sharding(axes, kind=kind))  # noqa: E731
        x, targets = place(x, "batch", "seq", "embed"), place(targets, "batch", "seq")
        d, w = place(d, None, "batch", "seq"), place(w, "vocab", "embed", kind="params")
        loss = jax.jit(lambda x, w, t: sharded_cross_entropy(x, w, t, **OPTIONS))
        step = jax.jit(both_ways(sharded_cross_entropy, **OPTIONS)).lower(x, w, d, targets).compile()
        assert collectives(loss.lower(x, w, targets).compile()) == forward
        assert collectives(step) == sorted(forward + backward)
        got = step(x, w, d, targets)
    assert_leaves_agree(got, whole(), what=f"on {layout}")


def test_the_weights_gradient_is_summed_in_its_own_type():
    layout = Layout("fsdp=4,tensor=2")
    with layout:
        x, w, d, targets = arrays(jnp.bfloat16)
        run = jax.jit(both_ways(sharded_cross_entropy, return_lse=True))
        assert [a.dtype for a in run(x, w, d, targets)[2:]] == [jnp.bfloat16, jnp.float32]
        text = run.lower(x, w, d, targets).as_text()
    assert re.search(r"reduce_scatter.*?tensor<32x16xf32>", text, re.S)


def test_without_a_layout_it_is_the_op():
    assert_leaves_agree(jax.jit(both_ways(sharded_cross_entropy, **OPTIONS))(*arrays()), whole())


def test_ignored_weighted_and_wrong_targets_are_those_of_the_op():
    x, w, _, targets = arrays()
    targets = targets.at[0].set(-100).at[1, 0].set(V)
    weights = jnp.linspace(0, 1, B * S).reshape(B, S)
    f = lambda f: jax.jit(lambda t: f(x, w, t, ignore_index=-100, weights=weights))(targets)  # noqa: E731
    with Layout("data=2,fsdp=2,tensor=2"):
        got = f(sharded_cross_entropy)
    np.testing.assert_allclose(got, f(linear_cross_entropy), rtol=1e-5)
    assert np.isnan(got).sum() == 1 and not np.asarray(got[0]).any()


@pytest.mark.parametrize(
    "layout,vocab", [(Layout("data=2,tensor=4"), 61), (Layout("data=2,expert=2,tensor=2", TWO), 5)], ids=str
)
def test_rows_that_fill_up_a_vocabulary_count_for_nothing(layout, vocab):
    x, w, d, targets = arrays()
    x, w, targets = jnp.abs(x), -5 * jnp.abs(w[:vocab]), targets % vocab  # all logits far below 0, the logit of padding
    for options in (dict(OPTIONS, softcap=100.0), dict(return_lse=True)):
        want = jax.jit(both_ways(linear_cross_entropy, **options))(x, w, d, targets)
        assert want[1].max() < -10
        with layout:
            got = jax.jit(both_ways(sharded_cross_entropy, **options))(x, w, d, targets)
        assert_leaves_agree(got, want, what=f"on {layout}")


def test_rows_that_do_not_divide_are_refused():
    x, w, _, targets = arrays()
    with Layout("data=8"), raises_saying(LayoutError, "the logits", "'batch'", "shards 6 over 8"):
        sharded_cross_entropy(x[:6], w, targets[:6])


def test_a_vocabulary_on_the_axis_of_the_batch_is_refused():
    rules = Rules(activations={"batch": "data", "vocab": "data"})
    x, w, _, targets = arrays()
    with Layout("data=8", rules), raises_saying(LayoutError, "both 'batch' and 'vocab'", "'data'"):
        sharded_cross_entropy(x, w, targets)


def test_inside_a_shard_map_that_cuts_the_vocabulary_it_is_the_same():
    x, w, _, targets = arrays()
    layout = Layout("data=2,tensor=4", Rules(activations={"vocab": ("data", "tensor"), "batch": None}))

    def loss_and_grads(x, w, targets):
        out, pull = jax.vjp(lambda x, w: sharded_cross_entropy(x, w, targets, z_loss=1e-2), x, w)
        return out, *pull(jnp.ones_like(out))

    spec = jax.P("data")
    cut = jax.shard_map(
        loss_and_grads, in_specs=(jax.P(), spec, jax.P()), out_specs=(jax.P(), jax.P(), spec), axis_names={"data"},
        check_vma=False,
    )  # fmt: skip
    with layout:
        got = jax.jit(cut)(x, w, targets)
    for a, b in zip(got, jax.jit(loss_and_grads)(x, w, targets), strict=True):
        assert_leaves_agree(a, b)


def test_a_head_kept_the_other_way_is_refused():
    x, w, _, targets = arrays()
    with pytest.raises(KernelError, match=r"sharded_cross_entropy: w of shape \(16, 64\) as w_layout='ve'"):
        sharded_cross_entropy(x, w.T, targets)


def test_vectors_that_a_layout_splits_are_refused():
    x, w, _, targets = arrays()
    with Layout("tensor=2", Rules(activations={"embed": "tensor"})):
        with raises_saying(LayoutError, "'embed'", "tensor", "materialised"):
            sharded_cross_entropy(x, w, targets)
