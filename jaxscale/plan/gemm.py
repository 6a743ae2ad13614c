"""How long a matrix product takes: measured, and a small physical model fitted to that (GPPerf, row 154).

    seconds = launch + (compute ** p + memory ** p) ** (1 / p)

`compute` is the arithmetic of whole tiles on whole waves of cores at a rate, `memory` the three matrices' bytes at a
bandwidth; p says how far the two overlap, 1 not at all, large wholly (then it is the roofline's maximum).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxscale.errors import ConfigError
from jaxscale.hardware import Chip
from jaxscale.plan.clock import Timing, clock

TILES = (
    (1, 1, 1),
    (8, 16, 1),
    (16, 16, 32),
    (32, 32, 32),
    (64, 64, 32),
    (128, 128, 32),
    (128, 128, 128),
    (256, 256, 256),
)
"""Rows, columns and depth that hardware works in at once, of which a fit takes the ones that explain the most."""


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A measured product of an m x k and a k x n matrix.

    Args:
      m, n, k: its sizes.
      dtype: of the inputs.
      seconds: its fastest round took.
      spread: of repeats, as `Timing.spread`.
    """

    m: int
    n: int
    k: int
    dtype: str
    seconds: float
    spread: float = 0.0

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k

    @property
    def rate(self) -> float:
        """FLOP/s."""
        return self.flops / self.seconds


@dataclasses.dataclass(frozen=True)
class GemmModel:
    """A fitted model of products of one dtype on one device.

    Args:
      rate: FLOP/s of full tiles.
      bandwidth: bytes/s of the matrices.
      launch: seconds that any product takes.
      overlap: p above.
      tile: rows, columns, depth that are worked on at once; sizes are rounded up to them.
      cores: tiles that are worked on at the same time; their number is rounded up to it.
      width: bytes of an element.
    """

    rate: float
    bandwidth: float
    launch: float
    overlap: float
    tile: tuple[int, int, int]
    cores: int
    width: int

    def seconds(self, m: int, n: int, k: int) -> float:
        """How long an m x k by k x n product takes."""
        compute = padded_flops(m, n, k, self.tile, self.cores) / self.rate
        memory = self.width * (m * k + k * n + m * n) / self.bandwidth
        return float(self.launch + _both(compute, memory, self.overlap))

    def to_json(self) -> dict[str, Any]:
        """As a hardware file holds it."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Score:
    """How well a model predicts measurements that it was not fitted on.

    Args:
      r2: share of the variance of the seconds that it explains.
      r2_log: of their logarithm, where short products count as much as long ones.
      mean_error: mean of |predicted / measured - 1|.
      median_error: its median.
      count: measurements.
    """

    r2: float
    r2_log: float
    mean_error: float
    median_error: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Its fields."""
        return dataclasses.asdict(self)


def padded_flops(m: int, n: int, k: int, tile: tuple[int, int, int], cores: int = 1) -> float:
    """FLOPs of a product whose sizes are rounded up to tiles, and their number to a multiple of the cores."""
    tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1])
    waves = math.ceil(tiles / cores) * cores
    return 2.0 * waves * tile[0] * tile[1] * math.ceil(k / tile[2]) * tile[2]


def _both(compute: Any, memory: Any, p: float) -> Any:
    larger, smaller = np.maximum(compute, memory), np.minimum(compute, memory)
    return larger * (1 + (smaller / larger) ** p) ** (1 / p)


def shapes(count: int, largest: int, *, smallest: int = 16, seed: int = 0) -> list[tuple[int, int, int]]:
    """Sizes drawn log-uniformly, half of them multiples of 64 as models have them, and half of 8."""
    random = np.random.default_rng(seed)
    drawn = np.exp(random.uniform(np.log(smallest), np.log(largest), (count, 3)))
    step = np.where(np.arange(count) % 2, 8, 64)[:, None]
    return [(int(m), int(n), int(k)) for m, n, k in np.maximum(np.round(drawn / step), 1) * step]


def measure(
    sizes: Iterable[tuple[int, int, int]],
    dtype: str,
    *,
    rounds: int = 7,
    timer: Callable[[], float] = time.perf_counter,
) -> list[Gemm]:
    """Times products, each of the devices here at work on one of its own.

    Args:
      sizes: m, n, k of each.
      dtype: of both matrices; products are accumulated and given in float32 for "float8_*", int32 for "int8".
      rounds, timer: as `clock`.
    """
    times = ((size, time_product(*size, dtype, rounds, timer)) for size in sizes)
    return [Gemm(*size, dtype, t.fastest, t.spread) for size, t in times]


def time_product(
    m: int, n: int, k: int, dtype: str, rounds: int = 7, timer: Callable[[], float] = time.perf_counter
) -> Timing:
    """Times one size of product on every device here at once.

    The numbers are all over their range: of constants fewer bits change, and a device that its power limits is faster.
    """
    count = jax.device_count()
    mesh = jax.make_mesh((count,), ("device",), axis_types=(AxisType.Auto,))
    each = NamedSharding(mesh, PartitionSpec("device"))
    kind = jnp.dtype(dtype)
    out = {True: None, kind.name.startswith("float8"): jnp.float32, kind == jnp.int8: jnp.int32}[True]

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))), preferred_element_type=out)

    fill = jax.jit(
        lambda seed: (scattered((count, m, k), kind, seed), scattered((count, k, n), kind, ~seed)), out_shardings=each
    )
    return clock(jax.jit(product, out_shardings=each), *fill(jnp.uint32(1)), rounds=rounds, timer=timer)


