"""Checkpoints: what a run is restored from, wherever it goes on."""

from jaxscale.train.checkpoints.manifest import flatten
from jaxscale.train.checkpoints.store import Checkpoints

__all__ = ["Checkpoints", "flatten"]
