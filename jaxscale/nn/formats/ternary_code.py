"""`TernaryCode`: experts of -1, 0 and 1 in less than one bit for each weight."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt16

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree
from jaxscale.nn.formats.rebuilt import Axes, Rebuilt
from jaxscale.nn.formats.stored import sizes_of
from jaxscale.nn.weight_format import WeightFormat

_ENTRIES = 2**16 - 1  # leaves of a tree with three branches: an odd number, within uint16
_LONGEST = 64  # weights of a word; 2 bits each in the dictionary
_LEAST = 0.7  # weights below this times the row's mean are 0, however much fits (Li et al. 2016, arXiv:1605.04711)
_BELOW = 1.6  # bits, which any three values fit in
_SHARE = 0.94  # of the bits are entropy, about what words of 16 bits reach


class Dictionary(NamedTuple):
    """Tunstall's code of words of 16 bits, each for a sequence of up to 64 weights that are independent.

    Args:
      children: int32 (nodes, 3): the node after a 0, 1 or -1, or -1 - word where a sequence is complete.
      zeros: int32 (nodes,): the word that is complete after nothing but zeros.
      lengths: int32 (words,): weights of each word.
      symbols: uint32 (words, 4): the weights, 2 bits each from the lowest: 0, 1, or 2 for -1.
    """

    children: np.ndarray
    zeros: np.ndarray
    lengths: np.ndarray
    symbols: np.ndarray


@functools.lru_cache(maxsize=8)
def dictionary(zeros: float) -> Dictionary:
    """Return the dictionary whose words have most weights on average.

    The most probable sequence is replaced by the three that are one weight longer, until there are as many as words.

    Args:
      zeros: the probability of 0; 1 and -1 are equally probable.
    """
    each = [math.log(zeros), math.log((1 - zeros) / 2), math.log((1 - zeros) / 2)]
    children = [[0, 0, 0]]
    # most probable first, then in order of creation: with the node before, the last weight, and all weights in 2 bits
    heap = [(-each[s], s, 0, s, 1, s) for s in (0, 1, 2)]
    heapq.heapify(heap)
    leaves, made, complete = 3, 3, []
    while leaves <= _ENTRIES - 2 and heap:
        cost, number, parent, symbol, length, whole = heapq.heappop(heap)
        if length == _LONGEST:
            complete.append((cost, number, parent, symbol, length, whole))
            continue
        children[parent][symbol] = node = len(children)
        children.append([0, 0, 0])
        for s in (0, 1, 2):
            heapq.heappush(heap, (cost - each[s], made, node, s, length + 1, whole | s << 2 * length))
            made += 1
        leaves += 2
    complete += heap
    for word, (_, _, parent, symbol, _, _) in enumerate(complete):
        children[parent][symbol] = -1 - word
    packed = b"".join(whole.to_bytes(_LONGEST // 4, "little") for *_, whole in complete)
    symbols = np.frombuffer(packed, "<u4").reshape(len(complete), -1)
    ends = np.zeros(len(children), np.int32)
    for node in range(len(children) - 1, -1, -1):
        after = children[node][0]
        ends[node] = -1 - after if after < 0 else ends[after]
    return Dictionary(np.array(children, np.int32), ends, np.array([c[4] for c in complete], np.int32), symbols)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TernaryWords(Rebuilt):
    """A kernel of -1, 0 and 1 times a scale for each output.

    Args:
      words: uint16 `(*layers, words)`: of all outputs one after the other, then 0.
      counts: uint16 `(*layers, *outputs)`: words of each output.
      scale: bfloat16 `(*layers, *outputs)`.
      inputs: sizes of the kernel's inputs.
      outputs: sizes of its outputs.
      zeros: of `dictionary`.
    """

    words: UInt16[Array, "..."]
    counts: UInt16[Array, "..."]
    scale: Float[Array, "..."]
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    outputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    zeros: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's shape."""
        return (*self.words.shape[:-1], *self.inputs, *self.outputs)

    def names(self, part: str, shape: tuple[int, ...], axes: Axes) -> Axes:
        """See `Rebuilt`: layers and experts have the kernel's axes; devices that share an expert all have its words."""
        lead = self.words.ndim - 1
        return (*axes[:lead], *(None,) * (len(shape) - lead))

    def symbols(self) -> Int[Array, "..."]:
        """Return the kernel without scales: int8, -1, 0 and 1."""
        n, m = math.prod(self.inputs), math.prod(self.outputs)
        words = self.words.reshape(-1, self.words.shape[-1])
        counts = self.counts.reshape(-1, m).astype(jnp.int32)
        decode = functools.partial(_decoded, n=n, code=dictionary(self.zeros))
        rows = lax.map(lambda both: decode(*both), (words, counts))
        return jnp.swapaxes(rows, -1, -2).reshape(self.shape)

    def dense(self, dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """See `Weight`; float32 by default."""
        lead = self.words.ndim - 1
        scale = self.scale.reshape(*self.scale.shape[:lead], *(1,) * len(self.inputs), *self.outputs)
        return (self.symbols() * scale.astype(jnp.float32)).astype(dtype or jnp.float32)


def check_bits(setting: str, bits: Any) -> None:
    """Check bits for each weight of a `TernaryCode`.

    Args:
      setting: its name, such as "TernaryCode.bits".
      bits: its value.

    Raises:
      ConfigError: they are out of their range.
    """
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits < _BELOW:
        raise ConfigError(
            f"{setting} = {bits!r}: must be a number above 0 and below {_BELOW}, which any three values fit in; the "
            "paper has 0.8"
        )


@register
@dataclasses.dataclass(frozen=True)
class TernaryCode(WeightFormat):
    """Experts' matrices as -1, 0 and 1 in less than one bit for each weight (QMoE, arXiv:2310.16795).

    Sequences of weights are words of 16 bits from one dictionary (here Tunstall's code), which decode exactly. Every
    matrix has the same number of bits, scales included: of each output as many weights are not 0 as make it fit.
    Matrices that are not of experts stay as they are. A layer decodes its experts when it computes; there is no kernel
    that multiplies by words.

    Args:
      bits: for each weight, above 0 and below 1.6.

    Raises:
      ConfigError: `bits` is out of its range.
    """

    bits: float = 0.8

    def __post_init__(self) -> None:
        check_bits("TernaryCode.bits", self.bits)

    @property
    def zeros(self) -> float:
        """The share of zeros of the sequences that fill `bits`."""
        low, high = 1 / 3, 1 - 1e-9
        for _ in range(60):
            middle = (low + high) / 2
            entropy = -middle * math.log2(middle) - (1 - middle) * math.log2((1 - middle) / 2)
            low, high = (middle, high) if entropy > self.bits * _SHARE else (low, middle)
        return round(low, 4)

    def check(self, infos: Tree) -> None:
        """See `WeightFormat`.

        Raises:
          ConfigError: the model has no experts.
        """
        if not any(i.contracted is not None and "experts" in i.axes for i in jax.tree.leaves(infos)):
            raise ConfigError(
                "TernaryCode is for the matrices of experts, and this model has none; the nearest format for other "
                "matrices is 'ternary', with 2 bits for each weight"
            )

    def covers(self, info: TensorInfo) -> bool:
        """Return whether a matrix is of experts.

        Raises:
          ConfigError: its scales and zeros alone take more than `bits`, or an output has too many inputs.
        """
        if "experts" not in info.axes or not super().covers(info):
            return False
        _, ins, outs = sizes_of(info.shape, info.contracted or ())
        n, m = math.prod(ins), math.prod(outs)
        used = self._taken(n, m)
        if used > self.bits:
            least = self._least(n, m)
            hint = "no bits below 1.6 are enough; use 'ternary'" if least is None else f"set at least {least}"
            raise ConfigError(
                f"TernaryCode.bits = {self.bits}: scales and zeros of {info.path} take {used} bits for each of its "
                f"{n} x {m} weights; {hint}"
            )
        if n // int(dictionary(self.zeros).lengths.min()) >= 2**16:
            raise ConfigError(
                f"TernaryCode stores up to 65535 words for an output, and {info.path} has {n} inputs; leave it in "
                "another format"
            )
        return True

    def _taken(self, n: int, m: int) -> float:
        """Return `bits` if scales and zeros fit into them, and else the bits for each weight that these alone take."""
        code = dictionary(self.zeros)
        needed = m * -(-n // int(code.lengths[code.zeros[0]]))
        return self.bits if self._words(n, m) >= needed else math.ceil(100 * 16 * (needed + 2 * m) / (n * m)) / 100

    def _least(self, n: int, m: int) -> float | None:
        """Return the least bits, in hundredths, whose own dictionary fits, as words have fewer zeros with more bits."""
        bits = self.bits
        while bits < _BELOW:
            used = TernaryCode(bits)._taken(n, m)
            if used <= bits:
                return bits
            bits = max(used, round(bits + 0.01, 2))
        return None

    def _words(self, n: int, m: int) -> int:
        return int(self.bits * n * m / 16) - 2 * m  # of each output a scale and a count, of 16 bits

    def encode(
        self,
        kernel: Float[Array, "..."],
        contracted: tuple[int, ...],
        weights: Float[Array, "..."] | None = None,
    ) -> TernaryWords:
        """See `WeightFormat`.

        Args:
          kernel: the model's matrix.
          contracted: see `WeightFormat`.
          weights: factors on the error of each input, above 0: (n,) or `(*layers, n)`; `None` is equal ones.
        """
        stack, ins, outs = sizes_of(kernel.shape, contracted)
        n, m = math.prod(ins), math.prod(outs)
        rows = jnp.swapaxes(kernel.astype(jnp.float32).reshape(-1, n, m), -1, -2)
        by = jnp.broadcast_to(jnp.ones(n) if weights is None else weights, (*stack, n)).reshape(-1, n)
        one = functools.partial(_encoded, words=self._words(n, m), code=dictionary(self.zeros))
        words, counts, scale = lax.map(lambda both: one(*both), (rows, by))
        counts, scale = counts.reshape(*stack, *outs), scale.reshape(*stack, *outs)
        return TernaryWords(words.reshape(*stack, -1), counts, scale, ins, outs, self.zeros)


def _encoded(
    rows: Float[Array, "m n"], by: Float[Array, " n"], *, words: int, code: Dictionary
) -> tuple[UInt16[Array, " words"], UInt16[Array, " m"], Float[Array, " m"]]:
    """Return the words of a matrix, the number of them in each row, and the scales of the rows."""
    size = jnp.abs(rows)
    allowed = size > _LEAST * jnp.mean(size, axis=1, keepdims=True)
    rank = jnp.argsort(jnp.argsort(-(size * by), axis=1), axis=1)

    def symbols(most: Int[Array, ""]) -> Int[Array, "m n"]:
        return jnp.where(allowed & (rank < most), jnp.where(rows > 0, 1, 2), 0)

    def fits(most: Int[Array, ""]) -> Array:
        return jnp.sum(_parsed(symbols(most), code) >= 0) <= words

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends  # `low` weights of a row that are not 0 fit, `high` may not
        middle = (low + high + 1) // 2
        good = fits(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    n = rows.shape[1]
    most = lax.fori_loop(0, n.bit_length(), halve, (jnp.int32(0), jnp.int32(n)))[0]
    chosen = symbols(most)
    emitted = _parsed(chosen, code)
    place = jnp.where(emitted >= 0, jnp.cumsum((emitted >= 0).reshape(-1)).reshape(emitted.shape) - 1, words)
    packed = jnp.zeros(words, jnp.uint16).at[place].set(emitted.astype(jnp.uint16), mode="drop")
    square = (chosen > 0) * by**2
    scale = jnp.sum(size * square, axis=1) / jnp.maximum(jnp.sum(square, axis=1), jnp.finfo(jnp.float32).tiny)
    return packed, jnp.sum(emitted >= 0, axis=1).astype(jnp.uint16), scale.astype(jnp.bfloat16)


def _parsed(symbols: Int[Array, "m n"], code: Dictionary) -> Int[Array, "m n+1"]:
    """Return the word that is complete with each weight of a row, and at its end, or -1 where none is."""
    children, zeros = jnp.asarray(code.children), jnp.asarray(code.zeros)

    def advance(node: Array, symbol: Array) -> tuple[Array, Array]:
        after = children[node, symbol]
        return jnp.maximum(after, 0), jnp.where(after < 0, -1 - after, -1)

    last, emitted = lax.scan(advance, jnp.zeros(symbols.shape[0], jnp.int32), symbols.T)
    end = jnp.where(last > 0, zeros[last], -1)  # filled up with zeros that are beyond the row
    return jnp.concatenate([emitted, end[None]]).T


def _decoded(
    words: UInt16[Array, " words"], counts: Int[Array, " m"], *, n: int, code: Dictionary
) -> Int[Array, "m n"]:
    """Return the rows of a matrix: -1, 0 and 1, as int8."""
    lengths, symbols = jnp.asarray(code.lengths), jnp.asarray(code.symbols)
    ends, index = jnp.cumsum(counts), jnp.arange(words.shape[0])
    row = jnp.searchsorted(ends, index, side="right")  # words after the last row's are of a row that is not there
    length = lengths[words.astype(jnp.int32)]
    before = jnp.cumsum(length) - length
    at = before - before[(ends - counts)[jnp.minimum(row, counts.shape[0] - 1)]]  # the place in its row
    first = jnp.zeros((counts.shape[0], n), jnp.int32).at[row, at].max(index, mode="drop")
    word = lax.cummax(first, axis=1)
    offset = jnp.arange(n) - at[word]
    packed = symbols[words.astype(jnp.int32)[word], offset // 16]
    symbol = (packed >> (2 * (offset % 16)).astype(jnp.uint32)) & 3
    return jnp.where(symbol == 2, -1, symbol.astype(jnp.int8)).astype(jnp.int8)
