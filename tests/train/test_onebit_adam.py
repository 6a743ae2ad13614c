"""1-bit Adam: Adam in NumPy, then momentum whose signs are exchanged with both errors fed back, on every mesh."""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.parallel import SignWire
from jaxscale.step import OneBitAdam, check
from tests.truth.errors import raises_saying
from tests.truth.replicas import MESHES, STEPS, config, crossing, local_gradients, rounded, trained
from tests.truth.runs import assert_same_bits

ADAM = OneBitAdam(replicas=2, exact_steps=3)


@functools.cache
def in_numpy():
    """The parameters after all steps, in float64."""
    params, gradient = local_gradients()
    m, v, server = ({k: 0 * x for k, x in params.items()} for _ in range(3))
    own = [{k: 0 * x for k, x in params.items()} for _ in range(2)]
    for i in range(STEPS):
        grads = [gradient(r, i, params) for r in range(2)]
        new = {}
        for k in params:
            if i < ADAM.exact_steps:
                g = np.mean([g[k] for g in grads], 0)
                m[k], v[k] = 0.9 * m[k] + 0.1 * g, 0.95 * v[k] + 0.05 * g**2
            else:
                sent = []
                for r in range(2):
                    x = 0.9 * m[k] + 0.1 * grads[r][k] + own[r][k]
                    sent.append(rounded(x, SignWire()))
                    own[r][k] = x - sent[r]
                total = np.mean(sent, 0) + server[k]
                mean = rounded(total, SignWire())
                server[k] = total - mean
                m[k] = np.where(v[k] > 0, mean, 0)
            root = np.sqrt(v[k] / (1 - 0.95 ** min(i + 1, ADAM.exact_steps))) + 1e-8
            new[k] = params[k] - 1e-2 * (m[k] / (1 - 0.9 ** (i + 1)) / root + 0.1 * params[k])
        params = new
    return params


@pytest.mark.parametrize(
    "mesh", ["replica, fsdp", *(pytest.param(m, marks=pytest.mark.long) for m in MESHES if m != "replica, fsdp")]
)
def test_parameters_are_those_of_numpy(mesh):
    state = trained(MESHES[mesh], algorithm=ADAM)
    for k, want in in_numpy().items():
        apart = np.abs(np.asarray(state.params[k]["weight"]) - want)
        # the sign of a number that is nearly 0 may be either, and Adam divides by the root of its variance
        assert np.mean(apart > 1e-5) < 0.01, (k, apart.max())


def test_after_the_warm_up_a_bit_crosses_replica_for_each_number():
    exchanged, stated = crossing(MESHES["replica, fsdp"], algorithm=ADAM)
    exact = [c for c in exchanged if c.kind == "all-reduce"]
    bits = [c for c in exchanged if c.kind != "all-reduce"]
    assert sum(c.sent for c in bits) == stated == 2 * 32 * 8 // 8 + 2 * 32 * 4  # signs, and a scale for each row
    assert sum(c.sent for c in exact) == 2 * 32 * 8 * 4 // 2  # of the warm-up, cut by fsdp
    assert not any(c.certain for c in exchanged), "under a branch"


@pytest.mark.long
def test_a_run_that_stops_and_goes_on_has_the_same_bits(tmp_path):
    one = config(algorithm=ADAM, layout=Layout("replica=2"))
    js.fit(one, run=tmp_path / "run", until=4, quiet=True)
    run = js.fit(run=tmp_path / "run", resume=True, quiet=True)
    assert_same_bits(run.state, trained(one.layout, algorithm=ADAM))


def test_what_does_not_fit_is_refused_and_an_unused_optimizer_is_a_warning(caplog):
    with raises_saying(ConfigError, "OneBitAdam.exact_steps = 0", "at least 1"):
        OneBitAdam(exact_steps=0)
    with raises_saying(ConfigError, "OneBitAdam.b1 = 1.0"):
        OneBitAdam(b1=1.0)
    with raises_saying(ConfigError, "OneBitAdam.wire = None", "SignWire()"):
        OneBitAdam(wire=None)
    with raises_saying(ConfigError, "train.lr", "use AdamW()"):
        check(config(algorithm=ADAM, optimizer=optax.sgd(0.1)))
    experts = js.nn.MixtureOfExperts(experts=4, router=js.nn.SigmoidRouter())
    with raises_saying(ConfigError, "load biases of routers", "DiLoCo()"):
        check(config(algorithm=ADAM, model=js.models.Transformer.Config(depth=1, width=16, heads=2, mlp=experts)))
    check(config(algorithm=ADAM, optimizer=js.optim.SGD()))
    assert any("optimizer" in m for m in caplog.messages)
