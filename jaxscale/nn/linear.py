"""Matrix multiplication over named dimensions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxscale.layout import constrain, in_use, named, unfill
from jaxscale.nn.adapted import Adapted
from jaxscale.parallel import gather_matmul, matmul_scatter, why_no_overlap
from jaxscale.parallel.deferred import Deferred, Use, at_once


def project(
    x: Float[Array, "..."],
    kernel: Float[Array, "..."] | Deferred | Adapted,
    axes: tuple[str, ...],
    contracted: tuple[int, ...],
    dtype: Any,
    out_dtype: Any,
) -> Float[Array, "..."]:
    """`x · kernel`, over the last dimensions of `x` and the `contracted` ones of `kernel`.

    Written with its derivative so that three things hold under any layout: a weight split along `embed` (FSDP) is cast
    first and gathered second, in the smaller type; it is gathered again for the backward pass rather than kept; and
    its gradient leaves the matrix multiplication in the parameter's own type, so that the sum over devices is taken
    there, and lands where the rules for gradients say (a reduce-scatter when they split it).

    Args:
      x: activations.
      kernel: the parameter, in the type it is kept in; `Deferred`, its gradient is left for later; `Adapted`, it is
        frozen, and a product of low rank is added.
      axes: logical axis per dimension of `kernel`.
      contracted: dimensions of `kernel` that are summed over, all leading or all trailing.
      dtype: of the multiplication's inputs.
      out_dtype: of the result.

    Returns:
      the remaining dimensions of `x`, then those of `kernel`; a vocabulary that devices do not divide has zeros behind.
    """
    if isinstance(kernel, Deferred):
        return _project_deferred(x, kernel, axes, contracted, dtype, out_dtype)
    if isinstance(kernel, Adapted):
        y = _project(x, jax.lax.stop_gradient(kernel.kernel), axes, contracted, dtype, out_dtype)
        taken, given = axes[: len(contracted)], axes[len(contracted) :]
        h = _project(x, kernel.a, (*taken, "rank"), contracted, dtype, dtype) * kernel.scale
        return y + _project(h, kernel.b, ("rank", *given), (0,), dtype, out_dtype)
    return _project(x, kernel, axes, contracted, dtype, out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def _project(x, kernel, axes, contracted, dtype, out_dtype):  # type: ignore[no-untyped-def]
    return _project_fwd(x, kernel, axes, contracted, dtype, out_dtype)[0]


def _project_fwd(x, kernel, axes, contracted, dtype, out_dtype):  # type: ignore[no-untyped-def]
    # The product stands here and not in `project`, so that a rematerialisation policy sees it.
    dims = _last(x, len(contracted)), contracted
    weight = in_use(kernel, axes, dtype)
    y = jax.lax.dot_general(x.astype(dtype), weight, (dims, ((), ())), preferred_element_type=out_dtype)
    return y, (x, kernel)


def _project_bwd(axes, contracted, dtype, out_dtype, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel = residuals
    dx = _input_gradient(x, kernel, dy, axes, contracted, dtype)
    return dx, unfill(kernel_gradient(x, dy, axes, contracted, dtype, kernel.dtype), kernel.shape, *axes)


_project.defvjp(_project_fwd, _project_bwd)


def _input_gradient(x, kernel, dy, axes, contracted, dtype):  # type: ignore[no-untyped-def]
    rest = tuple(i for i in range(kernel.ndim) if i not in contracted)
    dims = _last(dy, len(rest)), rest
    weight = in_use(kernel, axes, dtype)
    return jax.lax.dot_general(dy.astype(dtype), weight, (dims, ((), ())), preferred_element_type=x.dtype)


def kernel_gradient(
    x: Float[Array, "..."],
    dy: Float[Array, "..."],
    axes: tuple[str, ...],
    contracted: tuple[int, ...],
    dtype: Any,
    kernel_dtype: Any,
) -> Float[Array, "..."]:
    """The gradient of `project`'s kernel, from its input and its output's cotangent."""
    x, dy = x.astype(dtype), dy.astype(dtype)
    batch = tuple(range(x.ndim - len(contracted)))
    left, right = (x, dy) if contracted[0] == 0 else (dy, x)
    dkernel = jax.lax.dot_general(left, right, ((batch, batch), ((), ())), preferred_element_type=kernel_dtype)
    return constrain(dkernel, *axes, kind="grads")


def _project_deferred(x, kernel, axes, contracted, dtype, out_dtype):  # type: ignore[no-untyped-def]
    how = axes, contracted, dtype
    if kernel.dy is not None:
        return _project_put_off(x, kernel.kernel, kernel.x, kernel.dy, *how, out_dtype, kernel.x is not None)
    y = _project(x, kernel.kernel, *how, out_dtype)
    taken = tuple(a for i, a in enumerate(axes) if i in contracted)
    given = tuple(a for i, a in enumerate(axes) if i not in contracted)
    gradient = partial(kernel_gradient, axes=axes, contracted=contracted, dtype=dtype, kernel_dtype=kernel.kernel.dtype)
    kernel.uses.found.append(Use(x, y, taken, given, gradient))
    return y


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7, 8))
def _project_put_off(x, kernel, x_slot, dy_slot, axes, contracted, dtype, out_dtype, keep):  # type: ignore[no-untyped-def]
    return _project_fwd(x, kernel, axes, contracted, dtype, out_dtype)[0]


def _put_off_fwd(x, kernel, x_slot, dy_slot, axes, contracted, dtype, out_dtype, keep):  # type: ignore[no-untyped-def]
    return _project_fwd(x, kernel, axes, contracted, dtype, out_dtype)


def _put_off_bwd(axes, contracted, dtype, out_dtype, keep, residuals, dy):  # type: ignore[no-untyped-def]
    x, kernel = residuals
    return _input_gradient(x, kernel, dy, axes, contracted, dtype), None, x if keep else None, dy


_project_put_off.defvjp(_put_off_fwd, _put_off_bwd)


def _last(x: Array, n: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - n, x.ndim))


_CUT_STD = 0.87962566103423978  # of a unit normal cut off at -2 and 2


def truncated_std(fan_in: int, scale: float = 1.0) -> float:
    """What to give a truncated normal, so that a sum of `fan_in` unit numbers has a standard deviation of `scale`."""
    return scale / math.sqrt(fan_in) / _CUT_STD


class Linear(nnx.Module):
    """`y = x · kernel + bias`, contracting the last dimensions of `x` with the first of `kernel`.

    Args:
      inputs: size by logical axis of the contracted dimensions, in order, as `{"embed": 128}`.
      outputs: size by logical axis of the new dimensions, as `{"heads": 4, "head_dim": 32}`.
      bias: whether to add one.
      scale: multiplies the initial standard deviation `1 / sqrt(fan_in)` (truncated normal).
      dtype: what the product is computed in (accumulation is the backend's, float32 or wider for bfloat16).
      param_dtype: what the parameters are kept in.
    """

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        *,
        bias: bool = False,
        scale: float = 1.0,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.axes = (*inputs, *outputs)
        self.contracted = tuple(range(len(inputs)))
        self.dtype = dtype
        std = truncated_std(math.prod(inputs.values()), scale)
        init = named(jax.nn.initializers.truncated_normal(std), *self.axes)
        self.kernel = nnx.Param(init(rngs.params(), (*inputs.values(), *outputs.values()), param_dtype))
        # A bias along the residual stream is too small to be worth FSDP's gather: "norm", not "embed".
        zeros = named(jax.nn.initializers.zeros, *("norm" if a == "embed" else a for a in outputs))
        self.bias = nnx.Param(zeros(rngs.params(), tuple(outputs.values()), param_dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        return self.biased(project(x, self.kernel.get_value(), self.axes, self.contracted, self.dtype, self.dtype))

    def biased(self, y: Float[Array, "..."]) -> Float[Array, "..."]:
        """`y` and the bias, if there is one."""
        if self.bias is not None:
            # added in float32, so that its gradient is summed in float32
            y = (y.astype(jnp.float32) + self.bias.get_value()).astype(self.dtype)
        return y


def into(x: Float[Array, "b s e"], *linears: Linear, overlap: bool = False) -> list[Float[Array, "b s ..."]]:
    """What each of `linears` makes of the residual stream.

    Args:
      x: whole along its sequence; with `overlap` as it is between blocks.
      *linears: from ("embed",) to dimensions that `tensor` cuts.
      overlap: gather x's sequence while it is multiplied (see `jaxscale.parallel.gather_matmul`), where a layout cuts
        it over `tensor`.

    Raises:
      LayoutError: `overlap`, and the layout cuts `tensor` but not so that there is a ring.
    """
    if overlap and why_no_overlap(*_hidden(linears)) != "":
        kernels, axes = tuple(map(_whole, linears)), tuple(m.axes for m in linears)
        return [m.biased(y) for m, y in zip(linears, gather_matmul(x, kernels, axes, linears[0].dtype), strict=True)]
    x = constrain(x, "batch", "seq", "embed")
    return [m(x) for m in linears]


def out_of(h: Float[Array, "b s ..."], linear: Linear, *, overlap: bool = False) -> Float[Array, "b s e"]:
    """What `linear` makes of a hidden activation for the residual stream; arguments as `into`."""
    if overlap and why_no_overlap(*_hidden((linear,))) != "":
        return linear.biased(matmul_scatter(h, _whole(linear), linear.axes, linear.dtype))
    return linear(h)


def _whole(linear: Linear) -> Array:
    """The kernel as one array, for products that are not `project`'s."""
    kernel: Any = linear.kernel.get_value()
    return kernel.merged(len(linear.contracted)) if isinstance(kernel, Adapted) else at_once(kernel)


def _hidden(linears: tuple[Linear, ...]) -> list[str]:
    return sorted({a for m in linears for a in m.axes if a not in ("embed", "head_dim")})
