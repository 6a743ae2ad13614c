"""Find the largest model, sequence and batch that fit some hardware, and the cheapest hardware for a run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from jaxscale.errors import ConfigError, LayoutError, near
from jaxscale.hardware import Topology, topology
from jaxscale.layout.mesh import parse_mesh
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.nn import MultiHeadLatent
from jaxscale.plan.by_tracing import memory_of
from jaxscale.plan.error_bars import error_bar
from jaxscale.plan.planner import Plan, on_hardware, plan_for, with_budget
from jaxscale.plan.printing import Printable, table_of
from jaxscale.plan.restarts import Restarts
from jaxscale.plan.search_front import Tell, silent
from jaxscale.step import TrainConfig
from jaxscale.step.rates import parameter_count
from jaxscale.units import human_bytes, human_seconds

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GROWTH = 4096
"""Largest value of a quantity that is tried, as a multiple of the run's own."""

LARGEST = 4096
"""Devices of the largest topology that is tried."""


@dataclasses.dataclass(frozen=True)
class Limit:
    """The largest value of one quantity of a run that fits, with all others as they are.

    Args:
      name: the quantity.
      now: the run's own value.
      largest: the largest value that fits; 0 where none does.
      plan: plan of the run with that value; `None` where none fits.
      why: why the next larger value does not fit.
    """

    name: str
    now: int
    largest: int
    plan: Plan | None
    why: str


@dataclasses.dataclass(frozen=True)
class Limits(Printable):
    """The largest values of each quantity of a run that fit some hardware; prints as a table.

    Args:
      hardware: the hardware.
      limits: one for each quantity of the run.
    """

    hardware: Topology
    limits: tuple[Limit, ...]

    def to_json(self) -> dict[str, Any]:
        """Return limits and their plans as plain values, by quantity."""
        rows = {
            x.name: {
                "now": x.now,
                "largest": x.largest,
                "why": x.why,
                "parameters": None if x.plan is None else parameter_count(x.plan.config),
                "plan": None if x.plan is None else x.plan.to_json(),
            }
            for x in self.limits
        }
        return {"topology": self.hardware.name, "limits": rows}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        capacity = human_bytes(self.hardware.chip.capacity)
        columns = ("now", "at most", "parameters", "bytes, upper end", "step", "tokens/s", "MFU")
        table = table_of(f"what fits {self.hardware.name}, {capacity} a device", "", *columns)
        for x in self.limits:
            cells = ["-"] * 5
            if x.plan is not None:
                step = x.plan.best
                cells = [f"{parameter_count(x.plan.config):.3g}", human_bytes(x.plan.bytes_range[1])]
                cells += [human_seconds(step.total), f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}"]
            table.add_row(x.name, f"{x.now:,}", f"{x.largest:,}" if x.largest else "nothing", *cells)
        yield table
        for x in self.limits:
            yield f"{x.name}: {x.why}"
        yield (
            "Each quantity is varied alone, the width together with heads and feed-forward layer. A run fits if the "
            "upper end of its memory's error bar does. Nothing was compiled; `jaxscale plan --topology` compiles."
        )


