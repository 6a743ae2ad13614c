"""The first number that is not finite: a traced function worked out an equation at a time, and down into the guilty."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import jaxscale

ROOT = Path(jaxscale.__file__).parent.parent


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a number stopped being finite.

    Args:
      kind: "NaN" or "an infinity".
      primitive: the operation that made it of finite numbers.
      place: the named scopes around it and the turns of the loops, outermost first, such as "runs/0[3]/mlp".
      backward: whether it is in the backward pass.
      source: file and line of the program, or "".
      largest: the largest magnitude among its operands.
    """

    kind: str
    primitive: str
    place: str
    backward: bool
    source: str
    largest: float

    def __str__(self) -> str:
        way = "backward" if self.backward else "forward"
        at = f" ({self.source})" if self.source else ""
        return (
            f"{way}, {self.place or 'outside of any module'}: {self.primitive} makes {self.kind} of numbers up to "
            f"{self.largest:.3g}{at}"
        )


def first_nonfinite(fn: Callable[..., Any], *args: Any) -> Origin | None:
    """Where `fn(*args)` first makes a NaN or an infinity of finite numbers, or `None`.

    The operations run one by one on the default device; a loop or a call whose results are sound is not looked into.
    An infinity below zero counts for nothing until it becomes a NaN: that is how attention masks.

    Args:
      fn: of trees of arrays.
      *args: which lie on one device.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return _search(closed.jaxpr, closed.consts, jax.tree.leaves(args), ())


def _search(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], outer: tuple[str, ...]) -> Origin | None:
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        given = [v.val if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
        made = _evaluate(eqn, given)
        if _born(given, made):
            here = (*outer, *_scopes(eqn))
            found = next((o for parts in _inside(eqn, given, here) if (o := _search(*parts)) is not None), None)
            return found or _origin(eqn, given, made, here)
        values.update(zip(eqn.outvars, made, strict=True))
    return None


def _evaluate(eqn: core.JaxprEqn, given: Sequence[Any]) -> list[Any]:
    functions, params = eqn.primitive.get_bind_params(eqn.params)
    made = eqn.primitive.bind(*functions, *given, **params)
    return list(made) if eqn.primitive.multiple_results else [made]


def _born(given: Sequence[Any], made: Sequence[Any]) -> bool:
    """Whether a NaN comes out and none went in, or an infinity above zero of finite numbers alone."""
    if _any(jnp.isnan, made):
        return not _any(jnp.isnan, given)
    return _any(jnp.isposinf, made) and not _any(lambda x: ~jnp.isfinite(x), given)


def _any(test: Callable[[Any], Any], values: Sequence[Any]) -> bool:
    return any(bool(jnp.any(test(x))) for x in values if _is_float(x))


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)


Parts = tuple[core.Jaxpr, Sequence[Any], Sequence[Any], tuple[str, ...]]


def _inside(eqn: core.JaxprEqn, given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    """What an equation is made of, with what it is given: a loop turn by turn, a branch, or the body of a call."""
    opener = _OPEN.get(eqn.primitive.name, _open_call)
    return opener(eqn.params, given, here)


def _open_scan(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    consts, carried = params["num_consts"], params["num_carry"]
    fixed, carry, rows = given[:consts], given[consts : consts + carried], given[consts + carried :]
    turns = range(params["length"])
    body = jax.jit(core.jaxpr_as_fun(params["jaxpr"]))
    for i in reversed(turns) if params["reverse"] else turns:
        args = (*fixed, *carry, *(x[i] for x in rows))
        yield params["jaxpr"].jaxpr, params["jaxpr"].consts, args, (*here[:-1], f"{here[-1] if here else 'loop'}[{i}]")
        carry = body(*args)[:carried]


def _open_cond(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    branch = params["branches"][int(given[0])]
    yield branch.jaxpr, branch.consts, given[1:], here


def _open_call(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    for value in params.values():
        body = getattr(value, "jaxpr", value)
        if isinstance(body, core.Jaxpr) and len(body.invars) == len(given):
            yield body, getattr(value, "consts", ()), given, here
            return


def _open_nothing(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    return iter(())


_OPEN = {"scan": _open_scan, "cond": _open_cond, "while": _open_nothing}


def _scopes(eqn: core.JaxprEqn) -> tuple[str, ...]:
    stack = str(eqn.source_info.name_stack)
    return (stack,) if stack else ()


def _origin(eqn: core.JaxprEqn, given: Sequence[Any], made: Sequence[Any], here: tuple[str, ...]) -> Origin:
    stack = "/".join(here)
    floats = [np.abs(np.asarray(x, np.float64)) for x in given if _is_float(x) and np.size(x)]
    largest = max((float(x[np.isfinite(x)].max(initial=0)) for x in floats), default=math.nan)
    kind = "NaN" if _any(jnp.isnan, made) else "an infinity"
    return Origin(kind, eqn.primitive.name, _plain(stack), "transpose(" in stack, _source(eqn), largest)


def _plain(stack: str) -> str:
    """Scopes without what differentiation wrapped around them."""
    for word in ("transpose(", "jvp(", "vmap(", "checkpoint/", "rematted_computation/", ")"):
        stack = stack.replace(word, "")
    return "/".join(part for part in stack.split("/") if part)


def _source(eqn: core.JaxprEqn) -> str:
    """The innermost line of ours, or of whoever wrote the model."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        path = Path(frame.file_name)
        if "site-packages" not in path.parts and path.suffix == ".py" and path != Path(__file__):
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{name}:{frame.line_num}"
    return ""
