"""Derivatives of an op that is differentiated by a rule of its own: reverse mode, forward mode, and mixtures of both.

    @partial(custom_vjp, nondiff_argnums=(1,))
    def op(x, settings): ...
    op.defvjp(forward, backward)                  # as for jax.custom_vjp

Reverse mode runs `forward` and `backward`, as with `jax.custom_vjp`, which refuses forward mode. Here a tangent of the
result is the transpose of `backward` (which is linear in the cotangent), so `jax.jvp`, `jax.jacfwd` and `jax.hessian`
work wherever `backward` can be differentiated. XLA implementations can; `dispatch` refuses it for kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.api_util import flatten_axes
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels.arguments import summed, varying

__all__ = ["custom_vjp"]


class custom_vjp:  # noqa: N801 (it stands where jax.custom_vjp stood)
    """`jax.custom_vjp` with forward mode.

    Args:
      fun: a function of arrays or trees of them; its results are floats (or `None`).
      nondiff_argnums: positions of arguments that are no arrays; `backward` gets them first.
      in_kernels: TPU kernels call it, in which Pallas lowers no rule with symbolic zeros: they are arrays.
    """

    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = (), *, in_kernels: bool = False
    ) -> None:
        self.__doc__, self.__name__, self.__wrapped__ = fun.__doc__, fun.__name__, fun
        self._static, self._symbolic = tuple(nondiff_argnums), not in_kernels
        self._call = jax.custom_jvp(fun, nondiff_argnums=self._static)

    def __call__(self, *args: Any, **others: Any) -> Any:
        """Call the function.

        Args:
          *args: its arguments.
          **others: its arguments by name.
        """
        return self._call(*args, **others)

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Set the rule.

        Args:
          forward: the function's arguments -> its result and what `backward` reads.
          backward: static arguments, what it reads, and the cotangent of the result -> a cotangent of each other
            argument, `None` for what has none. It is linear in the cotangent.
        """

        def rule(*args: Any) -> tuple[Any, Any]:
            *static, primals, tangents = args
            statics, others = iter(static), iter(primals)
            count = len(static) + len(primals)
            out, saved = forward(*(next(statics if i in self._static else others) for i in range(count)))
            results, out_tree = jax.tree.flatten(out)
            residuals, saved_tree = jax.tree.flatten(saved)
            flat, tree = jax.tree.flatten(primals)
            size = len(residuals)
            moves = [t for t in jax.tree.leaves(tangents) if not _is_zero(t)]
            which = [i for i, t in enumerate(jax.tree.leaves(tangents)) if not _is_zero(t)]
            types = [jax.typeof(flat[i]).to_tangent_aval() for i in which]
            # those of jacfwd are the same on all devices
            moves = [varying(t, kind) for t, kind in zip(moves, types, strict=True)]

            def pull(*operands: Any) -> list[jax.Array]:
                read, cts = (
                    jax.tree.unflatten(saved_tree, operands[:size]),
                    jax.tree.unflatten(out_tree, operands[size:]),
                )
                cotangents = backward(*static, read, cts)
                every = flatten_axes(f"cotangents of {self.__name__}", tree, cotangents)
                chosen = [every[i] for i in which]
                return [
                    jnp.zeros(a.shape, a.dtype) if c is None else summed(c, a)
                    for c, a in zip(chosen, types, strict=True)
                ]

            outs = tuple(jax.typeof(x).to_tangent_aval() for x in results)
            pushed = _linear.bind(*residuals, *moves, pull=pull, outs=outs, residuals=size)
            return out, jax.tree.unflatten(out_tree, pushed)

        self._call.defjvp(rule, symbolic_zeros=self._symbolic)


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


# ---- A linear function of tangents, of which only the transpose was written: `pull(*residuals, *cotangents)`.


def _push(*operands: Any, pull: Callable[..., Any], outs: tuple[Any, ...], residuals: int) -> list[jax.Array]:
    saved, tangents = operands[:residuals], operands[residuals:]
    # It is linear in the cotangents, so any would do; those of 1 are in no special case of a backward pass.
    ones = (varying(jnp.ones(o.shape, o.dtype), o) for o in outs)
    pulled, transpose = jax.vjp(lambda *cts: pull(*saved, *cts), *ones)
    return list(transpose([varying(t, jax.typeof(x)) for t, x in zip(tangents, pulled, strict=True)]))


def _push_and_move(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    count = params["residuals"]
    out = _linear.bind(*primals, **params)
    if all(type(t) is ad.Zero for t in tangents[:count]):
        return out, _linear.bind(*primals[:count], *map(ad.instantiate_zeros, tangents[count:]), **params)
    moved = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moved(*values: Any) -> list[jax.Array]:
        operands = list(primals)
        for i, value in zip(moved, values, strict=True):
            operands[i] = value
        return _push(*operands, **params)

    return out, jax.jvp(of_moved, [primals[i] for i in moved], [tangents[i] for i in moved])[1]


def _pull(cts: Sequence[Any], *operands: Any, pull: Any, outs: tuple[Any, ...], residuals: int) -> list[Any]:
    full = [ad.instantiate_zeros(ct) for ct in cts]
    pulled = zip(operands[residuals:], pull(*operands[:residuals], *full), strict=True)
    return [None] * residuals + [ct if ad.is_undefined_primal(x) else None for x, ct in pulled]


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, pull: Any, outs: Any, residuals: int) -> Any:
    size = next(x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None)
    saved, linear = operands[:residuals], list(zip(operands, axes, strict=True))[residuals:]
    tangents = [jnp.broadcast_to(x, (size, *x.shape)) if a is None else jnp.moveaxis(x, a, 0) for x, a in linear]
    each = jax.vmap(pull, in_axes=(*axes[:residuals], *(0 for _ in outs)), out_axes=0, axis_size=size)
    outs = tuple(
        o.update(shape=(size, *o.shape), sharding=o.sharding.update(spec=(None, *o.sharding.spec))) for o in outs
    )
    out = _linear.bind(*saved, *tangents, pull=each, outs=outs, residuals=residuals)
    return out, [0] * len(out)


_linear = Primitive("pull_transposed")
_linear.multiple_results = True
_linear.def_impl(_push)
_linear.def_abstract_eval(lambda *operands, outs, **_: list(outs))
ad.primitive_jvps[_linear] = _push_and_move
ad.primitive_transposes[_linear] = _pull
batching.primitive_batchers[_linear] = _batch
mlir.register_lowering(_linear, mlir.lower_fun(_push, multiple_results=True))
