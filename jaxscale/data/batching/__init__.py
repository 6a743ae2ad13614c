"""Plans of one step's batch: which devices process which sequences, in how many micro-batches, by the lengths alone.

| method | groups of a micro-batch | micro-batches |
|---|---|---|
| `Static` | all of one degree, the same in every step | every device waits for the slowest one |
| `FlexSP` | of several degrees, chosen for each micro-batch | every device waits for the slowest one |
| `HDP` | of several degrees, chosen for each sequence | only the devices of a sequence wait for each other |

The degree of a group is the number of devices that share its sequences by context parallelism. `plan(lengths, devices,
costs)` of each method is a pure function; `jaxscale.plan.sequence_costs` predicts the costs for named hardware.
"""

from jaxscale.data.batching.costs import SequenceCosts
from jaxscale.data.batching.flexsp import FlexSP
from jaxscale.data.batching.hdp import HDP
from jaxscale.data.batching.plans import BatchPlan, Group
from jaxscale.data.batching.static import Static, best_static

__all__ = ["HDP", "BatchPlan", "FlexSP", "Group", "SequenceCosts", "Static", "best_static"]
