"""Signals that ask a command to stop, and their exit codes."""

from __future__ import annotations

import signal

STOPS = {number.name: 128 + number for number in (signal.SIGINT, signal.SIGTERM)}
"""Exit code of a command that one of these signals stopped, by the signal's name: 130 and 143, as shells have it."""


def handled_signals() -> list[signal.Signals]:
    """Those of SIGINT and SIGTERM that this process does not ignore.

    Shells start background jobs of scripts with SIGINT ignored, since Ctrl-C is meant for the foreground program.
    """
    return [one for one in map(signal.Signals.__getitem__, STOPS) if signal.getsignal(one) is not signal.SIG_IGN]
