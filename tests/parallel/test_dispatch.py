"""Every dispatcher against float64 NumPy, with 90% of the tokens at one expert; and messages."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.errors import ConfigError, LayoutError
from jaxscale.layout import Layout, Rules, preset
from jaxscale.nn import ExpertChoiceRouter, MixtureOfExperts
from jaxscale.parallel import Arithmetic, Capacity, Choices, IntegerWire, SignWire, Weights, expert_mlp
from jaxscale.parallel.dispatch import (
    AllGatherDispatch,
    DroplessDispatch,
    ExpertAxes,
    FusedDispatch,
    HierarchicalDispatch,
    SlotDispatch,
)
from jaxscale.parallel.dispatch.hierarchical import _once
from jaxscale.parallel.expert_products import Biases, ExpertsOf, ProductSettings, why_separate
from pallas_kernels import grouped_experts
from pallas_kernels.dispatch import on_device
from tests.truth.compare import assert_leaves_agree
from tests.truth.errors import raises_saying
from tests.truth.long import short

EXPERTS, EMBED, HIDDEN, TOP = 8, 4, 4, 3
CODES = IntegerWire(feedback=False)
CODED = HierarchicalDispatch(payload=CODES, within=AllGatherDispatch(CODES))
BOTH = HierarchicalDispatch(within=AllGatherDispatch())


def _inputs():
    """Tokens, choices of which the first is expert 5 for 90% of the tokens and some are none, weights, cotangents."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)  # noqa: E731
    ids = np.argsort(random.normal(size=(8, 8, EXPERTS)))[..., :TOP].astype(np.int32)
    ids[ids == 5] = EXPERTS
    ids[..., 0] = np.where(random.permutation(64).reshape(8, 8) < 58, 5, ids[..., 0])
    scale = random.uniform(0.5, 1.5, size=ids.shape).astype(np.float32)
    matrices = draw(EXPERTS, EMBED, HIDDEN), draw(EXPERTS, EMBED, HIDDEN), draw(EXPERTS, HIDDEN, EMBED)
    return ids, (draw(8, 8, EMBED), scale, *matrices), draw(8, 8, EMBED)


def _on_paper(ids, inputs, d):
    """Outputs, and gradients of `sum(y * d)`, of `down(square(gate(x)) * up(x))`: each expert on all tokens."""
    x, scale, gate, up, down = (a.astype(np.float64) for a in inputs)
    chosen = ids[..., None] == np.arange(EXPERTS)
    of = np.einsum("bsk,bskx->bsx", scale, chosen)
    g, u = (np.einsum("bse,xef->bsxf", x, w) for w in (gate, up))
    out = np.einsum("bsxf,xfe->bsxe", g * g * u, down)
    dscale = np.einsum("bskx,bsxe,bse->bsk", chosen, out, d)
    dh = np.einsum("bsx,bse,xfe->bsxf", of, d, down)
    dg, du = 2 * dh * g * u, dh * g * g
    dx = np.einsum("bsxf,xef->bse", dg, gate) + np.einsum("bsxf,xef->bse", du, up)
    dgate, dup = (np.einsum("bse,bsxf->xef", x, a) for a in (dg, du))
    ddown = np.einsum("bsxf,bsx,bse->xfe", g * g * u, of, d)
    return np.einsum("bsx,bsxe->bse", of, out), (dx, dscale, dgate, dup, ddown)


def _program(dispatcher, layout, saves=True):
    """Outputs and gradients as a function, compiled on the layout once."""
    capacity = Capacity(2, 2) if dispatcher.needs_capacity else None  # as many slots as tokens

    @jax.jit
    def run(ids, inputs, d):
        def loss(inputs):
            x, scale, gate, up, down = inputs
            y = expert_mlp(
                x,
                Choices(ids, scale),
                Weights(gate, up, down),
                act=jnp.square,
                arithmetic=Arithmetic.cast(jnp.float32),
                capacity=capacity,
                dispatcher=dispatcher,
                saves=saves,
            )
            return jnp.sum(y * d), y

        grads, y = jax.grad(loss, has_aux=True)(inputs)
        return y, grads

    def on(*args):
        with layout:
            return run(*args)

    return on


def _rounded(a):
    codes, scales = CODES.encode(jnp.asarray(a)[..., None, :])
    return np.asarray(CODES.decode(codes, scales))[..., 0, :]


