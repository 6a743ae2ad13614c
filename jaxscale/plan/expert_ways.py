"""Which way to compute experts is fastest for a batch and loads, of those that leave every parameter where it is.

The ways are those of `experts_as` (Tutel, Hwang et al. 2023, arXiv:2206.03382), and of sent tokens each dispatcher. A
run changes from one to another without moving a weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale.errors import ConfigError
from jaxscale.hardware import Topology, topology
from jaxscale.layout import Layout, experts_as
from jaxscale.layout.rules import EXPERTS
from jaxscale.parallel.dispatch import AllGatherDispatch, Dispatcher, DroplessDispatch
from jaxscale.plan.collectives import Collective
from jaxscale.plan.communication import partition
from jaxscale.plan.covered import covered
from jaxscale.plan.expert_loads import EVEN, Loads, mixture_of
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.planner import on_hardware, slowest_of
from jaxscale.plan.roofline import StepTime, step_time
from jaxscale.plan.stand_ins import as_compiled
from jaxscale.plan.work import work_of
from jaxscale.step import TrainConfig

SENT: Mapping[str, Dispatcher] = {"sent": DroplessDispatch(), "sent to all": AllGatherDispatch()}
"""Names of the ways that send tokens -> their dispatchers."""


@dataclasses.dataclass(frozen=True)
class ExpertWay:
    """A way to compute experts, and its step.

    Args:
      name: "sent", "sent to all" (`AllGatherDispatch`), "split" or "gathered" (`experts_as`).
      config: the run's settings with it.
      step: time of a step, analytic.
      bytes: bytes on a device, analytic.
      fits: whether they fit.
    """

    name: str
    config: TrainConfig
    step: StepTime
    bytes: int
    fits: bool


@dataclasses.dataclass(frozen=True)
class _Traced:
    config: TrainConfig
    memory: Estimate
    collectives: tuple[Collective, ...]
    update: Mapping[str, float]


class ExpertChooser:
    """Chooses the fastest way for loads; each way's step is traced once, when the chooser is made.

    Args:
      config: the run's settings, with experts along the mesh axis `expert` and without a capacity.
      hardware: a topology or its name.

    Raises:
      ConfigError: no way could be chosen: there are no experts, they have a capacity, or no axis `expert`.
      LayoutError: as `jaxscale.plan.plan_for`.
      NotCovered: no formula covers the run.
    """

    def __init__(self, config: TrainConfig, hardware: str | Topology):
        self.hardware = topology(hardware) if isinstance(hardware, str) else hardware
        config = on_hardware(config, self.hardware)
        moe, layout = mixture_of(covered(config)), config.layout
        assert layout is not None
        if moe.capacity is not None:
            raise ConfigError(
                "experts with a capacity drop tokens in some ways only; set MixtureOfExperts.capacity = None"
            )
        if layout.sizes["expert"] == 1:
            raise ConfigError(
                f"the layout {layout} has all experts everywhere, so there is one way; add expert=2 to the mesh"
            )
        self._ways = {name: self._trace(made) for name, made in _every(config, layout).items()}

    def _trace(self, config: TrainConfig) -> _Traced:
        traced = partition(config, self.hardware)
        sent = tuple(as_compiled(traced.collectives, self.hardware))
        return _Traced(config, estimate(config, self.hardware), sent, traced.flops_within("optimizer"))

    def __call__(self, loads: Loads | None = None) -> tuple[ExpertWay, ...]:
        """Return all ways, those that fit first and of these the fastest first.

        Args:
          loads: of the experts; by default all have as many tokens.

        Raises:
          ConfigError: loads of another number of experts.
        """
        made = []
        for name, way in self._ways.items():
            slowest = EVEN if loads is None else slowest_of(way.config, self.hardware, loads)
            layout = way.config.layout
            assert layout is not None
            work = work_of(way.config, layout, way.memory, way.collectives, way.update, slowest)
            size = way.memory.device
            fits = size <= self.hardware.chip.capacity
            made.append(ExpertWay(name, way.config, step_time(work, self.hardware), size, fits))
        return tuple(sorted(made, key=lambda way: (not way.fits, way.step.total)))


def _every(config: TrainConfig, layout: Layout) -> dict[str, TrainConfig]:
    rules = layout.rules if isinstance(layout.rules, str) else "fsdp_tensor"
    if layout.rules not in (rules, *(experts_as(way, rules) for way in EXPERTS)):
        raise ConfigError("ways of experts are of rules by name, or of experts_as(); set Layout.rules = 'fsdp_tensor'")
    ways: dict[str, tuple[str, Dispatcher | None]] = {name: ("sent", to) for name, to in SENT.items()}
    ways |= {name: (name, None) for name in EXPERTS if name != "sent"}
    return {name: _with(config, layout, experts_as(way, rules), to) for name, (way, to) in ways.items()}


def _with(config: TrainConfig, layout: Layout, rules: Any, dispatcher: Dispatcher | None) -> TrainConfig:
    model: Any = config.model
    mlp = dataclasses.replace(model.mlp, dispatcher=dispatcher)
    layout = dataclasses.replace(layout.specification, rules=rules)
    return dataclasses.replace(config, model=dataclasses.replace(model, mlp=mlp), layout=layout)
