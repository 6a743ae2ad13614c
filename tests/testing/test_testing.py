"""The checks of `jaxscale.testing` accept correct parts and reject wrong ones."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.bring_your_own.recurrence import GatedRecurrence, Recurrence
from experiments.bring_your_own.vit import ViT
from jaxscale.layout import Layout
from jaxscale.models import Learned, Transformer, TransformerConfig
from jaxscale.nn import Bidirectional, MixtureOfExperts, MultiHead
from jaxscale.step import Distill, NextToken
from jaxscale.step.backprop import make_loss_and_grads
from jaxscale.testing import (
    Agreement,
    check_mixer,
    check_model,
    compare_layouts,
    compare_op,
    compare_optimizer,
    differences,
    random_batch,
)
from tests.truth.runs import Bigram

ONE = Layout("data=1")
TINY = TransformerConfig(depth=2, vocab=32, width=16, heads=2, hidden=32)


@dataclasses.dataclass(frozen=True)
class OfTheStack:
    """Optax's trust ratio, which takes the norm of all stacked layers together."""

    def make(self, learning_rate, infos):
        return optax.chain(optax.scale_by_trust_ratio(), optax.scale_by_learning_rate(learning_rate))


def test_an_optimizer_that_takes_the_norm_of_a_stack_is_reported():
    result = compare_optimizer(OfTheStack(), [Layout("fsdp=2,tensor=2")], model=TINY)
    assert not result.ok
    with pytest.raises(AssertionError) as caught:
        result.check()
    first, second, *_ = str(caught.value).splitlines()  # and no row of the layout, on which updates agree
    assert first == "updates on layers one by one: 18 of 21 leaves differ" and "0/runs/0/blocks/0/attn/k" in second


def _plain(x, w):
    return jax.nn.softmax(x @ w)


