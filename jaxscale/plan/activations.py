"""Record the activations of a traced function by the named scope of the module that makes them, layer by layer.

The function's jaxpr is evaluated equation by equation, so that any model can be recorded as it is: the output of a
module is the last value computed in its scope. Scans over layers run as scans and return the activations of every
iteration.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxscale.layout.tensors import Tree
from jaxscale.plan.scopes import scopes_of
from jaxscale.step.trace import open_call, parts_of_scan

Keep = Callable[[tuple[int, ...]], bool]
Activations = dict[str, Any]
"""The last activation of each scope; and under "scope:name" the values that `checkpoint_name` named in that scope."""


def recorded(fn: Callable[..., Any], *args: Tree, keep: Keep) -> tuple[Any, Activations]:
    """Return `fn(*args)` and the activations that it computes.

    Args:
      fn: a function of trees of arrays. The call may itself be traced, for example under `jax.vmap`.
      *args: its arguments.
      keep: takes the shape of a floating-point value and returns whether it may be a module's output; other values are
        not recorded.

    Returns:
      the output; and by scope ("runs/0/blocks/0/attn") the scope's last activation. Activations of scanned layers have
      a leading dimension of layers. Values named by `checkpoint_name` are in a list under "scope:name".
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves, activations = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), "", keep)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves), activations


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], outer: str, keep: Keep
) -> tuple[list[Any], Activations]:
    """Evaluate a jaxpr within the scope `outer`."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: core.Var | core.Literal) -> Any:
        return v.val if isinstance(v, core.Literal) else values[v]

    activations: Activations = {}
    for eqn in jaxpr.eqns:
        scope = "/".join(filter(None, (outer, scopes_of(str(eqn.source_info.name_stack)))))
        outputs, inner = _evaluate(eqn, [read(v) for v in eqn.invars], scope, keep)
        values.update(zip(eqn.outvars, outputs, strict=True))
        for name, value in inner.items():
            activations[name] = activations.get(name, []) + value if ":" in name else value
        if eqn.primitive.name == "name":
            activations.setdefault(f"{scope}:{eqn.params['name']}", []).append(outputs[0])
        candidates = [x for x in outputs if _is_activation(x, keep)]
        if scope and candidates:
            for enclosing in itertools.accumulate(scope.split("/"), lambda a, b: f"{a}/{b}"):
                activations[enclosing] = candidates[0]
    return [read(v) for v in jaxpr.outvars], activations


def _evaluate(eqn: core.JaxprEqn, inputs: list[Any], scope: str, keep: Keep) -> tuple[list[Any], Activations]:
    """Return the outputs of an equation and the activations of the jaxprs inside it."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        return _scan(params, inputs, scope, keep)
    if eqn.primitive.name in _CALLS:
        for body, consts, args, _ in open_call(params, inputs, ()):
            return _run(body, consts, args, scope, keep)
    outputs = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return (list(outputs) if eqn.primitive.multiple_results else [outputs]), {}


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip


def _scan(params: dict[str, Any], inputs: list[Any], scope: str, keep: Keep) -> tuple[list[Any], Activations]:
    """Evaluate a scan as a scan, with the activations of its body stacked."""
    fixed, carry, rows = parts_of_scan(params, inputs)
    body = params["jaxpr"]

    def iteration(carry: list[Any], row: list[Any]) -> tuple[list[Any], tuple[list[Any], Activations]]:
        outputs, activations = _run(body.jaxpr, body.consts, [*fixed, *carry, *row], scope, keep)
        return outputs[: len(carry)], (outputs[len(carry) :], activations)

    last, (stacked, activations) = jax.lax.scan(
        iteration, carry, rows, length=params["length"], reverse=params["reverse"]
    )
    return [*last, *stacked], activations


def _is_activation(x: Any, keep: Keep) -> bool:
    return hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating) and keep(x.shape)
