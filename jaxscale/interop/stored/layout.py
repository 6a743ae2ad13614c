"""A layout of quantised weights in a folder: which tensors of its files make one weight, and how to decode them."""

from __future__ import annotations

import dataclasses
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.fields import Fields
from jaxscale.interop.safetensors import Stored, Tensors
from jaxscale.interop.stored.bits import e8m0

Entries = Mapping[str, Stored]
"""The entry of each tensor of a weight, by its role ("codes", "scale")."""

Arrays = Mapping[str, np.ndarray]
"""The values of each tensor of a weight, by its role."""


@dataclasses.dataclass(frozen=True)
class Form:
    """How the names of a weight's tensors end; what stands before is the same for all of them.

    Args:
      weight: the ending of the weight's own name, ".weight".
      needs: role -> ending of the tensors that it needs. The first is that of the codes, which decides.
      may: role -> ending of those that it may have.
    """

    weight: str
    needs: Mapping[str, str]
    may: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a weight is kept as it is: number(code) · scale, or (number(code) - zero) · scale.

    Args:
      numbers: the type of number of the codes, see `jaxscale.nn.formats.numbers_of`.
      rows: outputs that share a scale; `None` is all.
      columns: inputs that share a scale; `None` is all.
      scale: "float32", "bfloat16" or "float16"; "e8m0", powers of two; or "e4m3", over a float32 number of the matrix.
      zeros: whether there are zero points, which are codes.
      activations: bits to which products round each token's inputs; `None` does not round them.
    """

    numbers: str
    rows: int | None
    columns: int | None
    scale: str
    zeros: bool = False
    activations: int | None = None

    def block(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return how many entries along each dimension share a scale.

        Args:
          shape: of the weight, as in `Planes`.
        """
        if len(shape) == 2:
            return self.rows or shape[0], self.columns or shape[1]
        return 1, self.columns or shape[1], self.rows or shape[2]


@dataclasses.dataclass(frozen=True)
class Planes:
    """The content of a weight that is kept as it is, in the checkpoint's orientation.

    Args:
      codes: uint8 (outputs, inputs), or (experts, inputs, outputs) of all experts of a layer; one code in a byte.
      scale: float, one per block (blocks of outputs, blocks of inputs, or with experts likewise); of types of 8 bits
        their bytes.
      zeros: uint8, likewise.
      over: float32 (1, 1), the number that all scales are divided by.
    """

    codes: np.ndarray
    scale: np.ndarray
    zeros: np.ndarray | None = None
    over: np.ndarray | None = None