def _check(dispatcher, layout, saves=True):
    """One expert has nine tokens of ten; then each expert returns 1, so that outputs count experts."""
    ids, inputs, d = _inputs()
    assert np.mean(np.any(ids == 5, axis=-1)) > 0.9
    run = _program(dispatcher, layout, saves)
    y, grads = run(ids, inputs, d)
    coded = dispatcher in (CODED, DroplessDispatch(CODES), SlotDispatch(CODES))
    x, *rest = inputs
    want = _on_paper(ids, (_rounded(x), *rest), _rounded(d)) if coded else _on_paper(ids, inputs, d)
    assert_leaves_agree(y, want[0], what="outputs")
    if coded:  # the derivative of a weight is of the output and the cotangent that its expert received
        assert np.linalg.norm(y - _on_paper(ids, inputs, d)[0]) > 1e-4 * np.linalg.norm(y), "nothing was rounded"
    assert_leaves_agree(grads, want[1], what="gradients")
    ones = jax.tree.map(np.ones_like, inputs)
    mean = [a / a.shape[1] for a in ones[2:]]
    np.testing.assert_allclose(run(ids, (*ones[:2], *mean), d)[0][..., 0], np.sum(ids < EXPERTS, axis=-1), rtol=1e-6)


FOLDED = Layout("expert=2,tensor=2", "folded", sequence_sharded=True)


@pytest.mark.parametrize(
    "dispatcher", short(3, [BOTH, HierarchicalDispatch(across="tensor"), FusedDispatch(), CODED, SlotDispatch(CODES)])
)
def test_outputs_and_gradients_are_those_on_paper_and_no_token_is_dropped(dispatcher):
    _check(dispatcher, FOLDED)


_AXES = ("data", "fsdp", "expert")
WIDE = Rules(
    params={**preset("fsdp_tensor").params, "experts": _AXES, "expert_embed": None},
    activations={**preset("fsdp_tensor").activations, "experts": _AXES},
)
PRODUCTS = [
    Layout("expert=4"),
    Layout("expert=2,data=2,tensor=2", sequence_sharded=True),
    Layout("expert=2,fsdp=2,data=2"),
    Layout("expert=2,context=2,tensor=2"),
    Layout("expert=2,context=2,tensor=2", "folded", sequence_sharded=True),
    Layout("data=2,tensor=4", "folded", sequence_sharded=True),
    Layout("data=2,expert=2,tensor=2", "folded", sequence_sharded=True),
    Layout("fsdp=2,context=2,tensor=2", "folded", sequence_sharded=True),
    Layout("data=2,fsdp=2,expert=2", WIDE),
    Layout("data=2,expert=2,tensor=2", WIDE),
    Layout("data=2,expert=2", "replicated"),
    Layout("data=2,expert=2,tensor=2", "zero2"),
]


@pytest.mark.long
@pytest.mark.parametrize("layout", PRODUCTS, ids=str)
def test_every_dispatcher_is_right_on_twelve_products_of_axes(layout):
    for dispatcher in (
        SlotDispatch(),
        DroplessDispatch(),
        AllGatherDispatch(),
        HierarchicalDispatch(),
        FusedDispatch(),
    ):
        try:
            _check(dispatcher, layout)
        except LayoutError as e:
            assert isinstance(dispatcher, HierarchicalDispatch) and "two mesh axes" in str(e)


@pytest.mark.parametrize(
    ("saves", "layout"),
    short(2, [*zip((True, False), [Layout("fsdp=2,expert=2,tensor=2"), *PRODUCTS[1:2]], strict=True),
              *((saves, layout) for layout in PRODUCTS for saves in (True, False))]),
)  # fmt: skip
def test_experts_in_kernels_are_those_on_paper(saves, layout, monkeypatch):
    """As if there were a kernel; what takes its place computes its outputs by separate products."""
    calls = []
    monkeypatch.setattr(grouped_experts, "why_not", lambda *a, **b: calls.append(b["saves"]))
    _check(DroplessDispatch(), layout, saves)
    assert set(calls) == {saves}


def test_why_experts_are_not_in_kernels():
    settings = ProductSettings(jnp.square, None, Arithmetic.cast(jnp.float32))
    rows, sizes, matrix = jnp.ones((3, 2)), jnp.ones(2, jnp.int32), jnp.ones((2, 2, 2))
    gated, rounded = Weights(matrix, matrix, matrix), Arithmetic.cast(jnp.bfloat16)
    rounded = dataclasses.replace(Arithmetic.cast(jnp.float32), forward=rounded.forward)
    for words, arguments in {
        "in slots": (rows, None, gated, None, settings),
        "no gate": (rows, sizes, gated._replace(gate=None), None, settings),
        "rounded": (rows, sizes, gated, None, dataclasses.replace(settings, arithmetic=rounded)),
        "no kernel for cpu": (rows, sizes, gated, None, settings),
    }.items():
        assert words in why_separate(*arguments)
    biases = Biases(jnp.ones((2, 2)), jnp.ones((2, 2)), jnp.ones((2, 2)))
    with on_device("TPU v5 lite"):
        assert why_separate(rows, sizes, gated, None, settings) is None
        assert why_separate(rows, sizes, gated, biases, settings) is None


