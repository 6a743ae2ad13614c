"""`jaxscale microbench`: measured rates of this machine, written as a hardware file that `jaxscale plan` reads."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import ConfigError
from jaxscale.hardware import Chip, Link, chip_of
from jaxscale.plan import collective_bench, gemm
from jaxscale.plan.clock import STEADY, clock, own_time

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclasses.dataclass(frozen=True)
class Effort:
    """What to measure, and how often.

    Args:
      products: sizes of the square matrix products whose rates are measured.
      dtypes: dtypes of the products.
      shapes: number of products of random sizes that the model of products is fitted on; 0 fits no model.
      largest: the largest of these sizes.
      copies: bytes of the copies on each device.
      host: bytes of transfers to and from the host.
      messages: payloads of collectives in bytes.
      rounds: repeats of each measurement.
      timer: returns seconds: wall-clock time, or `own_time`.
    """

    products: tuple[int, ...]
    dtypes: tuple[str, ...]
    shapes: int
    largest: int
    copies: tuple[int, ...]
    host: int
    messages: tuple[int, ...]
    rounds: int
    timer: Callable[[], float] = time.perf_counter


_KIB, _MIB = 2**10, 2**20
EFFORTS = {
    ("cpu", False): Effort(
        (256, 512, 768), ("float32", "bfloat16"), 60, 512, (4 * _MIB, 16 * _MIB, 64 * _MIB), 32 * _MIB,
        (4 * _KIB, 32 * _KIB, 256 * _KIB, 2 * _MIB, 8 * _MIB), 7,
    ),
    ("cpu", True): Effort(
        (128, 256), ("float32", "bfloat16"), 0, 0, (_MIB, 8 * _MIB), 8 * _MIB, (4 * _KIB, 64 * _KIB, _MIB), 3
    ),
    ("gpu", False): Effort(
        (1024, 2048, 4096, 8192, 16384), ("float32", "bfloat16", "float8_e4m3fn", "int8"), 90, 8192,
        (16 * _MIB, 256 * _MIB, 1024 * _MIB), 256 * _MIB,
        (32 * _KIB, 256 * _KIB, 2 * _MIB, 16 * _MIB, 128 * _MIB, 512 * _MIB), 15,
    ),
    ("gpu", True): Effort(
        (2048, 8192), ("float32", "bfloat16", "float8_e4m3fn"), 0, 0, (256 * _MIB,), 64 * _MIB,
        (256 * _KIB, 4 * _MIB, 64 * _MIB), 7,
    ),
}  # fmt: skip
"""Effort by platform and by --quick; a TPU has that of a GPU."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured rate.

    Args:
      what: the measured operation.
      size: its size.
      seconds: median of the repeats.
      rate: rate of one device, in `unit`.
      unit: "FLOP/s" or "B/s".
      spread: spread of the repeats as a fraction (see `jaxscale.plan.clock`).
    """

    what: str
    size: str
    seconds: float
    rate: float
    unit: str
    spread: float


@dataclasses.dataclass(frozen=True)
class Microbench:
    """Measured rates of a machine; prints as a table.

    Args:
      chip: the contents of the hardware file.
      rows: the measurements.
      fits: by dtype, the accuracy of the model of products on products that it was not fitted on.
    """

    chip: Chip
    rows: tuple[Row, ...]
    fits: dict[str, gemm.Score]

    @property
    def unsteady(self) -> tuple[Row, ...]:
        """Measurements whose repeats spread by more than `STEADY`."""
        return tuple(row for row in self.rows if row.spread > STEADY)

    def write(self, path: str | Path) -> Path:
        """Write the hardware file, which `topology("my.json:8")` reads, and return its path."""
        path = Path(path)
        path.write_text(json.dumps(self.chip.to_json(), indent=2) + "\n")
        return path

    def to_json(self) -> dict[str, Any]:
        """Return the hardware file, the measurements and the scores of the fits as JSON values."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        return {"hardware": self.chip.to_json(), "rows": rows, "fits": {k: v.to_json() for k, v in self.fits.items()}}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(title=f"{self.chip.name}, each of its devices", title_justify="left", box=SIMPLE_HEAD)
        for name in ("measured", "size", "time", "rate", "spread"):
            table.add_column(name, justify="left" if name in ("measured", "size") else "right")
        for r in self.rows:
            table.add_row(
                r.what, r.size, f"{1e3 * r.seconds:.3g} ms", f"{r.rate / 1e9:,.3g} G{r.unit}", f"{r.spread:.1%}"
            )
        yield table
        for dtype, score in self.fits.items():
            yield (
                f"products of {dtype}: the fitted model explains {score.r2:.3f} of the variance of {score.count} "
                f"products that it was not fitted on; mean error {score.mean_error:.1%}"
            )
        if self.unsteady:
            yield (
                f"{len(self.unsteady)} of {len(self.rows)} measurements spread by more than {STEADY:.0%}: "
                "other processes or changing clock rates disturbed them; measure again when the machine is idle"
            )


