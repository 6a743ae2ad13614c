"""Algorithms beside `Backprop`, a file each (`train.algorithm`)."""

from jaxscale.step.algorithms.diloco import DiLoCo
from jaxscale.step.algorithms.local_steps import LocalSteps
from jaxscale.step.algorithms.mezo import MeZO
from jaxscale.step.algorithms.qzo import QZO
from jaxscale.step.algorithms.replicas import LocalReplicas, Replicas
from jaxscale.step.algorithms.zo2 import ZO2

__all__ = ["QZO", "ZO2", "DiLoCo", "LocalReplicas", "LocalSteps", "MeZO", "Replicas"]
