"""Time collectives over message sizes and numbers of devices, and fit a link's latency and bandwidth to the times.

As in Anthony et al. 2025 (arXiv 2511.17127), each collective is timed with payloads from kilobytes up, and the time is
fitted by latency x steps + bytes sent / bandwidth of the ring algorithms.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxscale.errors import LayoutError, near
from jaxscale.plan.clock import clock
from jaxscale.plan.collectives import KINDS, Collective

_AXIS = "device"


@dataclasses.dataclass(frozen=True)
class Sample:
    """The time of one collective with one payload.

    Args:
      kind: one of `KINDS`.
      devices: number of devices that took part.
      payload: bytes as `Collective.payload` counts them: the result of an all-gather, the operand of the others.
      seconds: the median of its rounds.
      spread: as `Timing.spread`.
    """

    kind: str
    devices: int
    payload: int
    seconds: float
    spread: float

    @property
    def sent(self) -> int:
        """Bytes that each device sends, by the ring algorithms."""
        return Collective(self.kind, (_AXIS,), self.devices, self.payload).sent

    @property
    def rate(self) -> float:
        """Bytes/s that each device sent."""
        return self.sent / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the fields, and `rate` as "bytes_per_second"."""
        return dataclasses.asdict(self) | {"bytes_per_second": self.rate}


@dataclasses.dataclass(frozen=True)
class LinkFit:
    """Latency and bandwidth fitted to the times of one collective over payloads.

    Args:
      kind: the collective, one of `KINDS`.
      devices: number of devices that took part.
      latency: seconds per step of the ring.
      bandwidth: bytes/s that a device sends.
      error: the mean of |predicted / measured - 1|.
      samples: number of payloads that it is fitted on.
    """

    kind: str
    devices: int
    latency: float
    bandwidth: float
    error: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return dataclasses.asdict(self)


def steps(kind: str, devices: int) -> int:
    """Return the number of steps in which a ring of `devices` does a collective."""
    return {"all-reduce": 2 * (devices - 1), "collective-permute": 1}.get(kind, devices - 1)


def sweep(
    payloads: Iterable[int],
    *,
    kinds: Sequence[str] = KINDS,
    counts: Sequence[int] | None = None,
    rounds: int = 7,
    timer: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> list[Sample]:
    """Time collectives on this machine's devices.

    Args:
      payloads: bytes of each message, rounded up to a multiple of the number of devices.
      kinds: the collectives, of `KINDS`.
      counts: numbers of devices; the first so many devices take part. By default all devices.
      rounds: as for `clock`.
      timer: as for `clock`.
      say: called with a line on what is timed next.

    Raises:
      LayoutError: an unknown kind, or more devices than there are.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise LayoutError(f"there is no collective '{kind}'{near(kind, KINDS)}")
    samples, payloads = [], list(payloads)
    for count in counts or (jax.device_count(),):
        if not 2 <= count <= jax.device_count():
            raise LayoutError(f"collectives of {count} devices cannot be timed on {jax.device_count()}; give 2 or more")
        mesh = Mesh(np.array(jax.devices()[:count]), (_AXIS,), axis_types=(AxisType.Auto,))
        for kind in kinds:
            say(f"{kind} of {count} devices")
            samples += [_sample(kind, mesh, payload, rounds, timer) for payload in payloads]
    return samples


def _sample(kind: str, mesh: Mesh, payload: int, rounds: int, timer: Callable[[], float]) -> Sample:
    count = mesh.size
    payload = 4 * count * math.ceil(payload / (4 * count))  # float32, divisible by the number of devices
    operand = payload // count if kind == "all-gather" else payload
    spec = PartitionSpec(_AXIS)
    x = jax.jit(lambda: jnp.ones((count, operand // 4), jnp.float32), out_shardings=NamedSharding(mesh, spec))()
    fn = jax.jit(jax.shard_map(_run(kind, count), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    timing = clock(fn, x, rounds=rounds, timer=timer)
    return Sample(kind, count, payload, timing.seconds, timing.spread)


def _run(kind: str, count: int) -> Callable[[jax.Array], jax.Array]:
    """Return the function that runs a collective on one device's row."""
    ring = [(i, (i + 1) % count) for i in range(count)]
    return {
        "all-reduce": lambda x: jax.lax.psum(x, _AXIS),
        "all-gather": lambda x: jax.lax.all_gather(x, _AXIS, axis=1, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, _AXIS, scatter_dimension=1, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, _AXIS, 1, 1, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, _AXIS, ring),
    }[kind]


def fit(samples: Sequence[Sample]) -> list[LinkFit]:
    """Fit latency and bandwidth of every collective and number of devices, by least squares on the relative error.

    Args:
      samples: measured collectives, with three payloads or more of every kind and number of devices.

    Raises:
      LayoutError: fewer than three payloads of one of them.
    """
    from scipy.optimize import nnls

    fits = []
    for kind, devices in sorted({(s.kind, s.devices) for s in samples}):
        mine = [s for s in samples if (s.kind, s.devices) == (kind, devices)]
        if len(mine) < 3:
            raise LayoutError(f"latency and bandwidth of {kind} are fitted on 3 sizes or more, not on {len(mine)}")
        seconds = np.array([s.seconds for s in mine])
        terms = np.array([[steps(kind, devices), s.sent] for s in mine]) / seconds[:, None]
        scale = terms.max(0)  # seconds and seconds per byte differ by orders of magnitude
        latency, per_byte = nnls(terms / scale, np.ones(len(mine)))[0] / scale
        error = np.abs(terms @ (latency, per_byte) - 1).mean()
        # where times do not grow with the payload, the fastest sample is a lower bound of the bandwidth
        bandwidth = 1 / per_byte if per_byte > 0 else max(s.rate for s in mine)
        fits.append(LinkFit(kind, devices, float(latency), float(bandwidth), float(error), len(mine)))
    return fits
