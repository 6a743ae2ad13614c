"""What the names that JAX gives operations say: in which module they stand, and in which pass of a step."""

from __future__ import annotations

import re

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


_AGAIN = "rematted_computation"
_WRAPPED = re.compile(rf"\w+\(|\)|\b{_AGAIN}\b")  # scopes stand within "transpose(jvp(...))"
_CONTROL = re.compile(
    rf"{FORWARD}|{BACKWARD}|\w+_phase|\[\d+\]|while|body|cond|closed_call|checkpoint|remat|shard_map|branch_\d+_fun|"
    "pjit|eval_jaxpr"
)
