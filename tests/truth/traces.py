"""Plans for tests that plan the same step many times."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

from jaxscale.hardware import topology
from jaxscale.plan.communication import partition as trace

# By name: `jaxscale.plan.search` is also a function.
_WHERE = [importlib.import_module(f"jaxscale.plan.{name}") for name in ("planner", "search_formulas", "by_tracing")]


def traced_once() -> Iterator[None]:
    """For a fixture: plans trace a step once. How much memory a device has, and how fast it is, is not in a trace."""
    traced: list[tuple[Any, Any]] = []

    def partition(config: Any, hardware: Any) -> Any:
        target = topology(hardware) if isinstance(hardware, str) else hardware
        step = config, target.devices, target.chip.platform, target.chip.kinds
        for other, result in traced:
            if step == other:
                return result
        traced.append((step, trace(config, target)))
        return traced[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        for module in _WHERE:
            patch.setattr(module, "partition", partition)
        yield
