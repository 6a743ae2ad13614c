"""jaxscale: models name the axes of their arrays, a layout shards them over devices, `jit` does the rest.

    import jaxscale as js
    js.simulate_devices(8)
    run = js.fit(layout=js.Layout("data=2,fsdp=2,tensor=2"), data=js.data.python_stdlib(), steps=200)

Everything here is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxscale.version import __version__
from pallas_kernels.cpu import avoid_fault

if TYPE_CHECKING:
    from jaxscale import (
        config,
        convert,
        data,
        errors,
        hardware,
        infer,
        interop,
        layout,
        models,
        nn,
        optim,
        parallel,
        plan,
        rl,
        step,
        sweep,
        testing,
        train,
    )
    from jaxscale.convert.pretrained import export_checkpoint, import_checkpoint
    from jaxscale.layout import Layout, Rules, constrain, init_distributed, named, simulate_devices
    from jaxscale.plan.explain import explain
    from jaxscale.run import Run, fit
    from jaxscale.step import TrainConfig, log
    from jaxscale.sweep.comparing import curves, runs
    from jaxscale.training_session import session

avoid_fault()  # of jaxlib on CPUs, before JAX starts

_ROOMS = (
    "config",
    "convert",
    "data",
    "errors",
    "hardware",
    "infer",
    "interop",
    "layout",
    "models",
    "nn",
    "optim",
    "parallel",
    "plan",
    "rl",
    "step",
    "sweep",
    "testing",
    "train",
)
_NAMES = {
    "Layout": "layout",
    "Rules": "layout",
    "constrain": "layout",
    "init_distributed": "layout",
    "named": "layout",
    "simulate_devices": "layout",
    "Run": "run",
    "TrainConfig": "step",
    "fit": "run",
    "log": "step",
    "export_checkpoint": "convert.pretrained",
    "import_checkpoint": "convert.pretrained",
    "explain": "plan",
    "curves": "sweep.comparing",
    "runs": "sweep.comparing",
    "session": "training_session",
}

__all__ = [
    "Layout",
    "Rules",
    "Run",
    "TrainConfig",
    "__version__",
    "config",
    "constrain",
    "convert",
    "curves",
    "data",
    "errors",
    "explain",
    "export_checkpoint",
    "fit",
    "hardware",
    "import_checkpoint",
    "infer",
    "init_distributed",
    "interop",
    "layout",
    "load",
    "log",
    "models",
    "named",
    "nn",
    "optim",
    "parallel",
    "plan",
    "rl",
    "runs",
    "session",
    "simulate_devices",
    "step",
    "sweep",
    "testing",
    "train",
]


def load(path: str) -> Run:
    """Return the run in a folder.

    Args:
      path: the run folder.

    Raises:
      RunError: the folder is not a run.
    """
    from jaxscale.run import Run

    run = Run(path)
    _ = run.info
    return run


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"jaxscale.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"jaxscale.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'jaxscale' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
