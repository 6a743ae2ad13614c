"""Number of passes of an algorithm over its input, from its description as a cascade of einsums.

A cascade is a text with one einsum per line, in the notation of FuseMax (Nayak et al. 2024, arXiv:2406.10491):

    SN[m, p] = exp(QK[m, p] - GM[p])      computed for every m and p
    SD[p]    = sum SN[m, p]               an index that is only on the right is reduced, whatever the operation
    RM[m1+1, p] = max(RM[m1, p], LM[m1, p])     a running value
    AV[f, p] = RNV[f, M1, p] / RD[M1, p]  an upper-case index: the final value of a running value
    m = m1, m0                            rank m is split into chunks m1 of m0 elements

Only names and indices are read; words without brackets are operations. An element needs another pass if it is combined
with a value that depends on all elements. An algorithm with several passes over a rank holds the whole rank on the chip
or reads it several times: attention with three passes stores a row of scores as long as the sequence, with one pass it
does not. The number is a property of the algorithm and independent of hardware.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from jaxscale.errors import ConfigError, near

_TENSOR = re.compile(r"([A-Za-z]\w*)\[([^\]]*)\]")
_PARTS = re.compile(r"([a-z]\w*)\s*=\s*([a-z]\w*(?:\s*,\s*[a-z]\w*)+)")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor in an einsum: its indices, and those at which the final value of a running value is read."""

    name: str
    indices: tuple[str, ...]
    last: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Einsum:
    """One line of a cascade."""

    output: Tensor
    inputs: tuple[Tensor, ...]

    @property
    def indices(self) -> set[str]:
        """All indices of the einsum."""
        return {i for t in (self.output, *self.inputs) for i in t.indices}


@dataclasses.dataclass(frozen=True)
class Cascade:
    """Einsums in the order of their computation.

    Args:
      einsums: the lines.
      parts: by split rank, its parts from the outermost in.
    """

    einsums: tuple[Einsum, ...]
    parts: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, text: str) -> Cascade:
        """Parse a cascade in the module's notation.

        Raises:
          ConfigError: a line has another form, or a tensor is computed twice.
        """
        einsums, parts, made = [], {}, set()
        for line in filter(None, (line.split("#")[0].strip() for line in text.splitlines())):
            if cut := _PARTS.fullmatch(line):
                parts[cut[1]] = tuple(re.split(r"\s*,\s*", cut[2]))
                continue
            left, equals, right = line.partition("=")
            outputs, inputs = ([_tensor(*t) for t in _TENSOR.findall(side)] for side in (left, right))
            if not equals or len(outputs) != 1 or not inputs:
                raise ConfigError(f"a cascade's line '{line}' is not of the form 'S[m, p] = exp(X[m, p] - G[p])'")
            running = any(t.name == outputs[0].name for t in inputs)
            if outputs[0].name in made:
                raise ConfigError(f"the cascade computes {outputs[0].name} twice; give each tensor its own name")
            if running and not any("+" in i for i in _TENSOR.findall(left)[0][1].split(",")):
                raise ConfigError(
                    f"'{line}' computes {outputs[0].name} from itself; write a running value as X[m+1] = X[m]"
                )
            made.add(outputs[0].name)
            einsums.append(Einsum(outputs[0], tuple(t for t in inputs if t.name != outputs[0].name)))
        return cls(tuple(einsums), parts)


def passes(cascade: Cascade | str, rank: str = "m") -> int:
    """Number of passes of a cascade over a rank.

    Args:
      cascade: einsums, or their text.
      rank: the rank; a split rank counts with all its parts.

    Raises:
      ConfigError: no einsum runs over the rank, or a line cannot be parsed.
    """
    return max(by_tensor(cascade, rank).values())


def by_tensor(cascade: Cascade | str, rank: str = "m") -> dict[str, int]:
    """Return the pass in which each tensor is computed, for the einsums that run over the rank."""
    cascade = Cascade.of(cascade) if isinstance(cascade, str) else cascade
    parts = set(cascade.parts.get(rank, (rank,)))
    outer = cascade.parts.get(rank, (rank,))[0]
    known = {i for e in cascade.einsums for i in e.indices}
    if not parts <= known:
        raise ConfigError(f"no einsum of the cascade runs over '{rank}'{near(rank, {*known, *cascade.parts})}")
    # Time at which a tensor is available: n if element by element in pass n, n + 1/2 if after pass n.
    ready: dict[str, float] = {}
    made_in: dict[str, int] = {}
    for einsum in cascade.einsums:
        time = max((_after(ready.get(t.name, 0.0), outer in t.last) for t in einsum.inputs), default=0.0)
        if parts <= einsum.indices:  # a pass over every element
            time = float(max(1, math.ceil(time)))
            made_in[einsum.output.name] = int(time)
        ready[einsum.output.name] = _after(time, outer in einsum.indices and outer not in einsum.output.indices)
    return made_in


