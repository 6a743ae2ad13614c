"""Finds the operation of a traced function that first makes a NaN or an infinity."""

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

from jaxscale.layout.tensors import Tree

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Origin:
    """The operation that first made a NaN or an infinity.

    Args:
      kind: "NaN" or "an infinity".
      primitive: name of the operation, whose operands were finite.
      place: named scopes and loop iterations around it, outermost first, such as "runs/0[3]/mlp".
      backward: whether it is in the backward pass.
      source: file and line of the program, or "".
      largest: the largest finite magnitude among its operands.
    """

    kind: str
    primitive: str
    place: str
    backward: bool
    source: str
    largest: float

    def __str__(self) -> str:
        direction = "backward" if self.backward else "forward"
        source = f" ({self.source})" if self.source else ""
        return (
            f"{direction}, {self.place or 'outside of any module'}: {self.primitive} makes {self.kind} of numbers up "
            f"to {self.largest:.3g}{source}"
        )


def first_nonfinite(fn: Callable[..., Any], *args: Tree) -> Origin | None:
    """Return where `fn(*args)` first makes a NaN or an infinity of finite numbers, or `None`.

    Only loops and calls with such results are searched, so there are one or two compilations for each level of nesting.
    Negative infinity does not count, since attention masks use it, but a NaN that is made of it does.

    Args:
      fn: a function of trees of arrays.
      *args: its arguments, on one device.
    """
    closed = jax.make_jaxpr(fn)(*args)
    return _search(closed.jaxpr, closed.consts, jax.tree.leaves(args), ())


def _search(jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], outer: tuple[str, ...]) -> Origin | None:
    def marks(consts: Sequence[Any], args: Sequence[Any]) -> list[tuple[list[jax.Array], list[jax.Array]]]:
        return [(_marks(operands), _marks(results)) for _, operands, results in _steps(jaxpr, consts, args)]

    all_marks = jax.device_get(quickly(marks)(consts, args))
    index = next((i for i, (operands, results) in enumerate(all_marks) if _is_origin(operands, results)), None)
    if index is None:
        return None

    def values(consts: Sequence[Any], args: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return next(itertools.islice(_steps(jaxpr, consts, args), index, None))[1:]

    eqn, (operands, results) = jaxpr.eqns[index], quickly(values)(consts, args)
    scopes = (*outer, *_scopes(eqn))
    inner = next((o for parts in _bodies(eqn, operands, scopes) if (o := _search(*parts)) is not None), None)
    return inner or _origin(eqn, operands, results, scopes)


def quickly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a jitted function for a single call.

    On a CPU it is compiled without optimizations, which would take longer than the call.

    Args:
      fn: a function of arrays.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(fn, compiler_options=options)


def gathers(jaxpr: core.Jaxpr, caller: str = "") -> list[str]:
    """Return the source lines that gather or scatter outside of any `shard_map`, such as "model.py:12", each once.

    Args:
      jaxpr: the program.
      caller: the line that called it, for operations inside of `jax.numpy` functions, which have no line of their own.
    """
    lines: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        line = source_line(eqn) or caller
        if eqn.primitive.name.startswith(("gather", "scatter")):
            lines[line] = None
        elif eqn.primitive.name != "shard_map":
            inner = (getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(eqn.params.values())))
            lines |= dict.fromkeys(entry for x in inner if isinstance(x, core.Jaxpr) for entry in gathers(x, line))
    return list(lines)


