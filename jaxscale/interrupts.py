"""Signals that ask a command to stop, and the exit codes that say so."""

from __future__ import annotations

import signal

STOPS = {number.name: 128 + number for number in (signal.SIGINT, signal.SIGTERM)}
"""Exit code of a command that one of these signals stopped, as shells count: 130 and 143."""


def heard() -> list[signal.Signals]:
    """SIGINT and SIGTERM, without one that this process was started to ignore.

    A shell starts a job in the background of a script with SIGINT ignored: Ctrl-C there is for another program.
    """
    return [one for one in map(signal.Signals.__getitem__, STOPS) if signal.getsignal(one) is not signal.SIG_IGN]
