"""jaxscale: names go in, a layout lays them on devices, `jit` does the rest.

    import jaxscale as js
    js.simulate_devices(8)
    run = js.fit(layout=js.Layout("data=2,fsdp=2,tensor=2"), data=js.data.python_stdlib(), steps=200)

Everything here loads when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxscale.version import __version__

if TYPE_CHECKING:
    from jaxscale import (
        config,
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
        sweep,
        testing,
        train,
    )
    from jaxscale.layout import Layout, Rules, constrain, init_distributed, named, simulate_devices
    from jaxscale.plan.explain import explain
    from jaxscale.step import TrainConfig
    from jaxscale.sweep.comparing import curves, runs
    from jaxscale.train import Run
    from jaxscale.train.fit import fit
    from jaxscale.train.pretrained import export_checkpoint, import_checkpoint

_ROOMS = (
    "config",
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
    "Run": "train",
    "TrainConfig": "train",
    "fit": "train",
    "export_checkpoint": "train.pretrained",
    "import_checkpoint": "train.pretrained",
    "explain": "plan",
    "curves": "sweep.comparing",
    "runs": "sweep.comparing",
}

__all__ = [
    "Layout",
    "Rules",
    "Run",
    "TrainConfig",
    "__version__",
    "config",
    "constrain",
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
    "models",
    "named",
    "nn",
    "optim",
    "parallel",
    "plan",
    "runs",
    "simulate_devices",
    "sweep",
    "testing",
    "train",
]


def load(path: str) -> Run:
    """The run in a folder.

    Raises:
      RunError: the folder is no run.
    """
    from jaxscale.train import Run

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
