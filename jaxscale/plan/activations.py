"""What every module of a traced function makes: activations by the named scopes they stand in, layers kept apart.

The program is run equation by equation, so that no model has to be written for it: a module's output is the last value
that its scope makes. Scans over layers run as scans, and return what each turn made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxscale.plan.scopes import scopes_of
from jaxscale.step.trace import open_call, parts_of_scan

Keep = Callable[[tuple[int, ...]], bool]
Found = dict[str, Any]
"""By scope, its last activation; by scope, colon and name, the values that `checkpoint_name` gave this name there."""


def recorded(fn: Callable[..., Any], *args: Any, keep: Keep) -> tuple[Any, Found]:
    """What `fn(*args)` returns, and the activations on its way.

    Args:
      fn: a function of trees of arrays; may be traced itself.
      *args: its arguments.
      keep: by its shape, whether a floating-point value may be a module's output; others are passed over.

    Returns:
      the output; and by scope ("runs/0/blocks/0/attn") its last activation, of layers that are scanned with a leading
      dimension for each. What goes by `checkpoint_name` is under the scope, a colon and the name, in a list.
    """
    closed, made = jax.make_jaxpr(fn, return_shape=True)(*args)
    leaves, found = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), "", keep)
    return jax.tree.unflatten(jax.tree.structure(made), leaves), found


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], outer: str, keep: Keep
) -> tuple[list[Any], Found]:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read = lambda v: v.val if isinstance(v, core.Literal) else values[v]  # noqa: E731
    found: Found = {}
    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        here = "/".join(filter(None, (outer, scopes_of(str(eqn.source_info.name_stack)))))
        made, inside = _one(eqn, given, here, keep)
        values.update(zip(eqn.outvars, made, strict=True))
        for name, value in inside.items():
            found[name] = found.get(name, []) + value if ":" in name else value
        if eqn.primitive.name == "name":
            found.setdefault(f"{here}:{eqn.params['name']}", []).append(made[0])
        whole = [x for x in made if _is_activation(x, keep)]
        for scope in itertools.accumulate(here.split("/"), lambda a, b: f"{a}/{b}") if here and whole else ():
            found[scope] = whole[0]
    return [read(v) for v in jaxpr.outvars], found


def _one(eqn: core.JaxprEqn, given: list[Any], here: str, keep: Keep) -> tuple[list[Any], Found]:
    """What an equation makes, and what is made inside it."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        return _scan(params, given, here, keep)
    if eqn.primitive.name in _CALLS:
        for body, consts, args, _ in open_call(params, given, ()):
            return _run(body, consts, args, here, keep)
    made = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(params))
    return (list(made) if eqn.primitive.multiple_results else [made]), {}


_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
          "custom_vjp_call", "custom_vjp_call_jaxpr")  # fmt: skip


def _scan(params: dict[str, Any], given: list[Any], here: str, keep: Keep) -> tuple[list[Any], Found]:
    fixed, carry, rows = parts_of_scan(params, given)
    body = params["jaxpr"]

    def turn(carry: list[Any], row: list[Any]) -> tuple[list[Any], tuple[list[Any], Found]]:
        made, found = _run(body.jaxpr, body.consts, [*fixed, *carry, *row], here, keep)
        return made[: len(carry)], (made[len(carry) :], found)

    last, (each, found) = jax.lax.scan(turn, carry, rows, length=params["length"], reverse=params["reverse"])
    return [*last, *each], found


def _is_activation(x: Any, keep: Keep) -> bool:
    return hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating) and keep(x.shape)
