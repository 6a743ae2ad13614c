"""Assign instructions of a compiled step to the terms of a step's time (`jaxscale.plan.waterfall`)."""

from __future__ import annotations

import functools
import re

from jaxscale.plan.collectives import COLLECTIVE, Program, type_of
from jaxscale.plan.scopes import scopes_of
from jaxscale.plan.waterfall import exposed_along

CONTROL = frozenset(("while", "conditional", "call"))
"""Instructions that run others; their time is that of the others."""

UNNAMED = "kernels without a name"
"""The term of kernels that are no instruction of the compiled step."""


class InstructionTerms:
    """Terms of a program's instructions.

    Collectives are "exposed, AXES" in any scope. Instructions in the optimizer's scope are "optimizer", those in the
    scope "mix" (the kernel of `nn.Attention`) "attention". Matrix products are "experts" in that scope, "products"
    elsewhere. Copies to and from host memory are "host", and the rest is "memory-bound". A fusion belongs to the scope
    in its name, and is a product if it contains one.

    Args:
      program: the compiled step.

    Attributes:
      of: a cached function from the name of an instruction to its term; `None` for one that only runs others.
    """

    def __init__(self, program: Program):
        self.program = program
        self.of = functools.cache(self._of)

    def _of(self, name: str) -> str | None:
        """Return the term of an instruction by its name; `None` for one that only runs others."""
        text = self.program.made.get(name)
        if text is None:
            return UNNAMED
        opcode = _opcode(text)
        if opcode in CONTROL:
            return None
        if (axes := self._axes(name)) is not None:
            return exposed_along(axes) if axes else "memory-bound"  # a device alone only copies
        if opcode.split("-")[0] in ("send", "recv", "infeed", "outfeed") or self._crosses_host(text):
            return "host"
        named = re.search(r'op_name="([^"]*)"', text)
        scopes = scopes_of(named[1]).split("/") if named else []
        if "optimizer" in scopes:
            return "optimizer"
        if "mix" in scopes:
            return "attention"
        kernel = opcode == "custom-call" and "pallas_call" in scopes and {"loss", "experts"} & {*scopes}
        if kernel or self._multiplies(name):
            return "experts" if "experts" in scopes else "products"
        return "memory-bound"

    def _axes(self, name: str) -> tuple[str, ...] | None:
        """Return the mesh axes of the collective that an instruction is, starts, ends or contains; `None` without one.

        A fusion that also contains a matrix product is not counted as a collective, since the product takes the time.
        """
        text = self.program.made.get(name, "")
        if COLLECTIVE.search(text):
            return self.program.along(text)[0]
        if self.program.across is not None and re.search(r" (?:send|recv)(?:-done)?\(", text):
            return (self.program.across,)  # TPUs' slices send to each other through their hosts
        if ends := re.search(r" [\w-]+-(?:done|update)\(.*?%([\w.-]+)", text):
            return self._axes(ends[1])
        called = re.search(r" (?:fusion|async-start)\(.*\bcalls=%?([\w.-]+)", text)
        if called is None or self._multiplies(name):
            return None
        return next((axes for o in self._body(called[1]) if (axes := self._axes(o)) is not None), None)

    def _multiplies(self, name: str) -> bool:
        """Return whether an instruction is a matrix product or a convolution, or contains one."""
        text = self.program.made.get(name, "")
        if re.search(r" (?:dot|convolution|ragged-dot)\(| custom-call\(.*target=\"\S*(?:gemm|matmul|conv)", text):
            return True
        called = re.search(r" fusion(?:-start)?\(.*\bcalls=%?([\w.-]+)", text)
        return called is not None and any(self._multiplies(o) for o in self._body(called[1]))

    def _crosses_host(self, text: str) -> bool:
        """Return whether an instruction copies to or from host memory, which is memory space 5 in HLO."""
        if ends := re.search(r" copy-done\(.*?%([\w.-]+)", text):
            text = self.program.made.get(ends[1], "")
        return bool(re.search(r" copy(?:-start)?\(", text)) and "S(5)" in text

    def _body(self, computation: str) -> list[str]:
        return self.program.order.get(computation, [])


def _opcode(text: str) -> str:
    """Return the opcode of an instruction from its text."""
    return text[len(type_of(text)) :].strip().partition("(")[0]
