"""The training loop, run folders, checkpoints, in-memory snapshots and the watchdog."""

from typing import Any

from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.run import RunFolder, checkpoints_in, read_config
from jaxscale.train.start import FromRun
from jaxscale.train.trackers import MLflow, TensorBoard, Trackio, Wandb

__all__ = [
    "Checkpoints",
    "FromRun",
    "MLflow",
    "RunFolder",
    "TensorBoard",
    "Trackio",
    "Wandb",
    "checkpoints_in",
    "read_config",
]


def __getattr__(name: str) -> Any:
    """Raise an error that says where a name has moved to."""
    from jaxscale import step

    home = "jaxscale" if name in ("Run", "fit") else "jaxscale.step" if name in step.__all__ else None
    moved = "" if home is None else f"; it is {home}.{name}"
    # `from jaxscale.train import NAME` would replace the message of an AttributeError
    kind = AttributeError if home is None or name.startswith("_") else ImportError
    raise kind(f"module 'jaxscale.train' has no attribute '{name}'{moved}")
