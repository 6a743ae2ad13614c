"""Algorithms beside `Backprop`, a file each (`train.algorithm`)."""

from jaxscale.step.algorithms.local_steps import LocalSteps

__all__ = ["LocalSteps"]
