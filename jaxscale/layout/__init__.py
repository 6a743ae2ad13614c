"""Logical axis names, device meshes and the rules that map one to the other."""

from jaxscale.layout.axes import AXES, MESH_AXES, STACKED
from jaxscale.layout.boxing import Boxes, Move, infer, rebox
from jaxscale.layout.distributed import init_distributed
from jaxscale.layout.draw import blocks_of, draw
from jaxscale.layout.host import (
    DEVICE,
    HOST,
    by_layer,
    fetched,
    host_memory_or_say,
    in_host_memory,
    layers_in_host_memory,
    on_device,
    stored_like,
    sum_by_layer,
    why_no_host_memory,
)
from jaxscale.layout.layout import Layout, constrain, current, say_once
from jaxscale.layout.mesh import make_mesh, parse_mesh, simulate_devices
from jaxscale.layout.moving import moved, nearest, tree_moved
from jaxscale.layout.pipeline import Pipeline
from jaxscale.layout.rules import PRESETS, Rules, experts_as, preset, shared_rows
from jaxscale.layout.schedules import SCHEDULES
from jaxscale.layout.table import Simulation, Table, simulate
from jaxscale.layout.tensors import (
    TensorInfo,
    TensorRow,
    abstract,
    as_used,
    describe,
    filled_notes,
    named,
    path_name,
    shardings_of,
)
from jaxscale.layout.unnamed import Inferred, fitting_layout, infer_names
from jaxscale.layout.used import fill, filled_shape, in_use, unfill

__all__ = [
    "AXES",
    "DEVICE",
    "HOST",
    "MESH_AXES",
    "PRESETS",
    "SCHEDULES",
    "STACKED",
    "Boxes",
    "Inferred",
    "Layout",
    "Move",
    "Pipeline",
    "Rules",
    "Simulation",
    "Table",
    "TensorInfo",
    "TensorRow",
    "abstract",
    "as_used",
    "blocks_of",
    "by_layer",
    "constrain",
    "current",
    "describe",
    "draw",
    "experts_as",
    "fetched",
    "fill",
    "filled_notes",
    "filled_shape",
    "fitting_layout",
    "host_memory_or_say",
    "in_use",
    "infer",
    "infer_names",
    "init_distributed",
    "layers_in_host_memory",
    "make_mesh",
    "moved",
    "named",
    "nearest",
    "in_host_memory",
    "on_device",
    "parse_mesh",
    "path_name",
    "preset",
    "rebox",
    "say_once",
    "shardings_of",
    "shared_rows",
    "simulate",
    "simulate_devices",
    "stored_like",
    "sum_by_layer",
    "tree_moved",
    "unfill",
    "why_no_host_memory",
]
