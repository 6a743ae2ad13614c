"""Values of `Transformer.products`: the numbers in which layers multiply with their matrices."""

from __future__ import annotations

import abc
import dataclasses
import fnmatch
from collections.abc import Iterator
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxscale.config import register
from jaxscale.errors import ConfigError, check_whole, near
from jaxscale.layout.axes import AXES
from jaxscale.nn.linear import Linear
from jaxscale.nn.moe import Experts
from jaxscale.parallel import Arithmetic, Cast, Numbers
from jaxscale.parallel.expert_products import DOWN, UP
from jaxscale.parallel.scaled import Scaled


class Products(abc.ABC):
    """The numbers of products with matrices, and of their gradients; a value of `Transformer.products`.

    A subclass is a frozen dataclass with a method `arithmetic`.
    """

    rates: ClassVar[tuple[str, ...]] = ()
    """The types of operands, as `jaxscale.hardware.Chip.rate` names them, without which a chip does not support it."""

    @abc.abstractmethod
    def arithmetic(self, dtype: DTypeLike) -> Arithmetic:
        """Return how a layer computes its products.

        Args:
          dtype: the layer's dtype of computation.
        """


@dataclasses.dataclass(frozen=True)
class EightBits(Products):
    """Products of 8-bit operands with current scaling; `Int8` and `Fp8` are of this kind.

    Args:
      scaling: "channel": a scale for each token and each output, of a gradient's product for each of its rows and
        columns; "tensor": one scale for each operand; "delayed": one, by the largest magnitude of earlier
        steps, so that an operand is rounded in the pass that makes it (the recipe of Micikevicius et al. 2022).
      history: with "delayed", the number of earlier steps.
      block: the consecutive terms of a sum that share a scale; `None` is all of them. Codes of blocks are multiplied by
        their scales before the product: fewer bytes are sent, and the product is not faster.
      forward: round the operands of the product.
      input_gradient: round the operands of the product for the gradient of its input.
      kernel_gradient: round the operands of the product for the gradient of the matrix.
      stochastic: round the output's gradients up or down at random, so that their mean is right.
      sums: in overlapped layers (`Transformer.overlap`) devices exchange the terms of their sums in 8 bits, each with a
        scale for each token, and add them in float32; by default sums travel in the model's dtype.

    Raises:
      ConfigError: another scaling, a block below 1, or no product to round.
    """

    operands: ClassVar[str] = ""
    cotangents: ClassVar[str] = ""
    powers: ClassVar[bool] = False

    scaling: str = "channel"
    block: int | None = None
    forward: bool = True
    input_gradient: bool = True
    kernel_gradient: bool = False
    stochastic: bool = False
    history: int = 16
    sums: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.scaling not in ("channel", "tensor", "delayed"):
            raise ConfigError(f"{name}.scaling = {self.scaling!r} does not exist; use 'channel', 'tensor' or 'delayed'")
        check_whole(f"{name}.history", self.history)
        check_whole(f"{name}.block", self.block, optional=True)
        if self.block is not None and self.scaling != "channel":
            raise ConfigError(
                f"{name}.block = {self.block} has a scale for each block, and scaling = '{self.scaling}' has one for "
                "all; remove one of them"
            )
        if not (self.forward or self.input_gradient or self.kernel_gradient):
            raise ConfigError(
                f"{name} rounds no product: set forward, input_gradient or kernel_gradient, or Transformer.products = "
                "None"
            )
        if self.stochastic and not (self.input_gradient or self.kernel_gradient):
            raise ConfigError(
                f"{name}.stochastic = True has no effect without input_gradient or kernel_gradient; set one, or leave "
                "it False"
            )

    def arithmetic(self, dtype: DTypeLike) -> Arithmetic:
        """See `Products`."""
        plain = Arithmetic.cast(dtype)

        def numbers(used: bool, left: str, right: str, cotangent: str) -> Numbers:
            if not used:
                return Cast(plain.dtype)
            at_random = cotangent if self.stochastic else ""
            shared, history = self.scaling != "channel", self.history if self.scaling == "delayed" else 0
            return Scaled(left, right, plain.dtype, shared, self.block, self.powers, at_random, history=history)

        def wire(name: str) -> Numbers | None:
            return Scaled(name, name, plain.dtype, block=self.block, powers=self.powers) if self.sums else None

        return dataclasses.replace(
            plain,
            sums=wire(self.operands),
            gradient_sums=wire(self.cotangents),
            forward=numbers(self.forward, self.operands, self.operands, ""),
            input_gradient=numbers(self.input_gradient, self.cotangents, self.operands, "left"),
            kernel_gradient=numbers(self.kernel_gradient, self.operands, self.cotangents, "right"),
        )


