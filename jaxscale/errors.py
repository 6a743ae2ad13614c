"""What jaxscale raises: one sentence that names the offending thing and the nearest valid choice."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from jaxscale.other_names import same

MISTAKE = 2
"""Exit code of a command that raised an error of ours: beginning again would not help."""

INTERRUPTED = 130
"""Exit code of a command that a signal ended before it was done."""

LOST = 70
"""Exit code of a process that ended itself because another was lost, or because none got on."""


class JaxscaleError(Exception):
    """Base of every error a user can cause; the command line prints its sentence and exits with 2."""


class LayoutError(JaxscaleError, ValueError):
    """A mesh, a rule or a logical axis that cannot be laid out."""


class ConfigError(JaxscaleError, ValueError):
    """A gin file, a binding or an argument that does not fit."""


class DataError(JaxscaleError, ValueError):
    """A corpus, a tokenizer or a token file that cannot be used."""


class CheckpointError(JaxscaleError, RuntimeError):
    """A checkpoint that is missing, incomplete, or of another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not, or no longer, what was written; an older one may be whole."""


class DamagedFile(JaxscaleError, ValueError):
    """A file that is not, or no longer, what was written; `content` is what can be read of it all the same."""

    def __init__(self, message: str, content: Any = None):
        super().__init__(message)
        self.content = content


class RunError(JaxscaleError, RuntimeError):
    """A run folder or a training run that cannot go on."""


class AlteredFile(RunError):
    """A file of a run's or a sweep's folder that is not what was written: edited by hand, or damaged."""


class OutOfMemory(JaxscaleError, MemoryError):
    """A step that does not fit the devices' memory; its message tells what takes it, and what would help."""


def near(word: str, known: Iterable[str], *, cutoff: float = 0.5, bindings: bool = False) -> str:
    """Ends an error message: `; did you mean 'fsdp'?`, or the list of known words when none is near.

    Args:
      word: what somebody wrote, maybe as another program calls it (see `jaxscale.other_names`).
      known: what could stand there.
      cutoff: how alike two spellings are, from 0 to 1.
      bindings: see `jaxscale.other_names.same`.
    """
    known = sorted(set(known))
    close = same(word, known, bindings=bindings) or difflib.get_close_matches(word, known, 3, cutoff)
    if close:
        return "; did you mean " + " or ".join(f"'{c}'" for c in close) + "?"
    return f"; known: {', '.join(known)}" if known else ""
