"""The first number that is not finite: every operation of a traced function asked, and the guilty one opened."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

ROOT = Path(__file__).parents[2]


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

    A loop or a call whose results are sound is not looked into, a guilty one is opened: a compilation or two for each
    level of nesting. An infinity below zero counts for nothing until it becomes a NaN: that is how attention masks.

    Args:
      fn: of trees of arrays.
      *args: which lie on one device.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return _search(closed.jaxpr, closed.consts, jax.tree.leaves(args), ())


def _search(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], outer: tuple[str, ...]) -> Origin | None:
    def marks(consts: Sequence[Any], args: Sequence[Any]) -> Any:
        return [(_marks(given), _marks(made)) for _, given, made in _steps(jaxpr, consts, args)]

    seen = jax.device_get(quickly(marks)(consts, args))
    guilty = next((i for i, (given, made) in enumerate(seen) if _born(given, made)), None)
    if guilty is None:
        return None

    def around(consts: Sequence[Any], args: Sequence[Any]) -> Any:
        return next(itertools.islice(_steps(jaxpr, consts, args), guilty, None))[1:]

    eqn, (given, made) = jaxpr.eqns[guilty], quickly(around)(consts, args)
    here = (*outer, *_scopes(eqn))
    found = next((o for parts in _inside(eqn, given, here) if (o := _search(*parts)) is not None), None)
    return found or _origin(eqn, given, made, here)


def quickly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for one call, on a CPU without the optimizations that would take longer than it."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(fn, compiler_options=options)


def gathers(jaxpr: core.Jaxpr, caller: str = "") -> list[str]:
    """The source lines that gather or scatter outside of any `shard_map`, each once, as "model.py:12".

    Args:
      jaxpr: of the program.
      caller: the line that called it: operations inside of `jax.numpy` functions have no line of their own.
    """
    lines: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        line = source_line(eqn) or caller
        if eqn.primitive.name.startswith(("gather", "scatter")):
            lines[line] = None
        elif eqn.primitive.name != "shard_map":
            inner = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values())))
            lines |= dict.fromkeys(found for x in inner if isinstance(x, core.Jaxpr) for found in gathers(x, line))
    return list(lines)


def _steps(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]
) -> Iterator[tuple[core.JaxprEqn, list[Any], list[Any]]]:
    """Each equation in order, with what goes in and what comes out."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        given = [v.val if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
        made = eqn.primitive.bind(*given, **eqn.primitive.get_bind_params(eqn.params))
        made = list(made) if eqn.primitive.multiple_results else [made]
        values.update(zip(eqn.outvars, made, strict=True))
        yield eqn, given, made


NAN, ABOVE, BELOW = 4, 2, 1


def _marks(values: Sequence[Any]) -> list[Any]:
    """What each floating-point array holds that is not finite, as bits; one reduction each."""
    return [
        jax.lax.reduce(_mark(jnp.asarray(x)), np.int32(0), jax.lax.bitwise_or, tuple(range(np.ndim(x))))
        for x in values
        if _is_float(x)
    ]


def _mark(x: Any) -> Any:
    infinite = jnp.where(x > 0, ABOVE, BELOW).astype(jnp.int32)
    return jnp.where(jnp.isnan(x), np.int32(NAN), jnp.where(jnp.isinf(x), infinite, np.int32(0)))


def _born(given: Sequence[Any], made: Sequence[Any]) -> bool:
    """From marks, whether a NaN comes out and none went in, or an infinity above zero of finite numbers alone."""
    into, out = (functools.reduce(operator.or_, map(int, marks), 0) for marks in (given, made))
    return bool(out & NAN and not into & NAN or out & ABOVE and not into)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)


Parts = tuple[core.Jaxpr, Sequence[Any], Sequence[Any], tuple[str, ...]]


def _inside(eqn: core.JaxprEqn, given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    """What an equation is made of, with what it is given: a loop turn by turn, a branch, or the body of a call."""
    opener = _OPEN.get(eqn.primitive.name, open_call)
    return opener(eqn.params, given, here)


def _open_scan(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    fixed, carry, rows = parts_of_scan(params, given)
    turns = range(params["length"])
    body = quickly(core.jaxpr_as_fun(params["jaxpr"]))
    for i in reversed(turns) if params["reverse"] else turns:
        args = (*fixed, *carry, *(x[i] for x in rows))
        made = body(*args)
        if _born(_marks(args), _marks(made)):
            place = (*here[:-1], f"{here[-1] if here else 'loop'}[{i}]")
            yield params["jaxpr"].jaxpr, params["jaxpr"].consts, args, place
        carry = made[: len(carry)]


def parts_of_scan(params: dict[str, Any], given: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """What stays, what is carried on and what is taken row by row."""
    if "ft_in" in params:  # jax 0.12 keeps them as a tree
        fixed, carry, rows = map(list, params["ft_in"].update(given).unpack())
        return fixed, carry, rows
    consts, carried = params["num_consts"], params["num_carry"]
    return list(given[:consts]), list(given[consts : consts + carried]), list(given[consts + carried :])


def _open_cond(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
    branch = params["branches"][int(given[0])]
    yield branch.jaxpr, branch.consts, given[1:], here


def open_call(params: dict[str, Any], given: Sequence[Any], here: tuple[str, ...]) -> Iterator[Parts]:
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
    kind = "NaN" if any(int(m) & NAN for m in _marks(made)) else "an infinity"
    return Origin(kind, eqn.primitive.name, _plain(stack), "transpose(" in stack, source_line(eqn), largest)


def _plain(stack: str) -> str:
    """Scopes without what differentiation wrapped around them."""
    for word in ("transpose(", "jvp(", "vmap(", "checkpoint/", "rematted_computation/", ")"):
        stack = stack.replace(word, "")
    return "/".join(part for part in stack.split("/") if part).replace("/[", "[")  # the number of a layer


def source_line(eqn: core.JaxprEqn, skip: Sequence[str] = ("site-packages",)) -> str:
    """The innermost "file:line" that called an operation, or "".

    Args:
      eqn: the operation.
      skip: files whose path contains one of these are passed over.
    """
    traceback = eqn.source_info.traceback
    frames: Sequence[Any] = () if traceback is None else traceback.frames
    for frame in frames:
        path = Path(frame.file_name)
        skipped = any(part in frame.file_name for part in skip)
        if not skipped and path.suffix == ".py" and path != Path(__file__):
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
            return f"{name}:{frame.line_num}"
    return ""
