"""Exceptions of jaxscale. A message is one sentence with the offending value and the nearest valid choice."""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Iterable
from typing import Any

from jaxscale.other_names import misspelt, same

MISTAKE = 2
"""Exit code of a command that raised a `JaxscaleError`; running it again would most likely raise it again."""

INTERRUPTED = 130
"""Exit code of a command that a signal interrupted."""

LOST = 70
"""Exit code of a process that stopped because another process or the run's bucket was lost, or because no process made
progress; running it again may succeed."""


class JaxscaleError(Exception):
    """Base of all errors that a user can cause; the command line prints the message and exits with `code`."""

    code: int = MISTAKE
    """The exit code; `LOST` for an error that may not occur again."""


class LayoutError(JaxscaleError, ValueError):
    """An invalid mesh, rule or logical axis, or a dimension that the mesh does not divide."""


class ConfigError(JaxscaleError, ValueError):
    """An invalid gin file, binding or argument."""


class DataError(JaxscaleError, ValueError):
    """A corpus, a tokenizer or a token file that cannot be used."""


class CheckpointError(JaxscaleError, RuntimeError):
    """A checkpoint that is missing, incomplete, or belongs to another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose digests do not match its content; an older checkpoint may be intact."""


class OtherArrays(CheckpointError):
    """A checkpoint that has other arrays than the model, the optimizer and the algorithm."""


class DamagedFile(JaxscaleError, ValueError):
    """A file whose digest does not match its content.

    Args:
      message: the sentence for the user.
      content: the part of the file that could be read, or `None`.
    """

    def __init__(self, message: str, content: Any = None):
        super().__init__(message)
        self.content = content


class RunError(JaxscaleError, RuntimeError):
    """A run folder that cannot be used, or a training run that cannot continue."""


class AlteredFile(RunError):
    """A file of a run or sweep that was edited by hand or is damaged: its digest does not match."""


class OutOfMemory(JaxscaleError, MemoryError):
    """A step that does not fit the devices' memory; the message lists the largest arrays and possible remedies."""


def check_whole(setting: str, value: Any, least: int = 1, most: int | None = None, *, optional: bool = False) -> None:
    """Check that a setting is a whole number.

    Args:
      setting: its name, such as "Stored.group".
      value: its value.
      least: the smallest number.
      most: the largest number; `None` is any.
      optional: whether it may be `None`.

    Raises:
      ConfigError: it is not.
    """
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    fits = whole and least <= value <= (value if most is None else most)
    if not (optional and value is None) and not (fits and isinstance(value, int)):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        hint = f"; write {int(value)}" if fits else ""  # a number of NumPy
        raise ConfigError(
            f"{setting} = {value!r}: must be a whole number {limits}{', or None' if optional else ''}{hint}"
        )


def check_positive(setting: str, value: Any) -> None:
    """Check that a setting is a finite number above 0.

    Args:
      setting: its name, such as "LoRA.alpha".
      value: its value.

    Raises:
      ConfigError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{setting} = {value!r}: must be a finite number above 0")


def count(number: int, one: str, many: str | None = None) -> str:
    """A number and its noun: `1 tensor`, `2 tensors`.

    Args:
      number: how many.
      one: the noun of one.
      many: that of several; by default with an s.
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


_LESS_ALIKE = 0.2
"""Words are suggested that are less similar to the invalid word than the most similar one by less than this."""

_WEAK, _FEW = 0.6, 8
"""Of at most `_FEW` valid words, one whose similarity is below `_WEAK` is suggested only if it begins alike; where none
is, all are listed."""


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5, bindings: bool = False) -> list[str]:
    """Return the valid words that an invalid one may stand for, the most similar first; none if none is similar.

    Args:
      word: the invalid word; it may be another program's name for a valid one (see `jaxscale.other_names`).
      known: the valid words.
      cutoff: the least similarity of two spellings, from 0 to 1.
      bindings: see `jaxscale.other_names.same`.
    """
    known = sorted(set(known))
    if not (close := same(word, known, bindings=bindings)):
        close = difflib.get_close_matches(word, known, 3, cutoff)
        alike = [difflib.SequenceMatcher(None, c, word).ratio() for c in close]  # the most alike is the first
        best = alike[0] if alike else 0.0
        close = [c for c, ratio in zip(close, alike, strict=True) if ratio > best - _LESS_ALIKE]
        if best < _WEAK and len(known) <= _FEW:
            close = [c for c in close if c[:3] == word.strip("'")[:3]]
        close = misspelt(word, known, bindings=bindings, beyond=best) or close
    return list(close)


def near(word: str, known: Iterable[str], *, cutoff: float = 0.5, bindings: bool = False) -> str:
    """The end of an error message: `; did you mean 'fsdp'?`, or the valid words if none is similar.

    Args:
      word: as for `nearest`, like the other arguments.
      known: the valid words.
      cutoff: the least similarity of two spellings, from 0 to 1.
      bindings: see `jaxscale.other_names.same`.
    """
    known = sorted(set(known))
    if close := nearest(word, known, cutoff=cutoff, bindings=bindings):
        return "; did you mean " + " or ".join(f"'{c}'" for c in close) + "?"
    return f"; known: {', '.join(known)}" if known else ""
