"""A user's part with a wrong signature is reported when it is chosen."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.errors import ConfigError
from jaxscale.models import BlockConfig, TransformerConfig
from jaxscale.nn import (
    LayerNorm,
    Mamba2,
    MixtureOfExperts,
    QKNorm,
    ReversibleRun,
    RingAttention,
    Rotary,
    dot_product_attention,
)
from jaxscale.optim import SGD, AdamW
from jaxscale.signatures import check_call
from jaxscale.step import NextToken, TrainConfig

KERNEL = "(q, k, v, *, causal, segment_ids, positions, window, softcap, scale)"


def plain(q, k, v, causal=True):
    return q


def two(q, kv, **options):
    return q


def wanting(q, k, v, block, *, causal, segment_ids, positions, window, softcap, scale):
    return q


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (plain, "has no parameter 'segment_ids' or 'positions' or 'window' or 'softcap' or 'scale'"),
        (two, "takes 2 positional arguments and needs 3 (q, k, v)"),
        (wanting, "also requires 'block', which is not passed"),
    ],
)
def test_a_kernel_with_another_signature_is_named_with_what_it_lacks(kernel, words):
    with pytest.raises(ConfigError) as e:
        TransformerConfig(attention=kernel)
    assert f"Transformer.attention = {kernel.__name__}(q" in str(e.value)
    assert words in str(e.value)
    assert str(e.value).endswith(f"it is called as {KERNEL}")


def test_a_kernel_of_the_signature_that_the_error_names_is_taken():
    space: dict = {}
    exec(f"def mine{KERNEL}: return q", space)
    assert TransformerConfig(attention=space["mine"]).attention is space["mine"]
    assert TransformerConfig(attention=lambda *args, **options: args[0])
    assert TransformerConfig(attention=dot_product_attention)


def test_a_class_that_needs_brackets_says_so():
    with pytest.raises(ConfigError, match="write RingAttention\\(\\) for an instance"):
        TransformerConfig(attention=RingAttention)
    assert TransformerConfig(attention=RingAttention())  # as it says


@dataclasses.dataclass(frozen=True)
class Strange:
    """Methods of every family, with wrong parameters."""

    balanced = needs_capacity = False

    def make(self, infos):
        return infos

    def describe(self, vocab):
        return ""

    def probabilities(self, scores):
        return scores

    def __call__(self, scores, *, top_k):
        return scores


@pytest.mark.parametrize(
    ("setting", "make"),
    [
        ("train.optimizer.make", lambda part: TrainConfig(optimizer=part)),
        ("train.schedule.make", lambda part: TrainConfig(schedule=part)),
        ("NextToken.loss.__call__", lambda part: NextToken(loss=part)),
        ("MixtureOfExperts.router.__call__", lambda part: MixtureOfExperts(4, router=part)),
    ],
)
def test_other_families_name_theirs(setting, make):
    with pytest.raises(ConfigError, match=rf"{re.escape(setting)} = \w+\(.*; it is called as \("):
        make(Strange())


@pytest.mark.parametrize("name", ["norm", "mlp", "dense_mlp", "embedding"])
def test_a_layer_with_another_signature_is_named(name):
    with pytest.raises(ConfigError, match=rf"Transformer.{name} = <lambda>\(a, b, c\) .*; it is called as \(.*width"):
        TransformerConfig(**{name: lambda a, b, c: None})


class ScaleNorm(nnx.Module):
    """A norm whose constructor lacks arguments; Flax's metaclass hides its signature."""

    def __init__(self, width, rngs):
        self.scale = nnx.Param(jnp.ones(width))


def test_a_flax_module_is_checked_by_its_constructor():
    with pytest.raises(ConfigError) as e:
        TransformerConfig(norm=ScaleNorm)
    assert str(e.value) == (
        "Transformer.norm = ScaleNorm(width, rngs) has no parameter 'eps' or 'dtype' or 'param_dtype'; "
        "it is called as (width, *, eps, dtype, param_dtype)"
    )
    with pytest.raises(ConfigError, match=r"QKNorm.norm = ScaleNorm\(.*called as \(width, \*, axis, eps, dtype"):
        QKNorm(norm=ScaleNorm)
    assert TransformerConfig(norm=LayerNorm, qk_norm=QKNorm(LayerNorm)).norm is LayerNorm


