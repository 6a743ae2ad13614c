"""How tokens get to the devices of their experts, and outputs back: a file per method."""

from jaxscale.parallel.dispatch.base import Dispatcher, ExpertAxes, Rows
from jaxscale.parallel.dispatch.dropless import DroplessDispatch, wire_rows
from jaxscale.parallel.dispatch.fused import FusedDispatch
from jaxscale.parallel.dispatch.gathered import AllGatherDispatch
from jaxscale.parallel.dispatch.hierarchical import HierarchicalDispatch
from jaxscale.parallel.dispatch.routed import Capacity, Choices, Slots
from jaxscale.parallel.dispatch.slots import SlotDispatch

__all__ = [
    "AllGatherDispatch",
    "Capacity",
    "Choices",
    "Dispatcher",
    "DroplessDispatch",
    "ExpertAxes",
    "FusedDispatch",
    "HierarchicalDispatch",
    "Rows",
    "SlotDispatch",
    "Slots",
    "wire_rows",
]