@dataclasses.dataclass(frozen=True)
class TopologyChoice(Printable):
    """Plans of a run on several topologies, one of which is chosen; prints as a table.

    Args:
      plans: plans of the topologies on which the run can be laid out, in the order in which they were tried.
      prices: price of a device for an hour, by chip.
      best: the chosen plan; `None` if none meets the goal.
      goal: the goal, such as "cheapest for 1e+12 tokens within 60 days".
      refused: by topology, the error of those that cannot be planned.
    """

    plans: tuple[Plan, ...]
    prices: Mapping[str, float]
    best: Plan | None
    goal: str
    refused: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return the goal, the best topology and all plans as plain values."""
        return {
            "goal": self.goal,
            "best": None if self.best is None else self.best.hardware.name,
            "plans": [plan.to_json() for plan in self.plans],
            "refused": dict(self.refused),
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = ("devices", "bytes", "step", "tokens/s", "MFU", "days", "days, slow end", "device-hours", "cost", "")
        table = table_of(self.goal, "", *columns)
        for plan in self.plans:
            b, step = plan.budget, plan.best
            assert b is not None
            cells = [f"{plan.hardware.devices}", human_bytes(plan.bytes), human_seconds(step.total)]
            cells += [f"{step.tokens_per_second:,.0f}", f"{step.mfu:.1%}"]
            cells += [f"{b.days:,.1f}", f"{plan.days_range[1]:,.1f}", f"{b.device_hours:,.0f}"]
            cells += ["-" if b.cost is None else f"{b.cost:,.0f}"]
            verdict = "chosen" if plan is self.best else "" if plan.fits else "may not fit"
            if plan.bytes > plan.hardware.chip.capacity:
                verdict = "does not fit"
            table.add_row(plan.hardware.name, *cells, verdict)
        yield table
        if self.best is None:
            yield "No topology meets this; try another chip, a larger batch, or --search on one of them."
        for name, why in self.refused.items():
            yield f"{name} was refused: {why}"


def fit_on(config: TrainConfig, hardware: str | Topology, *, only: Collection[str] = (), tell: Tell = silent) -> Limits:
    """Find the deepest and widest model, the longest sequence and the largest batch that fit some hardware.

    Each quantity is varied alone, by bisection. Memory is by formulas, or from the traced step for runs that formulas
    do not cover; no step is compiled. Memory by formulas grows with every quantity, with one exception: a single layer
    is not recomputed, so that it may take more memory than two. Where memory of a traced step falls with size, the
    result may be the smaller of two limits.

    Args:
      config: the run's settings.
      hardware: a topology or its name.
      only: the quantities to vary, such as ("layers", "batch size"); all by default.
      tell: called with progress.

    Returns:
      limits of layers (`model.depth`), the width of a Transformer (heads keep their size; key-value heads and the
      feed-forward layer grow in proportion), `seq_len` and `batch_size`.

    Raises:
      ConfigError, LayoutError: training refuses the run as it is.
    """
    target = topology(hardware) if isinstance(hardware, str) else hardware
    config = on_hardware(config, target)
    quantities = {quantity[0]: quantity for quantity in _quantities(config)}
    for name in only:
        if name not in quantities:
            raise ConfigError(f"fit_on(only=...) names '{name}', which this run does not have{near(name, quantities)}")
    return Limits(target, tuple(_limit(*quantities[name], target, tell) for name in only or quantities))


def cheapest(
    config: TrainConfig,
    chips: Sequence[str],
    tokens: float,
    *,
    days: float | None = None,
    budget: float | None = None,
    prices: Mapping[str, float] | None = None,
    restarts: Restarts | None = None,
    tell: Tell = silent,
) -> TopologyChoice:
    """Find the cheapest hardware that trains on some tokens before a deadline, or the fastest within a budget.

    Topologies with a power of two of chips are tried, with the run's layout, whose mesh fills them. Days and cost are
    those at the slow end of the error bar of the step time.

    Args:
      config: the run's settings; its mesh has one size of -1.
      chips: chips or hardware files, such as "v5p" or "my.json", each in all its sizes; or topologies, such as
        "v5p:4x4x4".
      tokens: tokens to train on.
      days: the deadline, in days.
      budget: the budget, in the currency of `prices`.
      prices: price of a device for an hour, by chip or hardware file. Without prices, for one chip and a deadline,
        device-hours are compared.
      restarts: as for `plan_for`.
      tell: called with progress.

    Raises:
      ConfigError: a mesh without -1; neither or both of `days` and `budget`; one of them or a price that is not a
        finite number above 0; a chip without a price; or a price for another chip.
      LayoutError: unknown hardware, or the run can be laid out on none of it.
    """
    prices = dict(prices or {})
    sizes = {name: _topologies(name) for name in chips}
    kinds = {chip_name(name) for name in chips}
    if (days is None) == (budget is None):
        raise ConfigError("give either a deadline in days or a budget")
    values = {"days": days, "budget": budget, **{f"the price of '{name}'": price for name, price in prices.items()}}
    for what, value in values.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{what} is {value:g}: must be a finite number above 0")
    if unused := sorted(prices.keys() - kinds):
        raise ConfigError(f"'{unused[0]}' has a price, but is not one of the chips{near(unused[0], kinds)}")
    if unpriced := sorted(kinds - prices.keys() if prices or budget is not None or len(kinds) > 1 else ()):
        raise ConfigError(f"{' and '.join(unpriced)} has no price of a device for an hour; give one for each chip")
    if config.layout is None or -1 not in parse_mesh(config.layout.mesh).values():
        raise ConfigError(
            "the mesh has no size of -1 to fill hardware of several sizes; give it one, such as --mesh 'fsdp=-1'"
        )
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    for name, topologies in sizes.items():
        planned = False
        for on in topologies:
            tell("planning", len(plans), 0)
            try:
                plan = plan_for(config, on, compile="never")
                plans.append(with_budget(plan, tokens, prices.get(chip_name(name)), restarts=restarts))
            except (LayoutError, ConfigError) as e:
                refused[on] = str(e)
                if planned:  # more devices do not divide the batch either, or fail too often
                    refused[on] += "; larger topologies were not tried"
                    break
                continue
            planned = True
    if not plans:
        raise LayoutError(f"the run can be laid out on none of {', '.join(refused)}: {next(iter(refused.values()))}")
    if days is not None:
        in_time = [p for p in plans if p.fits and p.days_range[1] <= days]
        best = min(in_time, key=_cost, default=None)
        goal = f"cheapest for {tokens:.4g} tokens within {days:g} days"
    else:
        assert budget is not None
        affordable = [p for p in plans if p.fits and _cost(p) * _slow(p) <= budget]
        best = min(affordable, key=lambda p: p.days_range[1], default=None)
        goal = f"fastest for {tokens:.4g} tokens within a budget of {budget:,.0f}"
    return TopologyChoice(tuple(plans), prices, best, goal, refused)


def _slow(plan: Plan) -> float:
    """Return the slow end of the error bar of the step time, as a factor."""
    return plan.seconds_range[1] / plan.best.total


def _cost(plan: Plan) -> float:
    """Return the cost of a plan, or its device-hours if it has no price."""
    assert plan.budget is not None
    return plan.budget.device_hours if plan.budget.cost is None else plan.budget.cost


def chip_name(hardware: str) -> str:
    """Return the chip or the hardware file in a topology's name: "v5p" of "V5P:2x2x1", "my.json" of "my.json:8"."""
    name = hardware.partition(":")[0].strip()
    return name if name.endswith(".json") else name.lower()


