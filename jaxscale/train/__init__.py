"""Running the step: the loop, run folders, checkpoints, snapshots, the watchdog."""

from typing import Any

from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.run import RunFolder, checkpoints_in, read_config
from jaxscale.train.start import FromRun

__all__ = ["Checkpoints", "FromRun", "RunFolder", "checkpoints_in", "read_config"]


def __getattr__(name: str) -> Any:
    """Answers names that were here once."""
    from jaxscale import step

    home = "jaxscale" if name in ("Run", "fit") else "jaxscale.step" if name in step.__all__ else None
    moved = "" if home is None else f"; it is {home}.{name}"
    # `from jaxscale.train import NAME` would hide the words of an AttributeError
    kind = AttributeError if home is None or name.startswith("_") else ImportError
    raise kind(f"module 'jaxscale.train' has no attribute '{name}'{moved}")
