"""Parsing of JAX's operation names: the module of an operation, and the pass of the step that it belongs to."""

from __future__ import annotations

import re
from collections.abc import Collection

from jax.extend import core

from jaxscale.parallel.pipeline import BACKWARD, FORWARD

PASSES = ("forward", "recomputed", "backward", "other")
"""Passes of a step; "other" is neither differentiated nor a derivative, such as the optimizer's update."""


def stage_of(name: str) -> str:
    """Return which of `PASSES` an operation belongs to.

    Recomputation within a derivative counts as recomputation. A pipeline stage runs its forward pass without
    differentiation, and recomputes it in its backward phase.

    Args:
      name: JAX's name of the operation.
    """
    again = "recomputed" if BACKWARD in name else "forward"
    marks = [(_AGAIN, "recomputed"), ("transpose(", "backward"), ("jvp(", again)]
    marks += [(BACKWARD, "backward"), (FORWARD, "forward")]
    return next((stage for mark, stage in marks if mark in name), "other")


def scopes_of(name: str) -> str:
    """Return the named scopes in an operation's name, without transformations and control flow.

    The scope of a `jnp.einsum`, which is its formula, is left out.

    Args:
      name: JAX's name of the operation.
    """
    parts = _WRAPPED.sub("", re.sub(r"\bjit\([^()]*\)", "", name)).split("/")
    return "/".join(p for p in parts if p and "->" not in p and not _CONTROL.fullmatch(p))


def share_of_updates(jaxpr: core.Jaxpr) -> float | None:
    """Return the fraction of a run's updates that take a branch, or `None` if its named scopes do not tell.

    The scope "every_10_updates" marks what an optimizer or an algorithm does every 10 updates, "first_update" what it
    does once.

    Args:
      jaxpr: the branch's jaxpr.
    """
    return share_in({part for eqn in jaxpr.eqns for part in str(eqn.source_info.name_stack).split("/")})


def share_in(names: Collection[str]) -> float | None:
    """Return the fraction of a run's updates that take a branch with these named scopes, as `share_of_updates`.

    Args:
      names: the scopes.
    """
    if "first_update" in names:
        return 0.0
    every = next((m for m in map(re.compile(r"every_(\d+)_updates").fullmatch, sorted(names)) if m), None)
    return None if every is None else 1 / int(every[1])


def iterations_in(names: Collection[str]) -> int | None:
    """Return about how often a loop whose length depends on data runs, or `None` if its named scopes do not tell.

    The scope "about_16_iterations" around a loop states it.

    Args:
      names: the scopes.
    """
    about = next((m for m in map(re.compile(r"about_(\d+)_iterations").fullmatch, sorted(names)) if m), None)
    return None if about is None else int(about[1])


_AGAIN = "rematted_computation"
_WRAPPED = re.compile(rf"\w+\(|\)|\b{_AGAIN}\b")  # scopes are inside "transpose(jvp(...))"
_CONTROL = re.compile(
    rf"{FORWARD}|{BACKWARD}|\w+_phase|\[\d+\]|while|body|cond|closed_call|checkpoint|remat|shard_map|branch_\d+_fun|"
    r"first_update|every_\d+_updates|about_\d+_iterations|pjit|eval_jaxpr"
)