def test_experts_that_are_not_fused_are_named_and_right(caplog):
    rows, scale = jnp.ones((1, 3, 2)), jnp.ones((1, 3, 1))
    ids = jnp.array([[[0], [1], [0]]])
    got = FusedDispatch()(rows, Choices(ids, scale), 2, lambda rows, scale, sizes: rows * scale, ExpertAxes())
    np.testing.assert_array_equal(got, rows)
    assert "FusedDispatch() sends and multiplies as DroplessDispatch(): the experts are a function" in caplog.text
    settings = ProductSettings(jnp.square, None, Arithmetic.cast(jnp.float32), ExpertAxes())
    weights = Weights(None, jnp.ones((2, 2, 2)), jnp.ones((2, 2, 2)))
    reasons = {
        None: ExpertsOf(weights, weights, None, None, settings),
        "biases": ExpertsOf(weights, weights, (None, None, jnp.ones((2, 2))), None, settings),
        "residual width": ExpertsOf(
            weights, weights, None, None, dataclasses.replace(settings, axes=ExpertAxes(gathered=("fsdp",)))
        ),
    }
    for words, experts in reasons.items():
        assert experts.why_not_fused is None if words is None else words in experts.why_not_fused


def test_a_token_goes_once_to_each_host_that_has_experts_of_it():
    hosts = jnp.array([[0, 2, 2], [1, 1, 1], [3, 0, 4]])  # of 4; 4 is none
    np.testing.assert_array_equal(_once(hosts, 4), [[0, 2, 4], [1, 4, 4], [3, 0, 4]])
    np.testing.assert_array_equal(_once(jnp.array([[0, 1, 1], [2, 1, 2]]), 2), [[0, 1], [2, 1]])


def test_a_dispatcher_and_a_capacity_that_do_not_go_together_are_refused():
    Some = functools.partial(MixtureOfExperts, experts=4)
    with raises_saying(ConfigError, "SlotDispatch", "capacity, 1.0", "dispatcher = DroplessDispatch()"):
        Some(dispatcher=SlotDispatch())
    Some(dispatcher=SlotDispatch(), capacity=1.0), Some(dispatcher=DroplessDispatch())
    with raises_saying(ConfigError, "AllGatherDispatch drops no token", "SlotDispatch(), or", "capacity = None"):
        Some(dispatcher=AllGatherDispatch(), capacity=1.0)
    assert Some(dispatcher=SlotDispatch(), capacity=1.0).dropless() == Some()
    with raises_saying(ConfigError, "use SlotDispatch()"):
        Some(dispatcher=AllGatherDispatch(), capacity=1.0, router=ExpertChoiceRouter())
    with raises_saying(ConfigError, "must be a Dispatcher", "DroplessDispatch()"):
        Some(dispatcher=DroplessDispatch)
    for within in (SlotDispatch(), HierarchicalDispatch(), DroplessDispatch, None):
        with raises_saying(ConfigError, "within", "AllGatherDispatch()"):
            HierarchicalDispatch(within=within)


def test_a_payload_that_keeps_errors_is_refused():
    for wire in (IntegerWire(), SignWire()):
        with raises_saying(ConfigError, "payload", f"set {type(wire).__name__}.feedback = False"):
            DroplessDispatch(wire)
    with raises_saying(ConfigError, "AllGatherDispatch.payload = 8", "IntegerWire()"):
        AllGatherDispatch(8)


def test_hierarchical_dispatch_names_the_mesh_axes_it_could_use():
    ids, inputs, d = _inputs()
    with raises_saying(LayoutError, "'expert' alone", "DroplessDispatch()", "Layout.rules = 'folded'"):
        _program(HierarchicalDispatch(), Layout("expert=4"))(ids, inputs, d)
    with raises_saying(LayoutError, "across = 'data'", "'expert', 'tensor'"):
        _program(HierarchicalDispatch(across="data"), FOLDED)(ids, inputs, d)
