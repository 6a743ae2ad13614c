"""What is offered to check one's own parts by tells wrong ones from right ones."""

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
from jaxscale.testing import Agreement, check_mixer, check_model, compare_op, compare_optimizer, differences
from tests.truth.runs import Bigram

TINY = TransformerConfig(depth=2, vocab=32, width=16, heads=2, hidden=32)


@dataclasses.dataclass(frozen=True)
class OfTheStack:
    """Optax's trust ratio: of a stack of layers, the length of them all."""

    def make(self, learning_rate, infos):
        return optax.chain(optax.scale_by_trust_ratio(), optax.scale_by_learning_rate(learning_rate))


def test_an_optimizer_that_takes_the_length_of_a_stack_is_told():
    found = compare_optimizer(OfTheStack(), [Layout("fsdp=2,tensor=2")], model=TINY)
    assert not found.ok
    with pytest.raises(AssertionError) as caught:
        found.check()
    first, second, *_ = str(caught.value).splitlines()  # and nothing of the layout, on which it is the same
    assert first == "updates on layers one by one: 18 of 21 leaves differ" and "0/runs/0/blocks/0/attn/k" in second


def _plain(x, w):
    return jax.nn.softmax(x @ w)


def _halved(x, w):
    """The same value; half of the gradient by `w`."""
    return _plain(x, (w + jax.lax.stop_gradient(w)) / 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_op_is_as_exact_as_a_plain_one_in_its_value_and_each_gradient(dtype):
    x, w = (jax.random.normal(jax.random.key(i), (16, 16), dtype) for i in range(2))
    compare_op(_plain, _plain, x, w).check()
    row = compare_op(_halved, _plain, x, w).rows[f"{dtype} (16, 16)"]
    assert {what: found[0].ok for what, found in row.items()} == {
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
    found = differences({"a": np.ones(4), "b": np.array([0, np.nan])}, want)
    said = str(Agreement("two trees", {"here": {"leaves": found}, "there": {"leaves": differences(want, want)}}))
    assert "differs in leaves: b" in said and "inf" in said and "agrees" in said


@pytest.mark.parametrize("mixer", [GatedRecurrence(), MultiHead()], ids=lambda m: type(m).__name__)
def test_a_mixer_that_keeps_texts_apart_passes(mixer):
    check_mixer(mixer)


class Leaking(Recurrence):
    """Does not begin anew with a document."""

    def __call__(self, x, context):
        return super().__call__(x, dataclasses.replace(context, segment_ids=None))


class Forgetful(Recurrence):
    """Begins anew with every step of generation."""

    def __call__(self, x, context):
        return super().__call__(x, dataclasses.replace(context, cache=None))


@pytest.mark.parametrize(("wrong", "said"), [(Leaking, "in a packed row"), (Forgetful, "a text that is generated")])
def test_a_mixer_that_mixes_texts_up_is_told(wrong, said):
    class Wrong(GatedRecurrence):
        layer = wrong

    with pytest.raises(AssertionError, match=f"^Wrong: .*{said}"):
        check_mixer(Wrong())


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
    found = check_model(model)
    assert (
        set(capabilities.split()) <= set(found)
        if isinstance(model, TransformerConfig)
        else found == tuple(capabilities.split())
    )


class LateNorm(Transformer):
    """Its stages forget the last norm."""

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
    with pytest.raises(AssertionError, match="WithLateNorm: begin, layers and finish are not hidden"):
        check_model(WithLateNorm(depth=1, vocab=32, width=16, heads=2, hidden=32))