def _after(time: float, whole: bool) -> float:
    return math.floor(time) + 0.5 if whole and time else time


def _tensor(name: str, written: str) -> Tensor:
    indices: list[str] = []
    last: list[str] = []
    for index in filter(None, (i.strip() for i in written.split(","))):
        (last if index[0].isupper() else indices).append(re.sub(r"\+.*", "", index).strip().lower())
    return Tensor(name, tuple(indices), tuple(last))


CASCADES = {
    "attention in three passes": """
        QK[m, p] = Q[e, p] K[e, m]
        GM[p] = max QK[m, p]
        SN[m, p] = exp(QK[m, p] - GM[p])
        SD[p] = sum SN[m, p]
        A[m, p] = SN[m, p] / SD[p]
        AV[f, p] = A[m, p] V[f, m]
    """,
    "attention in two passes": """
        m = m1, m0
        QK[m1, m0, p] = Q[e, p] K[e, m1, m0]
        LM[m1, p] = max QK[m1, m0, p]
        SLN[m1, m0, p] = exp(QK[m1, m0, p] - LM[m1, p])
        SLD[m1, p] = sum SLN[m1, m0, p]
        GM[p] = max LM[m1, p]
        PRM[m1, p] = exp(LM[m1, p] - GM[p])
        SD[p] = sum(SLD[m1, p] PRM[m1, p])
        A[m1, m0, p] = SLN[m1, m0, p] PRM[m1, p] / SD[p]
        AV[f, p] = A[m1, m0, p] V[f, m1, m0]
    """,
    "attention in one pass": """
        m = m1, m0
        QK[m1, m0, p] = Q[e, p] K[e, m1, m0]
        LM[m1, p] = max QK[m1, m0, p]
        RM[m1+1, p] = max(RM[m1, p], LM[m1, p])
        SLN[m1, m0, p] = exp(QK[m1, m0, p] - RM[m1+1, p])
        SLD[m1, p] = sum SLN[m1, m0, p]
        SLNV[f, m1, p] = SLN[m1, m0, p] V[f, m1, m0]
        PRM[m1, p] = exp(RM[m1, p] - RM[m1+1, p])
        RD[m1+1, p] = RD[m1, p] PRM[m1, p] + SLD[m1, p]
        RNV[f, m1+1, p] = RNV[f, m1, p] PRM[m1, p] + SLNV[f, m1, p]
        AV[f, p] = RNV[f, M1, p] / RD[M1, p]
    """,
    "softmax in three passes": """
        GM[p] = max X[m, p]
        SN[m, p] = exp(X[m, p] - GM[p])
        SD[p] = sum SN[m, p]
        Y[m, p] = SN[m, p] / SD[p]
    """,
    "softmax in two passes": """
        m = m1, m0
        LE[m1, p] = exponent(max X[m1, m0, p])
        LF[m1, p] = sum(mantissa(X[m1, m0, p], LE[m1, p]))
        RE[m1+1, p] = max(RE[m1, p], LE[m1, p])
        RF[m1+1, p] = RF[m1, p] 2**(RE[m1, p] - RE[m1+1, p]) + LF[m1, p] 2**(LE[m1, p] - RE[m1+1, p])
        Y[m1, m0, p] = exp(X[m1, m0, p]) / (RF[M1, p] 2**RE[M1, p])
    """,
}
"""Cascades by name. Attention in three passes is the plain formula; in two passes, with the largest score of every
chunk first (TileFlow, Zheng et al. 2023); in one pass, with running values (FlashAttention, Dao et al. 2022, and the
forward pass of `pallas_kernels`). Softmax in two passes is `pallas_kernels.softmax`, a running pair of mantissa and
exponent (Dukhan & Ablavatski 2020)."""
