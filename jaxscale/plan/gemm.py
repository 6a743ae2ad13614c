"""Time matrix products, and fit a model of their time with a few physical parameters.

    seconds = launch + (compute ** p + memory ** p) ** (1 / p)

`compute` is FLOPs, with sizes rounded up to tiles and tiles to waves of cores, over a rate. `memory` is the bytes of
the three matrices over a bandwidth. p is the overlap of the two: none at 1, complete for large p (the roofline).
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
"""Tiles (rows, columns, depth) that a fit tries; it takes the one that explains the times best."""


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A timed product of an m x k and a k x n matrix.

    Args:
      m, n, k: its sizes.
      dtype: dtype of the inputs.
      seconds: seconds per product in the fastest round.
      spread: as `Timing.spread`.
    """

    m: int
    n: int
    k: int
    dtype: str
    seconds: float
    spread: float = 0.0

    @property
    def flops(self) -> int:
        """FLOPs; a multiply-add is two."""
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
      bandwidth: bytes/s at which matrices are read and written.
      launch: seconds that every product takes at least.
      overlap: p of the formula in the module's docstring.
      tile: rows, columns and depth of a tile; sizes are rounded up to multiples of them.
      cores: tiles that are computed at the same time; the number of tiles is rounded up to a multiple of it.
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
        """Return the predicted seconds of an m x k by k x n product."""
        compute = padded_flops(m, n, k, self.tile, self.cores) / self.rate
        memory = self.width * (m * k + k * n + m * n) / self.bandwidth
        return float(self.launch + _both(compute, memory, self.overlap))

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as a hardware file has them."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Score:
    """How well a model predicts measurements that it was not fitted on.

    Args:
      r2: share of the variance of seconds that it explains.
      r2_log: share of the variance of log seconds, where short products count as much as long ones.
      mean_error: mean of |predicted / measured - 1|.
      median_error: median of the same.
      count: number of measurements.
    """

    r2: float
    r2_log: float
    mean_error: float
    median_error: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return dataclasses.asdict(self)


def padded_flops(m: int, n: int, k: int, tile: tuple[int, int, int], cores: int = 1) -> float:
    """Return the FLOPs of a product with sizes rounded up to tiles.

    Args:
      m: rows of the result.
      n: columns of the result.
      k: the contracted size.
      tile: rows, columns and depth of a tile.
      cores: the number of tiles is rounded up to a multiple of it.
    """
    tiles = math.ceil(m / tile[0]) * math.ceil(n / tile[1])
    waves = math.ceil(tiles / cores) * cores
    return 2.0 * waves * tile[0] * tile[1] * math.ceil(k / tile[2]) * tile[2]


def _both(compute: float | np.ndarray, memory: float | np.ndarray, p: float) -> float | np.ndarray:
    """Return (compute ** p + memory ** p) ** (1 / p) without overflow."""
    larger, smaller = np.maximum(compute, memory), np.minimum(compute, memory)
    return larger * (1 + (smaller / larger) ** p) ** (1 / p)


def shapes(count: int, largest: int, *, smallest: int = 16, seed: int = 0) -> list[tuple[int, int, int]]:
    """Draw sizes of products log-uniformly, half of them multiples of 64, as in models, and half multiples of 8.

    Args:
      count: number of products.
      largest: largest size.
      smallest: smallest size before rounding.
      seed: seed of the draws.

    Returns:
      m, n, k of each product.
    """
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
    """Time matrix products, with every device of this machine computing one at the same time.

    Args:
      sizes: m, n, k of each product.
      dtype: dtype of both matrices; results are float32 for "float8_*" and int32 for "int8".
      rounds: as for `clock`.
      timer: as for `clock`.
    """
    times = ((size, time_product(*size, dtype, rounds, timer)) for size in sizes)
    return [Gemm(*size, dtype, t.fastest, t.spread) for size, t in times]


