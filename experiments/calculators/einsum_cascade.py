"""How often an algorithm has to go through its input: the passes of a cascade of einsums over a rank.

A cascade is a text, an einsum a line, in the notation of FuseMax (Nayak et al. 2024, arXiv:2406.10491):

    SN[m, p] = exp(QK[m, p] - GM[p])      what holds for every m and p
    SD[p]    = sum SN[m, p]               an index on the right only is reduced, whatever the operation's name
    RM[m1+1, p] = max(RM[m1, p], LM[m1, p])     a running value
    AV[f, p] = RNV[f, M1, p] / RD[M1, p]  an index in capitals is a running value's last
    m = m1, m0                            rank m is cut into chunks m1 of m0

Only names and indices are read; words without brackets are operations. An element is gone through again where it meets
what is known only once every element has been seen. Whoever goes through a rank several times holds all of it on the
chip or reads it as often: attention of three passes keeps or spills a row of scores as long as the sequence, of one
pass neither. The number is a property of the algorithm, whatever the hardware.
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
    """A tensor as an einsum names it: its indices, and those at which it is read after the last step."""

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
        """Everything it runs over."""
        return {i for t in (self.output, *self.inputs) for i in t.indices}


@dataclasses.dataclass(frozen=True)
class Cascade:
    """Einsums in the order in which they are worked out.

    Args:
      einsums: the lines.
      parts: of a rank that is cut, its parts from the outside in.
    """

    einsums: tuple[Einsum, ...]
    parts: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, text: str) -> Cascade:
        """Reads the notation above.

        Raises:
          ConfigError: a line of another form, or a tensor made twice.
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
                raise ConfigError(f"the cascade makes {outputs[0].name} twice; give each tensor a name of its own")
            if running and not any("+" in i for i in _TENSOR.findall(left)[0][1].split(",")):
                raise ConfigError(
                    f"'{line}' makes {outputs[0].name} of itself; a running value is written X[m+1] = X[m]"
                )
            made.add(outputs[0].name)
            einsums.append(Einsum(outputs[0], tuple(t for t in inputs if t.name != outputs[0].name)))
        return cls(tuple(einsums), parts)


def passes(cascade: Cascade | str, rank: str = "m") -> int:
    """How often the rank's elements are gone through.

    Args:
      cascade: einsums, or their text.
      rank: over which to count; of one that is cut, all its parts together.

    Raises:
      ConfigError: no einsum runs over the rank, or a line that cannot be read.
    """
    return max(by_tensor(cascade, rank).values())


def by_tensor(cascade: Cascade | str, rank: str = "m") -> dict[str, int]:
    """Tensor -> the pass in which it is made, of those that are made by going through the rank."""
    cascade = Cascade.of(cascade) if isinstance(cascade, str) else cascade
    parts = set(cascade.parts.get(rank, (rank,)))
    outer = cascade.parts.get(rank, (rank,))[0]
    known = {i for e in cascade.einsums for i in e.indices}
    if not parts <= known:
        raise ConfigError(f"no einsum of the cascade runs over '{rank}'{near(rank, {*known, *cascade.parts})}")
    # When a tensor is to be had: in pass n, element by element (n), or when pass n is over (n + 1/2).
    ready: dict[str, float] = {}
    found: dict[str, int] = {}
    for einsum in cascade.einsums:
        time = max((_after(ready.get(t.name, 0.0), outer in t.last) for t in einsum.inputs), default=0.0)
        if parts <= einsum.indices:  # goes through every element
            time = float(max(1, math.ceil(time)))
            found[einsum.output.name] = int(time)
        ready[einsum.output.name] = _after(time, outer in einsum.indices and outer not in einsum.output.indices)
    return found


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
"""Cascades by name. Attention in three passes is what the formula says; in two, every chunk's largest score first
(TileFlow, Zheng et al. 2023); in one, running values (FlashAttention, Dao et al. 2022, and `pallas_kernels`' forward
pass). Softmax in two passes is `pallas_kernels.softmax`, a running pair of mantissa and exponent (Dukhan & Ablavatski
2020)."""
