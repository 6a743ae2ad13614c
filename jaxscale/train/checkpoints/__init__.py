"""Checkpoints: the training state on disk, restored onto any layout."""

from jaxscale.train.checkpoints.manifest import flatten
from jaxscale.train.checkpoints.store import Checkpoints

__all__ = ["Checkpoints", "flatten"]