def microbench(
    *,
    quick: bool = False,
    cpu_time: bool = False,
    effort: Effort | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Microbench:
    """Measure products, copies, host transfers and collectives while all local devices work at the same time.

    Args:
      quick: measure fewer sizes and repeats, and fit no model of products.
      cpu_time: count the CPU seconds of this process instead of wall-clock seconds, on a CPU that others use as well.
      effort: what to measure; by default `EFFORTS` of the platform.
      say: called with a description of each group of measurements before it starts.

    Returns:
      the measurements, and a hardware file with the rates of one device.

    Raises:
      ConfigError: `cpu_time` on an accelerator.
    """
    platform = jax.default_backend()
    if cpu_time and platform != "cpu":
        raise ConfigError(f"--cpu-time is only for a CPU, and this is a {platform}; leave it out")
    effort = effort or EFFORTS["cpu" if platform == "cpu" else "gpu", quick]
    effort = dataclasses.replace(effort, timer=own_time) if cpu_time else effort
    rows: list[Row] = []
    flops, fitted, fits = _products(effort, rows, say)
    copies = _copies(effort, rows, say)
    host = _host(effort, rows, say)
    links = _links(effort, rows, say)
    device = jax.devices()[0]
    known = chip_of(device.device_kind)
    count = jax.device_count()
    source = (
        f"jaxscale microbench, {datetime.date.today()}, jax {jax.__version__}, {count} {device.device_kind} device(s) "
        f"at work together{', seconds of its own work' if cpu_time else ''}"
    )
    usable = (device.memory_stats() or {}).get("bytes_limit")
    memory = known.memory if known else usable or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // count
    sources = {
        name: source for name in ("flops", "bandwidth", "host_bandwidth", "links", "latency", "memory", "efficiency")
    }
    if known is not None:
        sources |= {name: known.sources[name] for name in ("memory", "watts") if name in known.sources}
    if not links and known is not None:
        sources |= {name: known.sources[name] for name in ("links", "latency")}
    chip = Chip(
        name=device.device_kind,
        kinds=(device.device_kind,),
        platform=platform,
        flops=flops,
        memory=memory,
        usable=usable,
        bandwidth=copies[-1][1],
        host_bandwidth=host,
        links=_levels(links) if links else known.links if known is not None else (),
        watts=known.watts if known is not None else None,
        devices=1,
        smallest=(count,),
        pod=None,
        sources=sources,
        efficiency={"matmul": 1.0, "memory": 1.0, "link": 1.0},  # measured rates need no correction
        tile=known.tile if known is not None else (1, 1, 1),
        measured={"gemm": fitted, "copy": copies, "collectives": [link.to_json() for link in links]},
    )
    return Microbench(chip, tuple(rows), fits)


def _products(
    effort: Effort, rows: list[Row], say: Callable[[str], None]
) -> tuple[dict[str, float], dict[str, Any], dict[str, gemm.Score]]:
    """Return FLOP/s, fitted models and the accuracy of these models, each by dtype."""
    flops: dict[str, float] = {}
    fitted: dict[str, Any] = {}
    fits: dict[str, gemm.Score] = {}
    cores = (1, *([n] if (n := getattr(jax.devices()[0], "core_count", None)) else []))
    for dtype in effort.dtypes:
        say(f"products of {dtype}")
        name = "float8" if dtype.startswith("float8") else dtype
        for size in effort.products:
            timing = gemm.time_product(size, size, size, dtype, effort.rounds, effort.timer)
            rate = 2 * size**3 / timing.seconds
            rows.append(Row(f"{dtype} product", f"{size}³", timing.seconds, rate, "FLOP/s", timing.spread))
            flops[name] = max(rate, flops.get(name, 0.0))
        if effort.shapes:
            sizes = gemm.shapes(effort.shapes, effort.largest)
            measured = gemm.measure(sizes, dtype, rounds=effort.rounds, timer=effort.timer)
            seen, unseen = gemm.split(measured)
            model = gemm.fit(seen, cores=cores)
            fits[name], fitted[name] = gemm.score(model, unseen), model.to_json()
    return flops, fitted, fits


def _copies(effort: Effort, rows: list[Row], say: Callable[[str], None]) -> list[list[float]]:
    """Pairs of copied bytes per device, and bytes/s of device memory, reads and writes together."""
    say("copies")
    curve: list[list[float]] = []
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("device",), axis_types=(AxisType.Auto,))
    each = NamedSharding(mesh, PartitionSpec("device"))
    for size in effort.copies:
        x = jax.jit(lambda size=size: jnp.ones((count, size // 4), jnp.float32), out_shardings=each)()
        timing = clock(jax.jit(jnp.negative, out_shardings=each), x, rounds=effort.rounds, timer=effort.timer)
        rate = 2 * size / timing.seconds
        rows.append(Row("copy", f"{size / _MIB:g} MiB", timing.seconds, rate, "B/s", timing.spread))
        curve.append([size, rate])
    return curve


def _host(effort: Effort, rows: list[Row], say: Callable[[str], None]) -> float:
    """Bytes/s between the host's memory and one device's, in the slower direction."""
    say("transfers to and from the host")
    device = jax.local_devices()[0]
    host_array = np.ones(effort.host // 4, np.float32)
    # A CPU device would alias the host's array, so copies are forced. Each array is read once, because JAX caches its
    # host copy.
    timer = time.process_time if effort.timer is own_time else effort.timer  # one thread copies
    options: dict[str, Any] = {"rounds": effort.rounds, "least": 0, "timer": timer}
    put = clock(lambda: jax.device_put(host_array, device, may_alias=False), **options)
    most = 2 * effort.rounds
    arrays = iter([jax.device_put(host_array, device, may_alias=False) for _ in range(most + 2)])
    pull = np.array if device.platform == "cpu" else np.asarray
    got = clock(lambda: pull(next(arrays)), most=most, **options)
    rates = []
    for what, timing in (("host to device", put), ("device to host", got)):
        rates.append(effort.host / timing.seconds)
        rows.append(Row(what, f"{effort.host / _MIB:g} MiB", timing.seconds, rates[-1], "B/s", timing.spread))
    return min(rates)


def _links(effort: Effort, rows: list[Row], say: Callable[[str], None]) -> list[collective_bench.LinkFit]:
    if jax.device_count() == 1:
        return []
    samples = collective_bench.sweep(effort.messages, rounds=effort.rounds, timer=effort.timer, say=say)
    rows += [Row(s.kind, f"{s.payload / _KIB:g} KiB", s.seconds, s.rate, "B/s", s.spread) for s in samples]
    return collective_bench.fit(samples)


def _levels(fits: list[collective_bench.LinkFit]) -> tuple[Link, ...]:
    """One network level that joins all devices, with the median bandwidth and latency of the collectives."""
    return (
        Link(
            "measured",
            "switch",
            statistics.median(f.bandwidth for f in fits),
            statistics.median(f.latency for f in fits),
            None,
        ),
    )
