"""The products of experts: each expert's matrices, applied to its rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxscale.parallel.arithmetic import PASSES, Arithmetic, Cast, Cut, Numbers
from jaxscale.parallel.dispatch.base import ExpertAxes
from jaxscale.parallel.seeds import mixed
from jaxscale.parallel.weight import Weight
from pallas_kernels import grouped_experts
from pallas_kernels.grouped_matmul import NAMES as GROUPED
from pallas_kernels.grouped_matmul import bias_of_rows, grouped_sum
from pallas_kernels.routed_experts import routed_experts

UP = ("experts", "expert_embed", "expert_mlp")
DOWN = ("experts", "expert_mlp", "expert_embed")
"""Logical axes of the experts' weights."""


class Weights(NamedTuple):
    """The experts' stored matrices: arrays, or weights with a `grouped` product.

    Args:
      gate: the gates, or `None`.
      up: the first matrices.
      down: the last matrices.
    """

    gate: Float[Array, "x e f"] | Weight | None
    up: Float[Array, "x e f"] | Weight
    down: Float[Array, "x f e"] | Weight


class Biases(NamedTuple):
    """What is added after the experts' products, float32.

    Args:
      gate: after the gates' product, or `None` without gates.
      up: after the first product.
      down: after the last product.
    """

    gate: Float[Array, "x f"] | None
    up: Float[Array, "x f"]
    down: Float[Array, "x e"]


