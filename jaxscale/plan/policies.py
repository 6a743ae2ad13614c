"""Choosing a memory policy: the cheapest that fits a budget, by arithmetic where that settles it, else by compiling."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxscale.errors import ConfigError
from jaxscale.nn import POLICIES, MemoryPolicy
from jaxscale.plan.compile import bytes_needed, bytes_of, compile_step
from jaxscale.plan.covered import covered
from jaxscale.plan.memory import Estimate, estimate
from jaxscale.plan.shown import Shown
from jaxscale.step import TrainConfig
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

COMPILES = 4
"""At most so many programs are compiled for one choice."""
REFUSED = "over the budget: memory ran out while it was compiled"


@dataclasses.dataclass(frozen=True)
class PolicyRow:
    """A line of the table a choice was made from.

    Args:
      policy: its name.
      estimate: by arithmetic.
      compiled_bytes: per device, of the compiled step; `None` where none was compiled.
      verdict: "chosen", or why not.
    """

    policy: str
    estimate: Estimate
    compiled_bytes: int | None
    verdict: str


@dataclasses.dataclass(frozen=True)
class Choice(Shown):
    """The cheapest policy that fits, and the table it was chosen from; prints as that table.

    Args:
      policy: its name.
      config: the run's settings with that policy.
      topology, budget: what it was chosen for, bytes per device.
      rows: a line per policy, cheapest first.
      program: the step with that policy, compiled and ready to run, where it was chosen for the devices that are here.
    """

    policy: str
    config: TrainConfig
    topology: str
    budget: int
    rows: tuple[PolicyRow, ...]
    program: Any = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield policy_table(self.rows, self.topology, self.budget)


def choose(
    config: TrainConfig,
    topology: str,
    budget: int,
    *,
    policies: Mapping[str, MemoryPolicy] = POLICIES,
    compiles: int = COMPILES,
    here: bool = False,
) -> Choice:
    """The memory policy that costs the least arithmetic among those that fit.

    Policies that the model refuses are left out. The rest are tried from the cheapest on; one that keeps everything
    comes after those that make no product twice either. One is passed over without compiling when its estimate is over
    the budget by itself or with the least that the compiler added to another. An estimate may be a few per cent too
    high, so one that only just fits may be passed over; what is chosen was compiled.

    Args:
      config: the run's settings; its model's own policy does not matter.
      topology: as for `topology_devices`.
      budget: bytes per device for arguments, outputs and temporaries together.
      policies: to choose from, by name.
      compiles: how many programs may be compiled.
      here: the topology is this machine's own devices: what is compiled is the step that `fit` would run on them, with
        the run's guards, and is handed over (`Choice.program`) instead of compiled a second time.

    Raises:
      ConfigError: none of them fits, or `estimate`'s reasons.
      LayoutError: as for `compile_step`.
    """
    model, configs = covered(config, adapters=True), {}
    for name, policy in policies.items():
        with contextlib.suppress(ConfigError):  # experts are not tiled
            configs[name] = dataclasses.replace(config, model=dataclasses.replace(model, memory=policy))
    if not configs:
        raise ConfigError(f"the model takes none of the memory policies {', '.join(policies)}; give others")
    found = {n: estimate(c, topology) for n, c in configs.items()}
    # By the bytes counted in compiled programs what keeps all moves more, and saves no product; no device has timed it.
    whole = {n: MemoryPolicy.of(policies[n]).keeps_all for n in found}
    order = sorted(found, key=lambda n: (found[n].extra_flops, found[n].host, whole[n], -found[n].device))
    last = min(order, key=lambda n: found[n].device)
    rows: dict[str, PolicyRow] = {}
    added: list[int] = []  # by the compiler, to what arithmetic knows of
    chosen, program = None, None
    for name in order:
        row = lambda verdict, size=None, name=name: PolicyRow(name, found[name], size, verdict)  # noqa: E731
        expected = found[name].device + min(added, default=0)
        if chosen is not None:
            rows[name] = row(f"not needed: dearer than {chosen}")
        elif expected > budget:
            rows[name] = row("passed over: over the budget by arithmetic")
        elif len(added) >= compiles - 1 and name != last:
            rows[name] = row("passed over: the last compilation is for the smallest estimate")
        else:
            program, size = _compiled_here(configs[name]) if here else (None, compiled_bytes(configs[name], topology))
            added.append(0 if size is None else max(0, size - found[name].device))
            refused = here and program is None
            chosen = name if size is not None and size <= budget and not refused else None
            rows[name] = row("chosen" if chosen else REFUSED if refused else "over the budget", size)
    table = tuple(rows[name] for name in order)
    if chosen is None:
        least = min(table, key=lambda r: r.compiled_bytes or r.estimate.device)
        how = "by arithmetic" if least.compiled_bytes is None else "compiled"
        how += f" ({REFUSED})" if least.verdict == REFUSED else ""
        raise ConfigError(
            f"no memory policy fits {budget:,} bytes per device of {topology}: the smallest, '{least.policy}', takes "
            f"{least.compiled_bytes or least.estimate.device:,} {how}; give more devices, a smaller batch or a shorter "
            "sequence"
        )
    return Choice(chosen, configs[chosen], topology, budget, table, program)


def _compiled_here(config: TrainConfig) -> tuple[Any, int | None]:
    """A run's step for this machine and its bytes per device; no step where memory ran out, nor bytes if unknown."""
    try:
        program = compile_step(config, None, guards=config.guards)
    except jax.errors.JaxRuntimeError as e:
        if "RESOURCE_EXHAUSTED" not in str(e):
            raise
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return None, bytes_needed(e)
        return None, None
    return program, bytes_of(program)


def compiled_bytes(config: TrainConfig, topology: str) -> int:
    """Bytes per device of a run's compiled training step: arguments, outputs that are not theirs, temporaries.

    A step that does not fit the hardware is answered with the size that the TPU's compiler names on giving up.

    Raises:
      jax.errors.JaxRuntimeError: it fails for another reason.
    """
    try:
        return bytes_of(compile_step(config, topology))
    except jax.errors.JaxRuntimeError as e:
        return bytes_needed(e)


def policy_table(rows: tuple[PolicyRow, ...], topology: str, budget: int) -> Any:
    """A rich table: policy, estimated and compiled bytes per device, bytes in host memory, extra FLOPs, verdict."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"memory policies on {topology}, {human_bytes(budget)} per device"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("policy", "estimated", "compiled", "on the host", "extra FLOPs", "verdict"):
        table.add_column(name, justify="left" if name in ("policy", "verdict") else "right", no_wrap=name == "policy")
    for r in rows:
        compiled = "-" if r.compiled_bytes is None else human_bytes(r.compiled_bytes)
        host = human_bytes(r.estimate.host) if r.estimate.host else "-"
        share = f"{100 * r.estimate.extra_flops:.1f}%"
        table.add_row(r.policy, human_bytes(r.estimate.device), compiled, host, share, r.verdict)
    return table
