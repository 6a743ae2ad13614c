"""QZO moves only the scales of integer weights: float64 NumPy with the same random numbers; codes stay bit for bit."""

from __future__ import annotations

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxscale as js
from jaxscale.errors import ConfigError
from jaxscale.layout import Layout
from jaxscale.models import TransformerConfig
from jaxscale.nn import GroupedIntegers, Stored
from jaxscale.step import QZO, Backprop, LoRA, Scales, TrainConfig, check, prepare
from jaxscale.units import human_bytes
from tests.truth import numpy_transformer
from tests.truth.errors import raises_saying
from tests.truth.layouts import in_force
from tests.truth.runs import assert_same_bits, bigram

MODEL = TransformerConfig(depth=2, width=16, heads=2, vocab=32, hidden=32)
DATA = js.data.synthetic(32, documents=8, length=16, seed=1)


def host(tree):
    return jax.tree.map(np.array, tree)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    settings = bigram(model=MODEL, steps=3, seq_len=8, data=DATA, eval_batches=0)
    return js.fit(TrainConfig(**settings), run=tmp_path_factory.mktemp("base") / "base", quiet=True)


def config(base, **changes):
    start = js.train.FromRun(str(base.path))
    settings = dict(model=MODEL, start=start, adapters=Scales(), algorithm=QZO(eps=1e-3), lr=1e-3, seq_len=8, data=DATA)
    return TrainConfig(**bigram(**settings | changes))


@pytest.mark.parametrize(
    ("bits", "group", "shape", "contracted"),
    [
        (4, None, (3, 8, 5), (-2,)),
        (4, None, (2, 4, 8, 5), (-3, -2)),
        (8, 2, (2, 4, 8, 5), (-3, -2)),
        (4, 4, (3, 5, 2, 8), (-1,)),
    ],
)
def test_codes_are_rounded_to_the_largest_number_of_a_group(bits, group, shape, contracted):
    kernel = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight = GroupedIntegers(bits=bits, group=group).encode(jnp.asarray(kernel), contracted)
    top, rows = 2 ** (bits - 1) - 1, np.moveaxis(kernel, contracted, range(len(contracted)))
    want = np.empty_like(rows, dtype=np.float64)
    n = group or rows.shape[len(contracted) - 1]
    for where in np.ndindex(*rows.shape[len(contracted) :]):
        each = rows[(..., *where)].astype(np.float64)
        groups = each.reshape(1, -1) if group is None else each.reshape(-1, n)
        scale = np.abs(groups).max(1, keepdims=True) / top
        want[(..., *where)] = (np.round(groups / scale) * scale).reshape(each.shape)
    got = np.moveaxis(np.asarray(weight.dense()), contracted, range(len(contracted)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert np.abs(np.asarray(dataclasses.replace(weight, scale=None).dense())).max() == top


@pytest.mark.parametrize(
    "layout", [None, pytest.param(Layout("data=2,fsdp=2,tensor=2"), marks=pytest.mark.long)], ids=str
)
def test_a_step_is_float64_numpy_and_no_code_changes(base, layout):
    run = prepare(one := config(base, layout=layout, algorithm=QZO(eps=1e-3, clip=0.05, perturbations=2), lr=2.0))
    with in_force(layout):
        state, batch = run.blueprint.init(0), run.place(run.loader, 0)
        scales, frozen = host((state.params, state.frozen))
        infos, rule, adaptation = run.blueprint.infos, one.algorithm, run.blueprint.adaptation
        slopes, moves = [], []
        for number in range(rule.perturbations):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 0), 0x4D655A4F)
            key = jax.random.fold_in(key, number)

            def drawn(info, key=key):
                own = jax.random.fold_in(key, zlib.crc32(info.path.encode()))
                keys = [jax.random.fold_in(own, layer) for layer in range(info.shape[0])]
                return np.stack([np.float64(jax.random.normal(k, info.shape[1:])) for k in keys])

            moves.append(jax.tree.map(drawn, infos))
            values = []
            for sign in (1, -1):
                moved = jax.tree.map(lambda s, z, sign=sign: s + sign * rule.eps * z, scales, moves[-1])
                whole = adaptation.over(moved, frozen)
                dense = jax.tree.map(  # in float64
                    lambda w: (
                        np.float64(dataclasses.replace(w, scale=None).dense()) * w.scale if hasattr(w, "codes") else w
                    ),
                    whole,
                    is_leaf=lambda x: hasattr(x, "codes"),
                )
                values.append(numpy_transformer.mean_loss(MODEL, dense, run.loader.batch_at(0)))
            slopes.append((values[0] - values[1]) / (2 * rule.eps))
        assert max(np.abs(slopes)) > rule.clip
        used = np.clip(slopes, -rule.clip, rule.clip) / rule.perturbations

        def new(s, *z):
            return np.maximum(s - one.lr * sum(u * z for u, z in zip(used, z, strict=True)), 0)

        want = jax.tree.map(new, scales, *moves)
        state, _ = run.step_of(one)(state, batch)
        for got, a, first in zip(*map(jax.tree.leaves, (host(state.params), want, scales)), strict=True):
            assert np.linalg.norm(got - a) <= 2e-3 * np.linalg.norm(a - first)
        assert any((np.array(s) == 0).any() for s in jax.tree.leaves(state.params)), "some would be negative"
        assert_same_bits(state.frozen, frozen)