class QuantisedLayout(ABC):
    """A layout of quantised tensors; each file of `jaxscale/interop/stored` defines one.

    A subclass reads `quantization_config` when it is made, and raises CheckpointError, naming the field, for a
    configuration that it cannot decode.

    Args:
      config: the fields of `quantization_config`.
    """

    methods: ClassVar[tuple[str, ...]]
    """Values of `quant_method` that mean this layout."""

    rounds_activations: ClassVar[bool] = False
    """Whether a folder can say that products round activations."""

    few_scales: ClassVar[bool] = False
    """Whether runs of ours with scales of 8 bits are written in it."""

    forms: ClassVar[tuple[Form, ...]]
    """Forms of weights, the first of which that fits is used."""

    dropped: ClassVar[tuple[str, ...]] = ()
    """Endings of tensors that only quantised activations or caches need."""

    @abstractmethod
    def __init__(self, config: Fields): ...

    @abstractmethod
    def shape(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> tuple[int, ...]:
        """Return a weight's shape, after checking that its tensors fit together; reads no codes.

        Args:
          name: the weight.
          entries: the entries of its tensors.
          small: role -> the values of that tensor, for the few whose values say the shape.

        Raises:
          CheckpointError: they do not fit together.
        """

    @abstractmethod
    def decode(self, name: str, arrays: Arrays) -> np.ndarray:
        """Return a weight's values, float32.

        Args:
          name: the weight.
          arrays: the values of its tensors.

        Raises:
          CheckpointError: the values cannot be decoded, such as a scale that is NaN.
        """

    def kind(self, name: str, entries: Entries, small: Callable[[str], np.ndarray]) -> Kind:
        """Return how a weight is kept as it is.

        Args:
          name: the weight.
          entries: the entries of its tensors.
          small: see `shape`.

        Raises:
          CheckpointError: it cannot be kept.
        """
        raise cannot_keep(name, f"weights of {self.methods[0]} can only be widened")

    def unrounded(self, widen: bool) -> str | None:
        """Return a sentence if products of the checkpoint's own program round activations and ours will not.

        Args:
          widen: quantised weights are imported as plain matrices.
        """
        return None

    def planes(self, name: str, arrays: Arrays) -> Planes:
        """Return the content of a weight that is kept as it is.

        Args:
          name: the weight.
          arrays: the values of its tensors.
        """
        raise NotImplementedError

    def tensors(self, kind: Kind, planes: Planes) -> dict[str, np.ndarray]:
        """Return the tensors of a weight by the ending of their names, as they were before they were read.

        Args:
          kind: how it is kept.
          planes: its content.

        Raises:
          CheckpointError: weights in this layout are kept, but not written again.
        """
        raise CheckpointError(f"weights of {self.methods[0]} cannot be written as they were; leave out --as-imported")

    @classmethod
    def written(cls, kind: Kind, shape: tuple[int, ...]) -> Kind:
        """Return how a weight that was quantised here is written in this layout; see `stored.writing`.

        Args:
          kind: what it is.
          shape: (outputs, inputs).

        Raises:
          CheckpointError: this layout does not hold it; the message is a clause that says why.
        """
        raise NotImplementedError

    @classmethod
    def nearest(cls, bits: int) -> str:
        """Return the name of a format of ours that this layout holds.

        Args:
          bits: of the format that it does not hold.
        """
        raise NotImplementedError

    @classmethod
    def settings(cls, kinds: Mapping[Kind, Sequence[str]], others: Sequence[str], symmetric: bool) -> dict[str, Any]:
        """Return the `quantization_config` of weights that were quantised here.

        Args:
          kinds: the names of modules, by their weights' kind as `written` returns it.
          others: linear layers that are not quantised.
          symmetric: whether all zero points are in the middle of the codes.

        Raises:
          CheckpointError: a folder in this layout does not hold all of these kinds.
        """
        raise NotImplementedError


class Decoded(Tensors):
    """The tensors of a quantised checkpoint with its weights as float32.

    One weight is decoded at a time, and kept until the next one is read.

    Args:
      tensors: the tensors of its files.
      layout: their layout.

    Raises:
      CheckpointError: the tensors of a weight do not fit together, or there is a plain one as well.
    """

    def __init__(self, tensors: Tensors, layout: QuantisedLayout):
        self.folder, self.layout = tensors.folder, layout
        self._tensors, self._lock = tensors, threading.RLock()
        self._parts = parts_of(tensors, layout)
        used = {n for roles in self._parts.values() for n in roles.values()}
        for name, roles in self._parts.items():
            if name in tensors and name not in used:
                codes = next(iter(roles.values()))
                raise CheckpointError(f"{name} is in the folder twice, plain and quantised as {codes}; remove one")
        self.dropped = [n for n in tensors if n not in used and n.endswith(layout.dropped)]
        self._entries = {n: t for n, t in tensors.items() if n not in used.union(self.dropped)}
        for name, roles in self._parts.items():
            entries = {role: tensors[n] for role, n in roles.items()}
            shape = layout.shape(name, entries, lambda role, roles=roles: self._values(roles[role]))  # type: ignore[misc]
            first = next(iter(entries.values()))
            self._entries[name] = Stored(first.file, "F32", shape, first.start, first.stop)
        self._last: tuple[str, np.ndarray] | None = None

    @property
    def weights(self) -> dict[str, dict[str, str]]:
        """The names of the tensors of each quantised weight, by weight and role."""
        return self._parts

    def __getitem__(self, name: str) -> Stored:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def reading(self, name: str) -> Iterator[np.ndarray]:
        """See `Tensors.reading`."""
        if name not in self._parts:
            with self._tensors.reading(name) as tensor:
                yield tensor
            return
        with self._lock:
            if self._last is None or self._last[0] != name:
                self._last = None  # free it before the next one is decoded
                self._last = (name, self._decode(name))
            yield self._last[1]

    def _decode(self, name: str) -> np.ndarray:
        values = self.layout.decode(name, self._arrays(name))
        assert values.dtype == np.float32 and values.shape == self[name].shape
        values.flags.writeable = False
        return values

    def _values(self, name: str) -> np.ndarray:
        with self._tensors.reading(name) as tensor:
            return np.array(tensor)

    def kind(self, name: str) -> Kind:
        """Return how a quantised weight is kept as it is; see `QuantisedLayout.kind`."""
        roles = self._parts[name]
        entries = {role: self._tensors[n] for role, n in roles.items()}
        return self.layout.kind(name, entries, lambda role: self._values(roles[role]))

    def planes(self, name: str) -> Planes:
        """Return the content of a quantised weight as it is."""
        return self.layout.planes(name, self._arrays(name))

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        """Return the values of a weight's tensors, after checking that those of floats, also of fp8, are finite."""
        arrays = {role: self._values(n) for role, n in self._parts[name].items()}
        for role, values in arrays.items():
            if values.dtype.kind not in "iub" and not np.isfinite(values).all():
                raise not_finite(name, "a code" if role == "codes" else "the scale")
        return arrays

    def fingerprint(self) -> list[list[Any]]:
        """See `Tensors.fingerprint`."""
        return self._tensors.fingerprint()


def parts_of(tensors: Mapping[str, Stored], layout: QuantisedLayout) -> dict[str, dict[str, str]]:
    """Return the names of the tensors of each quantised weight, by weight and role; other tensors are in none.

    Args:
      tensors: the tensors of the files, by name.
      layout: their layout.
    """
    parts: dict[str, dict[str, str]] = {}
    for form in layout.forms:
        codes = next(iter(form.needs.values()))
        for name in tensors:
            if not name.endswith(codes):
                continue
            base = name.removesuffix(codes)
            if base + form.weight in parts or any(base + end not in tensors for end in form.needs.values()):
                continue
            more = {role: end for role, end in form.may.items() if base + end in tensors}
            parts[base + form.weight] = {role: base + end for role, end in {**form.needs, **more}.items()}
    return parts


def cannot_keep(name: str, why: str) -> CheckpointError:
    """Return the error for a weight that has no form here.

    Args:
      name: the weight.
      why: the reason.
    """
    return CheckpointError(f"{name} cannot be kept as it is: {why}; --widen imports the values that it stands for")


def scale_type(name: str, entry: Stored) -> str:
    """Return the name of a type of scales.

    Args:
      name: the weight.
      entry: the entry of its scales.

    Raises:
      CheckpointError: scales of this type cannot be kept.
    """
    known = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    if entry.dtype not in known:
        raise cannot_keep(name, f"its scales are {entry.dtype}")
    return known[entry.dtype]


def finite(name: str, what: str, scale: np.ndarray) -> np.ndarray:
    """Return scales as float32.

    Args:
      name: the weight.
      what: which of its tensors.
      scale: its values.

    Raises:
      CheckpointError: one is infinite or not a number.
    """
    scale = scale.astype(np.float32)
    if not np.isfinite(scale).all():
        raise not_finite(name, what)
    return scale


def powers(name: str, exponents: np.ndarray) -> np.ndarray:
    """Return scales of fp4 that are powers of two, float32.

    Args:
      name: the weight.
      exponents: uint8, see `e8m0`.

    Raises:
      CheckpointError: one is not a number, or makes the largest code of e2m1, 6, infinite.
    """
    if (exponents > 127 + 125).any():
        raise not_finite(name, "the scale")
    return e8m0(exponents)


def not_finite(name: str, what: str) -> CheckpointError:
    """Return the error for tensors of a weight with values that are infinite or not a number.

    Args:
      name: the weight.
      what: which of its tensors.
    """
    return CheckpointError(f"{what} of {name} has a value that is not finite; the file is damaged, download it again")


def misfit(name: str, entries: Entries) -> CheckpointError:
    """Return the error for tensors that do not make a weight together.

    Args:
      name: the weight.
      entries: the entries of its tensors.
    """
    sizes = ", ".join(f"{role} {e.dtype} {list(e.shape)}" for role, e in entries.items())
    return CheckpointError(f"the tensors of {name} do not fit together: {sizes[:400]}")