def _topologies(name: str) -> list[str]:
    """Return a topology alone, or all sizes of a chip in ascending order, each with twice the devices of the last."""
    chip = topology(name).chip
    if ":" in name:
        return [name]
    most = min(LARGEST // chip.devices, chip.pod or LARGEST)
    counts = [2**power for power in range(most.bit_length())]
    if chip.torus:
        return [f"{name}:{chip.slice_of(n)}" for n in counts if n >= math.prod(chip.smallest)]
    return [f"{name}:{n}" for n in counts]


def _quantities(config: TrainConfig) -> Iterator[tuple[str, Callable[[int], TrainConfig], int, int]]:
    """Yield for each quantity its name, a function from a value to the run with it, its value, and its divisor."""
    model, layout = config.model, config.layout
    assert layout is not None
    if isinstance(model, TransformerConfig):
        model = _sized(model)
        yield "layers", lambda n: _with_model(config, dataclasses.replace(model, depth=n)), model.depth, 1
        heads = model.sizes.heads
        unit = math.lcm(heads // math.gcd(heads, model.sizes.kv_heads, model.sizes.hidden), layout.split("heads"))
        each = model.sizes.width // heads
        yield "width", lambda n: _with_model(config, with_heads(model, n // each)), heads * each, unit * each
    elif isinstance(depth := getattr(model, "depth", None), int):
        yield "layers", lambda n: _with_model(config, dataclasses.replace(cast(Any, model), depth=n)), depth, 1
    seq = config.seq_len
    yield (
        "sequence length",
        lambda n: dataclasses.replace(config, seq_len=n),
        seq,
        math.lcm(min(1024, seq & -seq), layout.split("seq")),
    )
    rows = layout.split("batch") * config.accumulate * (layout.schedule.microbatches or 1 if layout.stages > 1 else 1)
    yield "batch size", lambda n: dataclasses.replace(config, batch_size=n), config.batch_size, rows


def _with_model(config: TrainConfig, model: ModelConfig) -> TrainConfig:
    return dataclasses.replace(config, model=model)


def _sized(model: TransformerConfig) -> TransformerConfig:
    """Return the model with explicit values for all sizes that follow from its depth."""
    z = model.sizes
    kv_heads = None if model.kv_heads is None else z.kv_heads
    follows = z.head_dim * z.heads == z.width or isinstance(model.attention_layer, MultiHeadLatent)
    head_dim = model.head_dim if follows else z.head_dim
    return dataclasses.replace(
        model, width=z.width, heads=z.heads, kv_heads=kv_heads, head_dim=head_dim, hidden=z.hidden
    )


def with_heads(model: TransformerConfig, heads: int) -> TransformerConfig:
    """Return a Transformer with another number of heads of the same size, and all widths in proportion.

    Args:
      model: the Transformer.
      heads: number of query heads.
    """
    model = _sized(model)
    z = model.sizes
    kv_heads = None if model.kv_heads is None else heads * z.kv_heads // z.heads
    width, hidden = heads * (z.width // z.heads), heads * z.hidden // z.heads
    return dataclasses.replace(model, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden)


def _limit(name: str, make: Callable[[int], TrainConfig], now: int, step: int, hardware: Topology, tell: Tell) -> Limit:
    """Bisect the largest multiple of `step` that fits."""
    tried: dict[int, str] = {}

    def refuses(k: int) -> str:
        """Return why k steps do not fit; "" if they do."""
        if k not in tried:
            tell(f"trying {name} {k * step:,}; before it", len(tried), 0)
            tried[k] = _refuses(make(k * step), hardware)
        return tried[k]

    fits, fails = 0, max(1, now // step)
    most = fails * GROWTH
    while fails <= most and not refuses(fails):
        fits, fails = fails, 2 * fails
    while fails <= most and fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (fits, middle) if refuses(middle) else (middle, fails)
    plan = _plan(make(fits * step), hardware) if fits else None
    why = f"larger than {fits * step:,} was not tried" if fails > most else f"{fails * step:,}: {refuses(fails)}"
    return Limit(name, now, fits * step, plan, why)


def _plan(config: TrainConfig, hardware: Topology) -> Plan:
    return plan_for(config, hardware, compile="never")


def _refuses(config: TrainConfig, hardware: Topology) -> str:
    """Return why a run does not fit hardware: an error of its settings, or its predicted memory; "" if it fits."""
    try:
        config = on_hardware(config, hardware)
        memory, method = memory_of(config, hardware)
    except (ConfigError, LayoutError) as e:
        return str(e)
    device = memory.device
    bar = error_bar(config, hardware, device, method)
    if bar.bytes(device)[1] <= hardware.chip.capacity:
        return ""
    upper, capacity = human_bytes(bar.bytes(device)[1]), human_bytes(hardware.chip.capacity)
    return f"predicted to take {human_bytes(device)}, and at the upper end of the error bar {upper} of {capacity}"
