"""Algorithms beside `Backprop`, a file each (`train.algorithm`)."""

from jaxscale.step.algorithms.aggregates import Aggregate, Flag, Mean, Median
from jaxscale.step.algorithms.co2 import CO2
from jaxscale.step.algorithms.compressed import CompressedGradients
from jaxscale.step.algorithms.diloco import DiLoCo
from jaxscale.step.algorithms.local_steps import LocalSteps
from jaxscale.step.algorithms.mezo import MeZO
from jaxscale.step.algorithms.once_for_all import OnceForAll
from jaxscale.step.algorithms.onebit_adam import OneBitAdam
from jaxscale.step.algorithms.peer_diloco import PeerDiLoCo
from jaxscale.step.algorithms.qzo import QZO
from jaxscale.step.algorithms.replicas import LocalReplicas, Replicas
from jaxscale.step.algorithms.robust import RobustGradients
from jaxscale.step.algorithms.shrinking import Shrinking
from jaxscale.step.algorithms.stream_layers import StreamLayers
from jaxscale.step.algorithms.zo2 import ZO2

__all__ = [
    "CO2",
    "QZO",
    "ZO2",
    "Aggregate",
    "CompressedGradients",
    "DiLoCo",
    "Flag",
    "LocalReplicas",
    "LocalSteps",
    "Mean",
    "Median",
    "MeZO",
    "OnceForAll",
    "OneBitAdam",
    "PeerDiLoCo",
    "Replicas",
    "RobustGradients",
    "Shrinking",
    "StreamLayers",
]
