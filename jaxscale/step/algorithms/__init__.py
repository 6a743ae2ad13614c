"""Algorithms beside `Backprop`, a file each (`train.algorithm`)."""

from jaxscale.step.algorithms.diloco import DiLoCo
from jaxscale.step.algorithms.local_steps import LocalSteps
from jaxscale.step.algorithms.mezo import MeZO
from jaxscale.step.algorithms.replicas import LocalReplicas, Replicas

__all__ = ["DiLoCo", "LocalReplicas", "LocalSteps", "MeZO", "Replicas"]
