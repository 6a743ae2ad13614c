"""Choice of a memory policy: the cheapest that fits a budget, by formulas if they settle it, else by compiling."""

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
from jaxscale.plan.printing import Printable
from jaxscale.step import TrainConfig
from jaxscale.units import human_bytes

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

COMPILES = 4
"""Most programs that are compiled for one choice."""
REFUSED = "over the budget: memory ran out while it was compiled"


@dataclasses.dataclass(frozen=True)
class PolicyRow:
    """One policy in the table of a choice.

    Args:
      policy: the policy's name.
      estimate: analytic memory.
      compiled_bytes: bytes per device of the compiled step; `None` if it was not compiled.
      verdict: "chosen", or why it was not.
    """

    policy: str
    estimate: Estimate
    compiled_bytes: int | None
    verdict: str


@dataclasses.dataclass(frozen=True)
class Choice(Printable):
    """The cheapest policy that fits, and the table of all policies; prints as that table.

    Args:
      policy: the policy's name.
      config: the run's settings with that policy.
      topology: the hardware that it was chosen for.
      budget: bytes per device that it was chosen for.
      rows: all policies, cheapest first.
      program: the compiled step with that policy, if it was chosen for this machine's devices (`choose(here=True)`).
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
    """Return the memory policy with the least recomputation among those that fit.

    Policies that the model refuses are left out. The rest are tried from the cheapest on; of those that recompute no
    product, the policy that saves everything comes last. A policy is passed over without compiling if its estimate,
    plus the least that the compiler added to another estimate, exceeds the budget. An estimate may be a few per cent
    too high, so a policy that only just fits may be passed over. The chosen policy was always compiled.

    Args:
      config: the run's settings; the memory policy of its model is ignored.
      topology: as for `topology_devices`.
      budget: bytes per device for arguments, outputs and temporaries together.
      policies: policies to choose from, by name.
      compiles: most programs to compile.
      here: whether the topology is this machine's own devices. If so, the compiled program is the step that `fit` runs,
        with the run's guards, and is returned as `Choice.program` so that it is not compiled a second time.

    Raises:
      ConfigError: no policy fits, or as for `estimate`.
      LayoutError: as for `compile_step`.
    """
    model, configs = covered(config, adapters=True), {}
    for name, policy in policies.items():
        with contextlib.suppress(ConfigError):  # some policies tile, which experts do not support
            configs[name] = dataclasses.replace(config, model=dataclasses.replace(model, memory=policy))
    if not configs:
        raise ConfigError(f"the model supports none of the memory policies {', '.join(policies)}; give others")
    estimates = {n: estimate(c, topology) for n, c in configs.items()}
    # A policy that saves everything moves more bytes in compiled programs than those that recompute no product either.
    # This was not timed on a device.
    whole = {n: MemoryPolicy.of(policies[n]).keeps_all for n in estimates}
    order = sorted(estimates, key=lambda n: ((e := estimates[n]).extra_flops, e.host, whole[n], -e.device))
    last = min(order, key=lambda n: estimates[n].device)
    rows: dict[str, PolicyRow] = {}
    added: list[int] = []  # bytes that the compiler added to estimates
    chosen, program = None, None
    for name in order:
        expected = estimates[name].device + min(added, default=0)
        if chosen is not None:
            verdict, size = f"not needed: costs more than {chosen}", None
        elif expected > budget:
            verdict, size = "passed over: over the budget by arithmetic", None
        elif len(added) >= compiles - 1 and name != last:
            verdict, size = "passed over: the last compilation is for the smallest estimate", None
        else:
            program, size = _compiled_here(configs[name]) if here else (None, compiled_bytes(configs[name], topology))
            added.append(0 if size is None else max(0, size - estimates[name].device))
            refused = here and program is None
            chosen = name if size is not None and size <= budget and not refused else None
            verdict = "chosen" if chosen else REFUSED if refused else "over the budget"
        rows[name] = PolicyRow(name, estimates[name], size, verdict)
    table = tuple(rows[name] for name in order)
    if chosen is None:
        least = min(table, key=lambda r: r.compiled_bytes or r.estimate.device)
        source = "by arithmetic" if least.compiled_bytes is None else "compiled"
        source += f" ({REFUSED})" if least.verdict == REFUSED else ""
        raise ConfigError(
            f"no memory policy fits {budget:,} bytes per device of {topology}: the smallest, '{least.policy}', takes "
            f"{least.compiled_bytes or least.estimate.device:,} {source}; use more devices, a smaller batch or "
            "a shorter sequence"
        )
    return Choice(chosen, configs[chosen], topology, budget, table, program)


def _compiled_here(config: TrainConfig) -> tuple[Any, int | None]:
    """Compile a run's step for this machine; no step if memory ran out, and no bytes per device if they are unknown."""
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
    """Bytes per device of a run's compiled training step: arguments, outputs not aliased to them, temporaries.

    If the step does not fit the hardware, the size in the TPU compiler's error is returned.

    Args:
      config: the run's settings.
      topology: as for `topology_devices`.

    Raises:
      jax.errors.JaxRuntimeError: the compiler fails for another reason than memory.
    """
    try:
        return bytes_of(compile_step(config, topology))
    except jax.errors.JaxRuntimeError as e:
        return bytes_needed(e)


def policy_table(rows: tuple[PolicyRow, ...], topology: str, budget: int) -> Table:
    """Rich table of policies: estimated and compiled bytes per device, bytes in host memory, extra FLOPs, verdict."""
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
