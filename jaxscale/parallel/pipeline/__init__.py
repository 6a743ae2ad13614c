"""Pipeline parallelism: one executor for the table of any schedule (GPipe, Huang et al. 2019; Megatron-LM)."""

from jaxscale.parallel.pipeline.executor import BACKWARD, FORWARD, Gradients, Stageable, execute
from jaxscale.parallel.pipeline.slots import Slots, lower
from jaxscale.parallel.pipeline.split import Split
from jaxscale.parallel.pipeline.stages import Stages, assign

__all__ = ["BACKWARD", "FORWARD", "Gradients", "Slots", "Split", "Stageable", "Stages", "assign", "execute", "lower"]