def _steps(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]
) -> Iterator[tuple[core.JaxprEqn, list[Any], list[Any]]]:
    """Yield each equation in order, with its operands and results."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = [v.val if isinstance(v, core.Literal) else values[v] for v in eqn.invars]
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
        results = list(results) if eqn.primitive.multiple_results else [results]
        values.update(zip(eqn.outvars, results, strict=True))
        yield eqn, operands, results


NAN, ABOVE, BELOW = 4, 2, 1


def _marks(values: Sequence[Any]) -> list[Any]:
    """Return bits for the kinds of non-finite numbers in each floating-point array, by one reduction each."""
    return [
        jax.lax.reduce(_mark(jnp.asarray(x)), np.int32(0), jax.lax.bitwise_or, tuple(range(np.ndim(x))))
        for x in values
        if _is_float(x)
    ]


def _mark(x: jax.Array) -> jax.Array:
    infinite = jnp.where(x > 0, ABOVE, BELOW).astype(jnp.int32)
    return jnp.where(jnp.isnan(x), np.int32(NAN), jnp.where(jnp.isinf(x), infinite, np.int32(0)))


def _is_origin(operands: Sequence[Any], results: Sequence[Any]) -> bool:
    """Return, from marks, whether a NaN is made without a NaN, or a positive infinity of finite numbers."""
    into, out = (functools.reduce(operator.or_, map(int, marks), 0) for marks in (operands, results))
    return bool(out & NAN and not into & NAN or out & ABOVE and not into)


def _is_float(x: object) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", type(x)), jnp.floating)


Parts = tuple[core.Jaxpr, Sequence[Any], Sequence[Any], tuple[str, ...]]


def _bodies(eqn: core.JaxprEqn, operands: Sequence[Any], scopes: tuple[str, ...]) -> Iterator[Parts]:
    """Yield the programs inside an equation, with their operands: a loop's iterations, a branch, a call's body."""
    opener = _OPEN.get(eqn.primitive.name, open_call)
    return opener(eqn.params, operands, scopes)


def _open_scan(params: dict[str, Any], operands: Sequence[Any], scopes: tuple[str, ...]) -> Iterator[Parts]:
    fixed, carry, rows = parts_of_scan(params, operands)
    iterations = range(params["length"])
    body = quickly(core.jaxpr_as_fun(params["jaxpr"]))
    for i in reversed(iterations) if params["reverse"] else iterations:
        args = (*fixed, *carry, *(x[i] for x in rows))
        results = body(*args)
        if _is_origin(_marks(args), _marks(results)):
            place = (*scopes[:-1], f"{scopes[-1] if scopes else 'loop'}[{i}]")
            yield params["jaxpr"].jaxpr, params["jaxpr"].consts, args, place
        carry = results[: len(carry)]


def parts_of_scan(params: dict[str, Any], operands: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """Split the operands of a `scan` into constants, the carry, and arrays that are scanned over.

    Args:
      params: parameters of the equation.
      operands: its operands, values or variables.
    """
    if "ft_in" in params:  # jax 0.12 stores them as a tree
        fixed, carry, rows = map(list, params["ft_in"].update(operands).unpack())
        return fixed, carry, rows
    consts, carried = params["num_consts"], params["num_carry"]
    return list(operands[:consts]), list(operands[consts : consts + carried]), list(operands[consts + carried :])


def _open_cond(params: dict[str, Any], operands: Sequence[Any], scopes: tuple[str, ...]) -> Iterator[Parts]:
    branch = params["branches"][int(operands[0])]
    yield branch.jaxpr, branch.consts, operands[1:], scopes


def open_call(params: dict[str, Any], operands: Sequence[Any], scopes: tuple[str, ...]) -> Iterator[Parts]:
    """Yield the body of a call (`jit`, `remat`, `custom_vjp` and so on), if the equation is one.

    Args:
      params: parameters of the equation.
      operands: its operands.
      scopes: named scopes around it.
    """
    for value in params.values():
        body = getattr(value, "jaxpr", value)
        if isinstance(body, core.Jaxpr) and len(body.invars) == len(operands):
            yield body, getattr(value, "consts", ()), operands, scopes
            return


def _open_nothing(params: dict[str, Any], operands: Sequence[Any], scopes: tuple[str, ...]) -> Iterator[Parts]:
    return iter(())


_OPEN = {"scan": _open_scan, "cond": _open_cond, "while": _open_nothing}


def _scopes(eqn: core.JaxprEqn) -> tuple[str, ...]:
    stack = str(eqn.source_info.name_stack)
    return (stack,) if stack else ()


def _origin(eqn: core.JaxprEqn, operands: Sequence[Any], results: Sequence[Any], scopes: tuple[str, ...]) -> Origin:
    stack = "/".join(scopes)
    floats = [np.abs(np.asarray(x, np.float64)) for x in operands if _is_float(x) and np.size(x)]
    largest = max((float(x[np.isfinite(x)].max(initial=0)) for x in floats), default=math.nan)
    kind = "NaN" if any(int(m) & NAN for m in _marks(results)) else "an infinity"
    return Origin(kind, eqn.primitive.name, _plain(stack), "transpose(" in stack, source_line(eqn), largest)


def _plain(stack: str) -> str:
    """Return scopes without the names that `grad`, `vmap` and remat add."""
    for word in ("transpose(", "jvp(", "vmap(", "checkpoint/", "rematted_computation/", ")"):
        stack = stack.replace(word, "")
    return "/".join(part for part in stack.split("/") if part).replace("/[", "[")  # "[3]" is the index of a layer


def source_line(eqn: core.JaxprEqn, skip: Sequence[str] = ("site-packages",)) -> str:
    """Return the innermost "file:line" that called an operation, or "".

    Args:
      eqn: the operation.
      skip: files whose path contains one of these are ignored.
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