def scattered(shape: tuple[int, ...], dtype: jnp.dtype, seed: jax.Array) -> jax.Array:
    """Numbers spread evenly over [-1, 1), or over an integer's range: multiplicative hashes of their places (Knuth,
    The Art of Computer Programming 6.4), which compile in less time than `jax.random`'s.

    Args:
      shape, dtype: of the array.
      seed: uint32, a scalar.
    """
    # by dimensions, so that each device makes its own part
    parts = [jax.lax.broadcasted_iota(jnp.uint32, shape, d) * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    bits = (functools.reduce(jnp.add, parts) ^ seed) * jnp.uint32(2654435761)
    signed = jax.lax.bitcast_convert_type(bits ^ (bits >> 15), jnp.int32)
    if jnp.issubdtype(dtype, jnp.integer):
        return (signed >> (32 - 8 * dtype.itemsize)).astype(dtype)
    return (signed.astype(jnp.float32) * 2.0**-31).astype(dtype)


def split(gemms: Sequence[Gemm], *, held_out: float = 1 / 3, seed: int = 0) -> tuple[list[Gemm], list[Gemm]]:
    """Measurements to fit on, and others to judge the fit by, drawn by chance once for a seed."""
    order = np.random.default_rng(seed).permutation(len(gemms))
    out = set(order[: round(held_out * len(gemms))].tolist())
    return [g for i, g in enumerate(gemms) if i not in out], [gemms[i] for i in sorted(out)]


def fit(
    gemms: Sequence[Gemm], *, tiles: Sequence[tuple[int, int, int]] = TILES, cores: Sequence[int] = (1,)
) -> GemmModel:
    """The model that explains measured products best: least squares on the logarithm of their seconds.

    Args:
      gemms: of one dtype; at least eight, of unlike sizes.
      tiles: to choose from.
      cores: numbers of cores to choose from.

    Raises:
      ConfigError: too few measurements, or of several dtypes.
    """
    from scipy.optimize import least_squares

    if len(gemms) < 8 or len({g.dtype for g in gemms}) != 1:
        raise ConfigError(f"a model of products is fitted on at least 8 of one dtype, not on {len(gemms)} of several")
    width = jnp.dtype(gemms[0].dtype).itemsize
    times = np.array([g.seconds for g in gemms])
    moved = np.array([width * (g.m * g.k + g.k * g.n + g.m * g.n) for g in gemms], float)
    best: tuple[float, GemmModel] | None = None
    for tile, units in itertools.product(tiles, cores):
        work = np.array([padded_flops(g.m, g.n, g.k, tile, units) for g in gemms])

        def parts(x: np.ndarray, work: np.ndarray = work) -> np.ndarray:
            rate, bandwidth, launch = np.exp(x[:3])
            return launch + _both(work / rate, moved / bandwidth, 1 + np.exp(x[3]))

        start = np.log([np.max(work / times), np.max(moved / times), np.min(times) / 2, 1.0])
        found = least_squares(lambda x, parts=parts: np.log(parts(x) / times), start, loss="soft_l1", max_nfev=200)
        if best is None or found.cost < best[0]:
            rate, bandwidth, launch = np.exp(found.x[:3]).tolist()
            best = (
                found.cost,
                GemmModel(rate, bandwidth, launch, 1 + math.exp(min(found.x[3], 5.0)), tile, units, width),
            )
    assert best is not None
    return best[1]


def score(model: GemmModel, gemms: Sequence[Gemm]) -> Score:
    """How well a model predicts measured products."""
    measured = np.array([g.seconds for g in gemms])
    predicted = np.array([model.seconds(g.m, g.n, g.k) for g in gemms])
    errors = np.abs(predicted / measured - 1)
    return Score(
        _r2(measured, predicted),
        _r2(np.log(measured), np.log(predicted)),
        float(errors.mean()),
        float(np.median(errors)),
        len(gemms),
    )


def _r2(measured: np.ndarray, predicted: np.ndarray) -> float:
    return float(1 - np.square(measured - predicted).sum() / np.square(measured - measured.mean()).sum())


def model_of(chip: Chip, dtype: str) -> GemmModel:
    """The model of a chip's products: the fitted one of its hardware file, else its data sheet's roofline.

    Args:
      chip: the hardware.
      dtype: of the inputs.

    Raises:
      LayoutError: how fast the chip multiplies this is not known.
    """
    if (fitted := chip.measured.get("gemm", {}).get(dtype)) is not None:
        return GemmModel(**(fitted | {"tile": tuple(fitted["tile"])}))
    share = chip.efficiency.get
    rate, bandwidth = chip.rate(dtype) * share("matmul", 1.0), chip.bandwidth * share("memory", 1.0)
    return GemmModel(rate, bandwidth, 0.0, 64.0, chip.tile, 1, jnp.dtype(dtype).itemsize)
