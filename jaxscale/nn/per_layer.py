"""Inputs of their own for each layer, and what a block does with them after its sub-layers (Gemma 3n and 4)."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole
from jaxscale.layout import constrain, in_use, named
from jaxscale.nn.context import Context
from jaxscale.nn.embedding import Embedding
from jaxscale.nn.linear import Linear
from jaxscale.nn.mlp import gelu_tanh

AXIS = "layer_inputs"


@register
@dataclasses.dataclass(frozen=True)
class PerLayer:
    """What a block does to the residual stream after its sub-layers (`Transformer.per_layer = @PerLayer()`; Gemma 4).

    With `width`, each layer has a second embedding of the token. To it is added a projection of the first one, and the
    block adds a projection of the sum, gated by the stream. With `scaled`, a learned number per layer then multiplies
    the whole stream.

    Args:
      width: width of an input; `None` for no inputs.
      vocab: rows of the second table; `None` is the model's number of token ids.
      scaled: multiply the stream by a number, which begins as 1.

    Raises:
      ConfigError: a size that is not a whole number of at least 1, or neither inputs nor a number.
    """

    width: int | None = None
    vocab: int | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "vocab"):
            check_whole(f"PerLayer.{name}", getattr(self, name), optional=True)
        if self.width is None and not self.scaled:
            raise ConfigError(
                "PerLayer() has neither inputs nor a number; set PerLayer.width or PerLayer.scaled = True, or "
                "Transformer.per_layer = None"
            )
        if self.width is None and self.vocab is not None:
            raise ConfigError(f"PerLayer.vocab = {self.vocab} has no effect without PerLayer.width; remove it")

    def check(self, config: Any) -> None:
        """Check the model's config.

        Args:
          config: the `TransformerConfig`.

        Raises:
          ConfigError: a field that does not work with it.
        """
        for name, why in (
            ("soft_prompt", "vectors of a prompt have no token id"),
            ("multi_token", "the modules have no inputs"),
            ("parametrisation", "it has no rule for them"),
        ):
            if getattr(config, name):
                raise ConfigError(
                    f"Transformer.{name} = {getattr(config, name)!r} does not work with Transformer.per_layer: {why}; "
                    "remove one of them"
                )
        if config.stack.two_streams:
            raise ConfigError(f"{config.stack.__name__} has no Transformer.per_layer; set Transformer.stack = @Run")
        if self.vocab is not None and self.vocab < config.vocab:
            raise ConfigError(
                f"PerLayer.vocab = {self.vocab} is less than Transformer.vocab = {config.vocab}, so that some tokens "
                f"would have no input; set PerLayer.vocab = {config.vocab}"
            )

    def products(self, config: Any, batch: int, seq: int) -> dict[str, int]:
        """Return the FLOPs of the matrix products of a forward pass, by the product's name.

        Args:
          config: the `TransformerConfig`.
          batch: number of rows.
          seq: tokens per row.
        """
        one = 2 * batch * seq * config.sizes.width * (self.width or 0) * config.depth
        return {"layer_inputs": one, "layer_gate": one, "layer_out": one} if one else {}


class WithInputs(NamedTuple):
    """The residual stream, and an input of each layer, as they pass from run to run of blocks.

    Args:
      x: the residual stream.
      inputs: the inputs.
    """

    x: Float[Array, "b s e"]
    inputs: Float[Array, "b s layers p"]


class LayerInputs(nnx.Module):
    """Computes the inputs of all layers from token ids and their embeddings.

    Args:
      config: the `TransformerConfig`.
      rngs: random streams of the initial values.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        own: PerLayer = config.per_layer
        assert own.width is not None
        types: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        columns, self.layers = config.depth * own.width, config.depth
        width, self.table_scale = config.sizes.width, own.width**0.5  # both factors are undone in the initial values
        self.table = Embedding(own.vocab or config.vocab, columns, scale=1 / self.table_scale, rngs=rngs, **types)
        self.project = Linear({"embed": width}, {AXIS: columns}, scale=width**0.5, rngs=rngs, **types)
        self.norm = config.norm(own.width, eps=config.norm_eps, **types)

    def __call__(self, tokens: Int[Array, "b s"], x: Float[Array, "b s e"]) -> Float[Array, "b s layers p"]:
        """Return the inputs.

        Args:
          tokens: ids.
          x: the input of the first layer.
        """
        with jax.named_scope("layer_inputs"):
            of_token = self.table(tokens) * jnp.asarray(self.table_scale, x.dtype)
            of_stream = self.project(constrain(x, "batch", "seq", "embed")) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
            of_token, of_stream = (
                rearrange(constrain(y, "batch", "seq", None), "b s (layers p) -> b s layers p", layers=self.layers)
                for y in (of_token, of_stream)
            )
            inputs = (self.norm(of_stream) + of_token) * jnp.asarray(2**-0.5, x.dtype)
            return constrain(inputs, "batch", "seq", None, None)


class BlockEnd(nnx.Module):
    """What a block does after its sub-layers: `PerLayer`.

    Args:
      config: the `TransformerConfig`.
      rngs: random streams of the initial values.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        own, width = config.per_layer, config.sizes.width
        types: dict[str, Any] = dict(dtype=jnp.dtype(config.dtype), param_dtype=jnp.dtype(config.param_dtype))
        linear: Any = partial(Linear, rngs=rngs, **types)
        inputs = own.width
        self.gate = None if inputs is None else linear({"embed": width}, {AXIS: inputs})
        self.out = None if inputs is None else linear({AXIS: inputs}, {"embed": width})
        self.norm = None if inputs is None else config.norm(width, eps=config.norm_eps, **types)
        ones = named(jax.nn.initializers.ones, "norm")
        self.scale = nnx.Param(ones(rngs.params(), (1,), types["param_dtype"])) if own.scaled else None

    def __call__(self, x: Float[Array, "b s e"], context: Context) -> Float[Array, "b s e"]:
        """Return the block's output.

        Args:
          x: the residual stream after the sub-layers.
          context: the inputs that layers share.
        """
        if self.gate is not None and self.out is not None and self.norm is not None:
            assert context.inputs is not None and context.layer is not None, "a run of blocks reads them from its input"
            with jax.named_scope("layer_input"):
                mine = jax.lax.dynamic_index_in_dim(context.inputs, context.layer, axis=2, keepdims=False)
                gate = gelu_tanh(self.gate(constrain(x, "batch", "seq", "embed")))
                added = self.norm(constrain(self.out(gate * mine), "batch", "residual_seq", "embed"))
                x = constrain(x + added, "batch", "residual_seq", "embed")
        if self.scale is None:
            return x
        return (x.astype(jnp.float32) * in_use(self.scale.get_value(), ("norm",), jnp.float32)).astype(x.dtype)