def time_product(
    m: int, n: int, k: int, dtype: str, rounds: int = 7, timer: Callable[[], float] = time.perf_counter
) -> Timing:
    """Time a matrix product on every device of this machine at the same time.

    Operands are scattered over their range: with constants fewer bits flip, and a power-limited device is faster.

    Args:
      m: rows of the result.
      n: columns of the result.
      k: the contracted size.
      dtype: as for `measure`.
      rounds: as for `clock`.
      timer: as for `clock`.
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
    """Return numbers spread evenly over [-1, 1), or over the range of an integer dtype.

    They are multiplicative hashes of positions (Knuth, The Art of Computer Programming 6.4), which compile faster than
    `jax.random`.

    Args:
      shape: shape of the array.
      dtype: its dtype.
      seed: a uint32 scalar.
    """
    # positions as a sum over dimensions, so that each device computes its own shard
    parts = [jax.lax.broadcasted_iota(jnp.uint32, shape, d) * math.prod(shape[d + 1 :]) for d in range(len(shape))]
    bits = (functools.reduce(jnp.add, parts) ^ seed) * jnp.uint32(2654435761)
    signed = jax.lax.bitcast_convert_type(bits ^ (bits >> 15), jnp.int32)
    if jnp.issubdtype(dtype, jnp.integer):
        return (signed >> (32 - 8 * dtype.itemsize)).astype(dtype)
    return (signed.astype(jnp.float32) * 2.0**-31).astype(dtype)


def split(gemms: Sequence[Gemm], *, held_out: float = 1 / 3, seed: int = 0) -> tuple[list[Gemm], list[Gemm]]:
    """Split measurements at random into those to fit on and those to test the fit on.

    Args:
      gemms: measured products.
      held_out: share of them to test on.
      seed: seed of the split.
    """
    order = np.random.default_rng(seed).permutation(len(gemms))
    out = set(order[: round(held_out * len(gemms))].tolist())
    return [g for i, g in enumerate(gemms) if i not in out], [gemms[i] for i in sorted(out)]


def fit(
    gemms: Sequence[Gemm], *, tiles: Sequence[tuple[int, int, int]] = TILES, cores: Sequence[int] = (1,)
) -> GemmModel:
    """Fit a model to measured products, by least squares on log seconds.

    Args:
      gemms: at least eight measured products of one dtype and different sizes.
      tiles: tiles to choose from.
      cores: numbers of cores to choose from.

    Raises:
      ConfigError: too few measurements, or several dtypes.
    """
    from scipy.optimize import least_squares

    if len(gemms) < 8 or len({g.dtype for g in gemms}) != 1:
        dtypes = ", ".join(sorted({g.dtype for g in gemms})) or "no dtype"
        raise ConfigError(
            f"a model of matrix products is fitted on 8 or more of one dtype, not on {len(gemms)} of {dtypes}"
        )
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
        result = least_squares(lambda x, parts=parts: np.log(parts(x) / times), start, loss="soft_l1", max_nfev=200)
        if best is None or result.cost < best[0]:
            rate, bandwidth, launch = np.exp(result.x[:3]).tolist()
            best = (
                result.cost,
                GemmModel(rate, bandwidth, launch, 1 + math.exp(min(result.x[3], 5.0)), tile, units, width),
            )
    assert best is not None
    return best[1]


def score(model: GemmModel, gemms: Sequence[Gemm]) -> Score:
    """Return how well a model predicts measured products.

    Args:
      model: a fitted model.
      gemms: measured products that it was not fitted on.
    """
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
    """Return the model of a chip's matrix products: the fitted one of its hardware file, else its roofline.

    Args:
      chip: the chip.
      dtype: dtype of the inputs.

    Raises:
      LayoutError: the chip has no known rate for this dtype.
    """
    if (fitted := chip.measured.get("gemm", {}).get(dtype)) is not None:
        return GemmModel(**(fitted | {"tile": tuple(fitted["tile"])}))
    share = chip.efficiency.get
    rate, bandwidth = chip.rate(dtype) * share("matmul", 1.0), chip.bandwidth * share("memory", 1.0)
    return GemmModel(rate, bandwidth, 0.0, 64.0, chip.tile, 1, jnp.dtype(dtype).itemsize)
