"""Algorithms beside `Backprop`, a file each (`train.algorithm`)."""

from jaxscale.step.algorithms.local_steps import LocalSteps
from jaxscale.step.algorithms.mezo import MeZO

__all__ = ["LocalSteps", "MeZO"]