@dataclasses.dataclass(frozen=True)
class ProductSettings:
    """Static settings of the products of a layer of experts.

    Args:
      act: the activation function.
      combine: the hidden layer of `gate(x)` and `up(x)`; `None` is `act(gate) * up`.
      arithmetic: the numbers of products.
      axes: the mesh axes.
      saves: of experts in kernels (`why_separate`), save the first products for the gradient; or else compute them
        again in the kernel that makes their gradients.
    """

    act: Callable[[Array], Array]
    combine: Callable[[Array, Array], Array] | None
    arithmetic: Arithmetic
    axes: ExpertAxes = ExpertAxes()
    saves: bool = True

    def hidden(self, gated: bool) -> _Hidden:
        """Return the hidden layer, a function of the first products.

        Args:
          gated: whether they are a gate's and another's, or one.
        """
        return _Hidden(self.act, self.combine, gated)

    def lead(self, sizes: Array | None) -> Cut:
        """Return the mesh axes that shard all dimensions of rows but the last.

        Args:
          sizes: rows of each expert, or `None` for rows in slots.
        """
        axes = self.axes
        if sizes is not None:  # rows of all experts
            return (tuple(dict.fromkeys((*axes.tokens, *axes.experts))),)
        others = tuple(m for m in axes.tokens if m not in axes.experts)
        return others, (), others

    def inner(self, embed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the mesh axes that shard the last dimension of a product's rows, and of its result.

        Args:
          embed: which dimension of the product's matrices is that of the model, 1 or 2.
        """
        return ((), self.axes.mlp) if embed == 1 else (self.axes.mlp, ())


@dataclasses.dataclass(frozen=True)
class ExpertsOf:
    """A device's experts, as a function of their rows (`jaxscale.parallel.dispatch.base.Apply`).

    Args:
      weights: their matrices.
      taps: get the gradients of the matrices.
      biases: added after each product, or `None`.
      seed: of random numbers, or `None`.
      settings: static settings.
    """

    weights: Weights
    taps: Weights
    biases: Biases | None
    seed: Array | None
    settings: ProductSettings

    def __call__(self, rows: Array, scale: Array, sizes: Array | None = None) -> Array:
        """Return `apply_experts` of these experts.

        Args:
          rows: see there.
          scale: likewise.
          sizes: likewise.
        """
        return apply_experts(
            rows, scale, sizes, weights=self.weights, taps=self.taps, biases=self.biases, seed=self.seed,
            settings=self.settings,
        )  # fmt: skip

    @property
    def why_not_fused(self) -> str | None:
        """Why `fused` does not compute these experts, or `None`."""
        if self.biases is not None:
            return "the experts have biases"
        if self.settings.axes.gathered or self.settings.axes.scattered:
            return "their matrices are sharded along the residual width"
        return _why_not_plain(self.weights, self.settings.arithmetic)

    def fused(self, rows: Array, ids: Array, scale: Array) -> Array:
        """Return `routed_experts` of these experts.

        Args:
          rows: see there.
          ids: likewise.
          scale: likewise.
        """
        arithmetic = self.settings.arithmetic

        def matrix(w: Any) -> Any:
            return None if w is None else w.astype(arithmetic.dtype)

        gate, up, down = map(matrix, self.taps)  # whose values are those of the weights, where neither is gathered
        return routed_experts(rows, ids, scale, gate, up, down, activation=self.settings.hidden(gate is not None))


@dataclasses.dataclass(frozen=True)
class _Hidden:
    """The hidden layer of products that are a gate's and another's, or one."""

    act: Callable[[Array], Array]
    combine: Callable[[Array, Array], Array] | None
    gated: bool

    def __call__(self, *products: Array) -> Array:
        if not self.gated:
            return self.act(*products)
        gate, up = products
        return self.act(gate) * up if self.combine is None else self.combine(gate, up)


def _why_not_plain(weights: Weights, arithmetic: Arithmetic) -> str | None:
    """Why experts are not products of arrays in one dtype, or `None`."""
    if any(getattr(arithmetic, name) != Cast(arithmetic.dtype) for name in PASSES):
        return "their products are rounded"
    if any(w is not None and not isinstance(w, jax.Array) for w in weights):
        return "their matrices are stored in few bits"
    return None


def why_separate(
    rows: Array, sizes: Array | None, weights: Weights, biases: Biases | None, settings: ProductSettings
) -> str | None:
    """Return why experts are three products and a hidden layer in memory, not `grouped_experts`; `None` if they are.

    Args:
      rows: as for `apply_experts`, as all others.
      sizes: likewise.
      weights: likewise.
      biases: likewise.
      settings: likewise.
    """
    if sizes is None:
        return "tokens are in slots"
    if weights.gate is None:
        return "the experts have no gate"
    if why := _why_not_plain(weights, settings.arithmetic):
        return why
    (x, _, f), (m, e), dtype = weights.up.shape, rows.shape, settings.arithmetic.dtype  # width e, once gathered
    like = jax.ShapeDtypeStruct
    into, scale = like((x, e, f), dtype), like((m,), jnp.float32)
    shapes = (like((m, e), dtype), scale, into, into, like((x, f, e), dtype), sizes)
    of_biases = None if biases is None else (biases.gate, biases.up)
    arrays = grouped_experts.Arrays(*shapes, of_biases)
    return grouped_experts.why_not(arrays, settings.hidden(True), saves=settings.saves)


def apply_experts(
    rows: Array,
    scale: Array,
    sizes: Array | None = None,
    *,
    weights: Weights,
    taps: Weights,
    biases: Biases | None,
    seed: Array | None,
    settings: ProductSettings,
) -> Array:
    """Apply each expert to its rows, and multiply by `scale`, float32.

    Rows are (groups, x, slots, e), or (rows, e) sorted by expert with `sizes` of each. They are scaled before the last
    product: scaled after it, the derivative of `scale` would need the outputs, and recomputation would repeat the
    product and the exchange. Where there is no reason for `why_separate`, kernels compute all but the last product.
    """
    if why_separate(rows, sizes, weights, biases, settings) is None:
        first = None if biases is None else (biases.gate, biases.up)
        y = _in_kernels(rows, scale[:, 0], weights, taps, first, sizes, settings)
    else:
        y = _separate(rows, scale, sizes, weights, taps, biases, seed, settings)
    if biases is None:
        return y
    down_bias = biases.down
    if settings.axes.mlp:  # of the devices whose outputs are summed, one adds it
        down_bias = jnp.where(lax.axis_index(settings.axes.mlp) == 0, down_bias, 0)
    return (y + scale * _of_rows(down_bias, len(rows), sizes)).astype(y.dtype)


def _separate(
    rows: Array,
    scale: Array,
    sizes: Array | None,
    weights: Weights,
    taps: Weights,
    biases: Biases | None,
    seed: Array | None,
    settings: ProductSettings,
) -> Array:
    """Return the three products of `apply_experts`, before the last bias."""

    def product(
        number: int, rows: Array, kernel: Array | Weight, tap: Array | Weight, embed: int, bias: Array | None = None
    ) -> Array:
        own = None if seed is None else mixed(seed + jnp.uint32(number))
        if bias is None or (sizes is not None and not isinstance(kernel, Weight)):  # which adds it before it rounds
            return _product(rows, kernel, tap, sizes, own, bias, embed, settings)
        y = _product(rows, kernel, tap, sizes, own, None, embed, settings)
        return (y + _of_rows(bias, len(rows), sizes)).astype(y.dtype)

    gate_bias, up_bias, _ = biases or (None, None, None)
    up = checkpoint_name(product(0, rows, weights.up, taps.up, 1, up_bias), "mlp_up")
    if weights.gate is None or taps.gate is None:
        h = settings.hidden(False)(up)
    else:
        gate = checkpoint_name(product(1, rows, weights.gate, taps.gate, 1, gate_bias), "mlp_up")
        h = settings.hidden(True)(gate, up)
    h = (checkpoint_name(h, "mlp_hidden") * scale).astype(settings.arithmetic.dtype)
    return product(2, h, weights.down, taps.down, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _in_kernels(
    rows: Array,
    scale: Array,
    weights: Weights,
    taps: Weights,
    biases: tuple[Array, Array] | None,
    sizes: Array,
    settings: ProductSettings,
) -> Array:
    """Return what `_separate` does, by `grouped_experts`; `taps` get the gradients, as in `_product`.

    The hidden layer is not saved: the kernel of the gradients makes it again.
    """
    whole, hidden = _for_kernels(rows, scale, weights, biases, sizes, settings), settings.hidden(True)
    return grouped_experts.forward(whole, hidden, saves=False)[0].astype(settings.arithmetic.out_dtype)


def _in_kernels_fwd(rows, scale, weights, taps, biases, sizes, settings):  # type: ignore[no-untyped-def]
    whole = _for_kernels(rows, scale, weights, biases, sizes, settings)
    y, products = grouped_experts.forward(whole, settings.hidden(True), saves=settings.saves)
    products = tuple(checkpoint_name(checkpoint_name(p, "mlp_up"), *GROUPED) for p in products)
    return y.astype(settings.arithmetic.out_dtype), (rows, scale, weights, biases, sizes, products)


def _in_kernels_bwd(settings, residuals, dy):  # type: ignore[no-untyped-def]
    rows, scale, weights, biases, sizes, products = residuals
    whole = _for_kernels(rows, scale, weights, biases, sizes, settings)
    d = grouped_experts.backward(whole, products, dy, settings.hidden(True), dtype=weights.up.dtype)
    dweights = Weights(*(_scattered(w, embed, settings) for w, embed in ((d.gate, 1), (d.up, 1), (d.down, 2))))
    return d.rows.astype(rows.dtype), d.scale, None, dweights, d.biases, None


_in_kernels.defvjp(_in_kernels_fwd, _in_kernels_bwd)


def _for_kernels(
    rows: Array, scale: Array, weights: Weights, biases: Any, sizes: Array, settings: ProductSettings
) -> grouped_experts.Arrays:
    dtype = settings.arithmetic.dtype

    def whole(kernel: Any, embed: int) -> Array:
        return _gathered(kernel.astype(dtype), kernel, embed, settings)

    gate, up, down = whole(weights.gate, 1), whole(weights.up, 1), whole(weights.down, 2)
    return grouped_experts.Arrays(rows.astype(dtype), scale, gate, up, down, sizes, biases)


def _of_rows(bias: Float[Array, "x n"], rows: int, sizes: Int[Array, " x"] | None) -> Array:
    """Return the bias of each row's expert, for rows as those of `apply_experts`."""
    return bias[:, None] if sizes is None else bias_of_rows(bias, sizes, rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _product(
    rows: Array,
    kernel: Array | Weight,
    tap: Array | Weight,
    sizes: Array | None,
    seed: Array | None,
    bias: Array | None,
    embed: int,
    settings: ProductSettings,
) -> Array:
    """Multiply rows by their expert's matrix; the derivative is custom for the reasons given in `project`.

    Args:
      rows: (groups, x, slots, in), or (rows, in) sorted by expert.
      kernel: (x, in, out), whose dimension `embed` is sharded over `settings.axes.gathered`; or a weight with a
        `grouped` product, for rows with `sizes`.
      tap: gets the kernel's gradient, in its dtype; its dimension `embed` is sharded over `settings.axes.scattered`.
      sizes: rows of each expert, int, or `None`.
      seed: of random numbers, or `None`.
      bias: (x, out), added to the rows of each expert, for `sizes` and a kernel that is an array; or `None`.
      embed: 1 or 2.
      settings: mesh axes, and the numbers of the product.
    """
    return _product_fwd(rows, kernel, tap, sizes, seed, bias, embed, settings)[0]


def _product_fwd(rows, kernel, tap, sizes, seed, bias, embed, settings):  # type: ignore[no-untyped-def]
    numbers = settings.arithmetic.forward
    y = _grouped(numbers, rows, kernel, 1, sizes, embed, settings, bias)
    return y.astype(settings.arithmetic.out_dtype), (rows, kernel, sizes, seed, bias)


def _product_bwd(embed, settings, residuals, dy):  # type: ignore[no-untyped-def]
    rows, kernel, sizes, seed, bias = residuals
    arithmetic = settings.arithmetic.seeded(seed)
    drows = _grouped(arithmetic.input_gradient, dy, kernel, 2, sizes, embed, settings).astype(rows.dtype)
    dbias = None if bias is None else grouped_sum(dy, sizes)
    numbers = arithmetic.kernel_gradient
    summed, batch = ((0,), ()) if sizes is not None else ((0, 2), (1,))
    left, right = (
        encode(a, summed, batch, (*settings.lead(sizes), cut))
        for encode, a, cut in zip((numbers.left, numbers.right), (rows, dy), settings.inner(embed), strict=True)
    )
    if isinstance(kernel, Weight):  # XLA drops what follows if nobody wants gradients of scales
        dkernel = numbers.ragged_outer(left, right, sizes, jnp.float32)
        return drows, None, jax.vjp(lambda w: w.dense(), kernel)[1](dkernel)[0], None, None, dbias
    if sizes is None:
        dkernel = numbers.dot(left, right, ((summed, summed), (batch, batch)), kernel.dtype)
    else:
        dkernel = numbers.ragged_outer(left, right, sizes, kernel.dtype)
    return drows, None, _scattered(dkernel, embed, settings), None, None, dbias


_product.defvjp(_product_fwd, _product_bwd)


def _scattered(dkernel: Array, embed: int, settings: ProductSettings) -> Array:
    """Sum a matrix's gradient over devices, of which each gets its shard."""
    if not settings.axes.scattered:
        return dkernel
    return lax.psum_scatter(dkernel, settings.axes.scattered, scatter_dimension=embed, tiled=True)


def _gathered(matrices: Any, kernel: Array, embed: int, settings: ProductSettings) -> Any:
    """Gather the encoded matrices of a stored kernel (FSDP)."""

    def whole(a: Array) -> Array:
        shared = a.shape[embed] == 1 != kernel.shape[embed]
        return a if shared else lax.all_gather(a, settings.axes.gathered, axis=embed, tiled=True)

    return jax.tree.map(whole, matrices) if settings.axes.gathered else matrices


def _grouped(
    numbers: Numbers,
    rows: Array,
    kernel: Array | Weight,
    summed: int,
    sizes: Array | None,
    embed: int,
    settings: ProductSettings,
    bias: Array | None = None,
) -> Array:
    """Multiply rows by their expert's matrix, of which dimension `summed` is summed over, and add the bias."""
    if isinstance(kernel, Weight):
        assert sizes is not None
        dtype = settings.arithmetic.dtype
        return kernel.grouped(rows.astype(dtype), sizes, summed == 2, dtype)
    cut = settings.inner(embed)[0 if summed == 1 else 1]
    stored = [(), settings.axes.mlp, settings.axes.mlp]
    stored[embed] = settings.axes.gathered
    matrices = _gathered(numbers.right(kernel, (summed,), (0,), tuple(stored)), kernel, embed, settings)
    if sizes is None:
        left = numbers.left(rows, (3,), (1,), (*settings.lead(sizes), cut))
        dims = ((3,), (summed,)), ((1,), (0,))
        return jnp.moveaxis(numbers.dot(left, matrices, dims, settings.arithmetic.dtype), 0, 1)
    left = numbers.left(rows, (1,), (), (*settings.lead(sizes), cut))
    return numbers.ragged_dot(left, matrices, sizes, summed == 2, bias)
