"""The error that kernels raise. Imports no JAX, so that a command line can name it without starting JAX."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KernelError(ValueError):
    """An argument or case that a kernel cannot serve; the message names the nearest one that it can."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an invalid word, `; did you mean 'softmax'?`, or "" where no word is similar.

    Args:
      word: the invalid word.
      known: the valid ones.
    """
    close = difflib.get_close_matches(word, tuple(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
