"""What the names that JAX gives operations say: in which module they stand, and in which pass of a step."""

from __future__ import annotations

import re
from typing import Any

from jaxscale.parallel.pipeline import BACKWARD, FORWARD

PASSES = ("forward", "recomputed", "backward", "other")
"""Where in a step: the last is what is neither differentiated nor a derivative, such as the optimizer's update."""


def stage_of(name: str) -> str:
    """Which of `PASSES` an operation is of, by its name: what is made again within a derivative is that first.

    A pipeline's stage goes forward without being differentiated, and once more in its backward phase.
    """
    again = "recomputed" if BACKWARD in name else "forward"
    marks = [(_AGAIN, "recomputed"), ("transpose(", "backward"), ("jvp(", again)]
    marks += [(BACKWARD, "backward"), (FORWARD, "forward")]
    return next((stage for mark, stage in marks if mark in name), "other")


def scopes_of(name: str) -> str:
    """The named scopes in what JAX calls an operation, without transformations and control flow around them.

    `jnp.einsum` names its own after its formula, which is no module.
    """
    parts = _WRAPPED.sub("", re.sub(r"\bjit\([^()]*\)", "", name)).split("/")
    return "/".join(p for p in parts if p and "->" not in p and not _CONTROL.fullmatch(p))


def share_of_updates(jaxpr: Any) -> float | None:
    """The share of a run's updates that take a branch, where the branch's named scopes say so; `None` where not.

    An optimizer that does something every 10 updates does it within the scope "every_10_updates", and what it does once
    in "first_update".
    """
    names = {part for eqn in jaxpr.eqns for part in str(eqn.source_info.name_stack).split("/")}
    if "first_update" in names:
        return 0.0
    every = next((m for m in map(re.compile(r"every_(\d+)_updates").fullmatch, sorted(names)) if m), None)
    return None if every is None else 1 / int(every[1])


_AGAIN = "rematted_computation"
_WRAPPED = re.compile(rf"\w+\(|\)|\b{_AGAIN}\b")  # scopes stand within "transpose(jvp(...))"
_CONTROL = re.compile(
    rf"{FORWARD}|{BACKWARD}|\w+_phase|\[\d+\]|while|body|cond|closed_call|checkpoint|remat|shard_map|branch_\d+_fun|"
    r"first_update|every_\d+_updates|pjit|eval_jaxpr"
)
