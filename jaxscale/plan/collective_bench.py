"""Collectives timed over message sizes and numbers of devices, and what a link's latency and bandwidth are by that.

The sweep is that of cluster studies (row 160; Anthony et al. 2025, arXiv 2511.17127): each collective, payloads from
kilobytes up, the time fitted by latency x steps + bytes sent / bandwidth of the ring algorithms.
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
    """One collective of one size, timed.

    Args:
      kind: one of `KINDS`.
      devices: how many took part.
      payload: bytes, as `Collective.payload` counts them: what an all-gather gives, what the others are given.
      seconds: the median of its repeats.
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
        """Its fields and its rate."""
        return dataclasses.asdict(self) | {"bytes_per_second": self.rate}


@dataclasses.dataclass(frozen=True)
class LinkFit:
    """What explains the times of one collective over its sizes.

    Args:
      kind: of the collective.
      devices: how many took part.
      latency: seconds per step of the ring.
      bandwidth: bytes/s that a device sends.
      error: the mean of |predicted / measured - 1|.
      samples: how many sizes it is fitted on.
    """

    kind: str
    devices: int
    latency: float
    bandwidth: float
    error: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        """Its fields."""
        return dataclasses.asdict(self)


def steps(kind: str, devices: int) -> int:
    """How many times a ring passes something on."""
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
    """Times collectives on the devices here.

    Args:
      payloads: bytes of each message; rounded up to what divides into the devices.
      kinds: of `KINDS`.
      counts: numbers of devices, of which the first so many take part; all of them by default.
      rounds, timer: as `clock`.
      say: told what is being timed.

    Raises:
      LayoutError: an unknown kind, or a number of devices that are not here.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise LayoutError(f"there is no collective '{kind}'{near(kind, KINDS)}")
    found, payloads = [], list(payloads)
    for count in counts or (jax.device_count(),):
        if not 2 <= count <= jax.device_count():
            raise LayoutError(f"collectives of {count} devices cannot be timed on {jax.device_count()}; give 2 or more")
        mesh = Mesh(np.array(jax.devices()[:count]), (_AXIS,), axis_types=(AxisType.Auto,))
        for kind in kinds:
            say(f"{kind} of {count} devices")
            found += [_sample(kind, mesh, payload, rounds, timer) for payload in payloads]
    return found


def _sample(kind: str, mesh: Mesh, payload: int, rounds: int, timer: Callable[[], float]) -> Sample:
    count = mesh.size
    each = 4 * count * math.ceil(payload / (4 * count))  # floats that every device cuts into as many pieces
    given = each // count if kind == "all-gather" else each
    spec = PartitionSpec(_AXIS)
    x = jax.jit(lambda: jnp.ones((count, given // 4), jnp.float32), out_shardings=NamedSharding(mesh, spec))()
    fn = jax.jit(jax.shard_map(_run(kind, count), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    timing = clock(fn, x, rounds=rounds, timer=timer)
    return Sample(kind, count, each, timing.seconds, timing.spread)


def _run(kind: str, count: int) -> Callable[[jax.Array], jax.Array]:
    """What one device does with its row."""
    ring = [(i, (i + 1) % count) for i in range(count)]
    return {
        "all-reduce": lambda x: jax.lax.psum(x, _AXIS),
        "all-gather": lambda x: jax.lax.all_gather(x, _AXIS, axis=1, tiled=True),
        "reduce-scatter": lambda x: jax.lax.psum_scatter(x, _AXIS, scatter_dimension=1, tiled=True),
        "all-to-all": lambda x: jax.lax.all_to_all(x, _AXIS, 1, 1, tiled=True),
        "collective-permute": lambda x: jax.lax.ppermute(x, _AXIS, ring),
    }[kind]


def fit(samples: Sequence[Sample]) -> list[LinkFit]:
    """Latency and bandwidth of every kind and number of devices: least squares on the relative error.

    Raises:
      LayoutError: fewer than three sizes of one of them.
    """
    from scipy.optimize import nnls

    found = []
    for kind, devices in sorted({(s.kind, s.devices) for s in samples}):
        mine = [s for s in samples if (s.kind, s.devices) == (kind, devices)]
        if len(mine) < 3:
            raise LayoutError(f"latency and bandwidth of {kind} are fitted on 3 sizes or more, not on {len(mine)}")
        seconds = np.array([s.seconds for s in mine])
        terms = np.array([[steps(kind, devices), s.sent] for s in mine]) / seconds[:, None]
        scale = terms.max(0)  # seconds and seconds per byte are of unlike size
        latency, per_byte = nnls(terms / scale, np.ones(len(mine)))[0] / scale
        error = np.abs(terms @ (latency, per_byte) - 1).mean()
        # where times do not grow with the size, the fastest of them is what is known of the bandwidth
        bandwidth = 1 / per_byte if per_byte > 0 else max(s.rate for s in mine)
        found.append(LinkFit(kind, devices, float(latency), float(bandwidth), float(error), len(mine)))
    return found