def _halved(x, w):
    """Has the correct value but half of the gradient by `w`."""
    return _plain(x, (w + jax.lax.stop_gradient(w)) / 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_op_is_as_exact_as_a_plain_one_in_its_value_and_each_gradient(dtype):
    x, w = (jax.random.normal(jax.random.key(i), (16, 16), dtype) for i in range(2))
    compare_op(_plain, _plain, x, w).check()
    row = compare_op(_halved, _plain, x, w).rows[f"{dtype} (16, 16)"]
    assert {what: result[0].ok for what, result in row.items()} == {
        "value": True,
        "gradient 0": True,
        "gradient 1": False,
    }


def test_a_gradient_that_is_zero_is_found_to_be():
    x = jax.random.normal(jax.random.key(0), (8, 8))
    op = lambda x, y: 2 * x + jax.lax.stop_gradient(y)  # noqa: E731
    compare_op(op, op, x, x).check()
    assert not compare_op(lambda x, y: 2 * x + y, op, x, x).ok


def test_integers_have_no_gradient():
    table, ids = jax.random.normal(jax.random.key(0), (8, 4)), jnp.array([3, 1, 3])
    row = compare_op(lambda t, i: t[i], lambda t, i: jnp.take(t, i, axis=0), table, ids).rows["float32 (3, 4)"]
    assert set(row) == {"value", "gradient 0"}


def test_a_table_says_where_and_in_what_it_differs():
    want = {"a": np.ones(4), "b": np.zeros(2)}
    result = differences({"a": np.ones(4), "b": np.array([0, np.nan])}, want)
    message = str(Agreement("two trees", {"here": {"leaves": result}, "there": {"leaves": differences(want, want)}}))
    assert "differs in leaves: b" in message and "inf" in message and "agrees" in message


@pytest.mark.parametrize("mixer", [GatedRecurrence(), MultiHead()], ids=lambda m: type(m).__name__)
def test_a_mixer_that_keeps_texts_apart_passes(mixer):
    check_mixer(mixer)


class Leaking(Recurrence):
    """Does not reset its state at a new document."""

    def __call__(self, x, context):
        return super().__call__(x, dataclasses.replace(context, segment_ids=None))


class Forgetful(Recurrence):
    """Resets its state at every decode step."""

    def __call__(self, x, context):
        return super().__call__(x, dataclasses.replace(context, cache=None))


@pytest.mark.parametrize(("wrong", "message"), [(Leaking, "in a packed row"), (Forgetful, "decoding a sequence")])
def test_a_mixer_that_mixes_documents_is_reported(wrong, message):
    class Wrong(GatedRecurrence):
        layer = wrong

    with pytest.raises(AssertionError, match=f"^Wrong: .*{message}"):
        check_mixer(Wrong())


@pytest.mark.long
def test_layouts_are_compared_on_arrays_of_other_shapes():
    random = np.random.default_rng(0)
    batch = random_batch(32)
    ids = np.argsort(random.random((8, 16, 32)), axis=2)[..., :3].astype(np.int32)
    logprobs = np.log(random.dirichlet(np.ones(4), (8, 16))[..., :3]).astype(np.float32)
    cached = {**batch, "teacher_ids": ids, "teacher_logprobs": logprobs}
    compare_layouts(TINY, [Layout("data=2,tensor=2")], batch=cached, objective=Distill(top=3)).check()


@pytest.mark.parametrize(
    ("model", "capabilities"),
    [
        (TINY, "Stackable Stageable Decodable LanguageModel Plannable"),
        (dataclasses.replace(TINY, attention=Bidirectional(), positions=Learned(16)), "Stackable Stageable"),
        (dataclasses.replace(TINY, mlp=MixtureOfExperts(experts=4, capacity=1.0)), "Decodable"),
        (Bigram(), "LanguageModel"),
        (ViT(depth=1), ""),
    ],
    ids=["transformer", "encoder", "experts", "language model", "vision"],
)
def test_a_model_keeps_what_its_capabilities_promise(model, capabilities):
    result = check_model(model)
    assert (
        set(capabilities.split()) <= set(result)
        if isinstance(model, TransformerConfig)
        else result == tuple(capabilities.split())
    )


class LateNorm(Transformer):
    """Its stages give twice the output of the whole model."""

    def finish(self, x):
        return 2 * super().finish(x)

    def hidden_and_stats(self, tokens, **inputs):
        x, stats = super().hidden_and_stats(tokens, **inputs)
        return x / 2, stats


@dataclasses.dataclass(frozen=True)
class WithLateNorm(TransformerConfig):
    def make(self, rngs):
        return LateNorm(self, rngs=rngs)


def test_a_model_whose_stages_make_something_else_is_named():
    with pytest.raises(AssertionError, match="WithLateNorm: begin, layers and finish together differ from hidden"):
        check_model(WithLateNorm(depth=1, vocab=32, width=16, heads=2, hidden=32))


@dataclasses.dataclass(frozen=True)
class FaintNextToken(NextToken):
    """The next-token loss times a hundredth, whose gradients are below the usual clipping norm."""

    def value(self, totals):
        return 0.01 * super().value(totals)


@pytest.mark.long
def test_layouts_are_compared_with_clipping_however_small_the_gradients_are():
    result = compare_layouts(TINY, [Layout("fsdp=2,tensor=2")], objective=FaintNextToken())
    assert result.ok and "gradients" in next(iter(result.rows.values()))


@dataclasses.dataclass(frozen=True)
class Amplified(NextToken):
    """A function of the loss whose gradient is amplified by its rounding."""

    def value(self, totals):
        return jnp.sin(1e5 * super().value(totals))


def _off_by(share):
    """Return a maker of gradients that are off by a share."""

    def make(*arguments, **options):
        right = make_loss_and_grads(*arguments, **options)

        def wrong(*arguments, **options):
            metrics, grads = right(*arguments, **options)
            return metrics, jax.tree.map(lambda g: (1 + share) * g, grads)

        return wrong

    return make


@pytest.mark.parametrize(
    ("objective", "share", "agrees"),
    [(NextToken(), 5e-5, False), (Amplified(), 5e-5, True), (Amplified(), 2e-4, False)],
    ids=["a model that does not amplify rounding", "one that does", "more than rounding explains"],
)
def test_errors_are_compared_with_what_rounding_does_on_one_device(objective, share, agrees):
    result = compare_layouts(Bigram(), [ONE], objective=objective, steps=1, make_loss_and_grads=_off_by(share))
    assert result.ok == agrees