@register
@dataclasses.dataclass(frozen=True)
class ProductRule:
    """Says which layers multiply in which numbers; an element of `Transformer.products`, of which the first applies.

    Args:
      of: a logical axis of the layer's matrix, such as "mlp", or a pattern of the layer's path, such as "*/attn/*".
        "head" is the output head, which no other pattern covers.
      products: the numbers; `None` is the model's dtype.
    """

    of: str = "*"
    products: Products | None = None

    def covers(self, path: str, axes: tuple[str, ...]) -> bool:
        """Return whether the rule is about a layer.

        Args:
          path: of the layer in the model.
          axes: the logical axes of its matrices.
        """
        return self.of in axes if self.of in AXES else fnmatch.fnmatch(path, self.of)

    @property
    def of_head(self) -> bool:
        """Whether the rule is about the output head."""
        return self.of in ("head", "vocab")


def rules_of(products: Products | ProductRule | tuple[ProductRule, ...] | None) -> tuple[ProductRule, ...]:
    """Return a setting as rules.

    Args:
      products: a value of `Transformer.products`.

    Raises:
      ConfigError: it is none.
    """
    if products is None or isinstance(products, Products):
        return () if products is None else (ProductRule("*", products),)
    rules = tuple(products) if isinstance(products, tuple | list) else (products,)
    for rule in rules:
        value = rule.products if isinstance(rule, ProductRule) else 0
        if value is not None and not isinstance(value, Products):
            raise ConfigError(
                f"Transformer.products has {rule!r}: must be numbers of products, such as @Int8(), or a tuple of "
                "@ProductRule()"
            )
    return rules


def layers_of(model: nnx.Module) -> Iterator[tuple[str, Linear | Experts, tuple[str, ...]]]:
    """Yield the layers whose products can be in other numbers: path, layer, logical axes of its matrices.

    Args:
      model: a model.
    """
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Linear | Experts):
            axes = module.axes if isinstance(module, Linear) else tuple(dict.fromkeys((*UP, *DOWN)))
            yield "/".join(map(str, path)), module, axes


def apply_products(model: nnx.Module, products: Products | ProductRule | tuple[ProductRule, ...] | None) -> None:
    """Set the numbers in which the layers of a model multiply.

    Args:
      model: the model, changed in place.
      products: a value of `Transformer.products`.

    Raises:
      ConfigError: a rule that is about none of the layers, or sums in 8 bits of a layer that is not overlapped.
    """
    rules, layers = rules_of(products), list(layers_of(model))
    overlapped = {"/".join(map(str, path)) for path, m in nnx.iter_modules(model) if getattr(m, "overlap", False)}
    for rule in rules:
        if not rule.of_head and not any(rule.covers(path, axes) for path, _, axes in layers):
            raise ConfigError(f"Transformer.products: {_why_nowhere(rule, layers)}")
    for path, layer, axes in layers:
        chosen = next((rule.products for rule in rules if rule.covers(path, axes)), None)
        if chosen is not None:
            layer.arithmetic = chosen.arithmetic(layer.dtype)
            if layer.arithmetic.sums is not None and path.rpartition("/")[0] not in overlapped:
                raise ConfigError(
                    f"{type(chosen).__name__}.sums = True acts in overlapped layers only, and {path} is not "
                    "overlapped; add its sub-layer to Transformer.overlap ('attention' or 'mlp', not experts), or put "
                    "a ProductRule for it, of numbers without sums, before this one"
                )


def head_arithmetic(
    products: Products | ProductRule | tuple[ProductRule, ...] | None, dtype: DTypeLike
) -> Arithmetic | None:
    """Return the numbers of the output head's product, or `None` if they are those of the hidden states.

    Args:
      products: a value of `Transformer.products`.
      dtype: the dtype of hidden states.
    """
    chosen = next((rule.products for rule in rules_of(products) if rule.of_head), None)
    return None if chosen is None else dataclasses.replace(chosen.arithmetic(dtype), out_dtype=jnp.dtype("float32"))


def _why_nowhere(rule: ProductRule, layers: list[tuple[str, Linear | Experts, tuple[str, ...]]]) -> str:
    if not layers:
        return "the model has no layer of jaxscale.nn.Linear or experts; remove the setting"
    names = sorted({name for path, _, axes in layers for name in (path, *axes)})
    return f"the rule for '{rule.of}' is about no layer{near(rule.of, names)}"