def test_the_loss_falls_and_the_bytes_of_all_parameters_are_reported(base):
    settings = dict(algorithm=QZO(eps=3e-4, perturbations=4), steps=3)
    run = prepare(one := config(base, **settings))
    state, step, batch, losses = run.blueprint.init(0), run.step_of(one), run.loader.batch_at(0), []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.2
    matrices = 4 * 16 * 16 + 3 * 16 * 32
    rest = (2 * 32 * 16 + 16 + 2 * 2 * 16) * 4
    scales = 2 * (4 * 16 + 2 * 32 + 16)
    before, after = (human_bytes(n) for n in (2 * matrices * 4 + rest, 2 * matrices // 2 + scales * 4 + rest))
    text = run.blueprint.adaptation.describe()
    assert text.startswith(f"{scales} scales of 7") and f"take {after}, and {before} before" in text


@pytest.mark.long
def test_a_resumed_run_has_the_same_bits(base, tmp_path):
    one = config(base, algorithm=QZO(eps=3e-4), steps=3)
    whole = js.fit(one, run=tmp_path / "whole", quiet=True)
    js.fit(one, run=tmp_path / "parts", until=1, quiet=True)
    parts = js.fit(run=tmp_path / "parts", resume=True, quiet=True)
    assert_same_bits(parts.state, whole.state)


def test_what_does_not_fit_is_refused(base):
    with raises_saying(ConfigError, "train.adapters = @Scales()"):
        check(config(base, adapters=LoRA(rank=2, targets=("q",))))
    check(config(base))
    check(config(base, algorithm=Backprop()))
    with raises_saying(ConfigError, "Stored.group = 12", "the nearest that does is 8"):
        check(config(base, adapters=Scales(GroupedIntegers(group=12))))
    check(config(base, adapters=Scales(GroupedIntegers(group=8))))
    for wrong, message in (
        (dict(bits=9), "no numbers 'int9'"),
        (dict(group=0), "group = 0"),
        (dict(group=2.0), "group = 2"),
    ):
        with raises_saying(ConfigError, message):
            GroupedIntegers(**wrong)
    with raises_saying(ConfigError, "Scales.base must be Stored()"):
        Scales(base=None)
    with raises_saying(ConfigError, "Scales.base has scales of type e8m0", "'float32'"):
        Scales(base=Stored(scale="e8m0"))
    with raises_saying(ConfigError, "QZO.clip = 0"):
        dataclasses.replace(QZO(), clip=0)