def mixed(width, heads, kv_heads, head_dim, **options):
    """A function with the signature of a mixer."""


@pytest.mark.parametrize("kind", [TransformerConfig, BlockConfig])
def test_text_and_tuples_are_refused_in_every_field_that_takes_something_else(kind):
    free = {"windows": (), "overlap": (), "blocks": (), "dtype": "bfloat16", "param_dtype": "bfloat16", "products": ()}
    for field in dataclasses.fields(kind):
        for value in ("nothing of that name", (), 0.1 + 0.2j):
            if value == free.get(field.name):
                continue
            with pytest.raises(ConfigError, match=f"(Transformer|Block).{field.name}|memory|MemoryPolicy"):
                part = kind(**{field.name: value})
                TransformerConfig(blocks=(part,)) if kind is BlockConfig else None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(positions="Rotary"), "positions = 'Rotary': must be Rotary(...) or Learned(...) or None; write Rotary()"),
        (dict(positions=Rotary), "positions = Rotary: must be Rotary(...) or Learned(...) or None; write Rotary()"),
        (
            dict(stack="ReversibleRun"),
            "stack = 'ReversibleRun': must be the class Run or one derived from it; write ReversibleRun without quotes "
            "(@ReversibleRun in gin)",
        ),
        (dict(mlp=None), "mlp = None: must be a function or a class"),
        (dict(embed_gradient="0.1"), "embed_gradient = '0.1': must be a number"),
        (dict(width=True), "width = True: must be a whole number of at least 1, or None"),
        (dict(parametrisation="MuP"), "parametrisation = 'MuP': must be Parametrisation(...) or None; write MuP()"),
        (dict(dropout=np.float32(0.5)), "dropout = np.float32(0.5): must be a number; write 0.5"),
        (dict(logit_softcap=jnp.float32(30)), "dtype=float32): must be a number or None; write 30.0"),
        (dict(dtype=jnp.bfloat16), "dtype = bfloat16: must be text; write 'bfloat16'"),
        (dict(param_dtype=np.dtype("float32")), "param_dtype = dtype('float32'): must be text; write 'float32'"),
        (dict(scan=None), "scan = None: must be True, False or 'auto'"),
        (dict(logit_softcap=0.0), "logit_softcap = 0.0: must be above 0 and finite, or None for no cap"),
        (dict(attention_softcap=-3), "attention_softcap = -3: must be above 0 and finite, or None for no cap"),
        (dict(norm_eps=float("nan")), "norm_eps = nan: must be at least 0 and finite"),
        (dict(attention_scale=float("inf")), "attention_scale = inf: must be finite, or None"),
        (dict(residual_scale=float("inf")), "residual_scale = inf: must be above 0 and finite; 1.0 changes nothing"),
    ],
)
def test_a_value_of_another_type_is_named_with_what_the_field_takes(fields, message):
    with pytest.raises(ConfigError, match=f"Transformer.*{re.escape(message)}"):
        TransformerConfig(**fields)
    TransformerConfig(positions=Rotary(), stack=ReversibleRun, embed_gradient=0.1, logit_softcap=30)
    with pytest.raises(ConfigError, match="Block.window = '256': must be a whole number or None"):
        TransformerConfig(blocks=(BlockConfig(window="256"),))
    with pytest.raises(ConfigError, match=re.escape("; write Mamba2() for an instance")):
        TransformerConfig(blocks=(BlockConfig(Mamba2),))
    with pytest.raises(ConfigError, match="Block.mixer = 'mixed' has no .*; make it an instance of a class derived"):
        TransformerConfig(blocks=(BlockConfig(mixed),))


def test_our_own_parts_are_taken():
    assert TrainConfig(optimizer=AdamW()).optimizer != TrainConfig(optimizer=SGD()).optimizer
    check_call("x", print, ("a",), ())
