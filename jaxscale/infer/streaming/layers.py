"""Layers of a model that come to the device one after the other, each while the one before computes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.nn import WeightFormat

Region = tuple[tuple[int, int], ...]
Tree = Any


class Source(Protocol):
    """Where arrays are while they are not on the device; `jaxscale.train.checkpoints.read.Arrays` is one."""

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """Regions of an array, (from, to) of each dimension."""


class OnHost:
    """Arrays in the host's memory.

    Args:
      params: by path.
    """

    def __init__(self, params: dict[str, np.ndarray]):
        self._params = params

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Source`."""
        return {r: self._params[name][tuple(slice(*ends) for ends in r)] for r in regions}


class Encoded:
    """Parameters in another form, encoded on the host whenever they are read: a source does not have this form.

    Args:
      source: of the parameters as they are, by the infos' paths behind `prefix`.
      infos: the model's, a `TensorInfo` for each parameter.
      weights: the form.
      prefix: of the source's names.
    """

    def __init__(self, source: Source, infos: Tree, weights: WeightFormat, prefix: str = ""):
        self._source, self._weights, self._prefix = source, weights, prefix
        self._parts = {
            part.path: (info, n, part.shape)
            for info in jax.tree.leaves(infos)
            for n, part in enumerate(jax.tree.leaves(weights.infos(info)))
        }
        self._last: tuple[Any, list[np.ndarray]] = None, []

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Source`; regions are whole arrays, or one copy of a stack's."""
        return {region: self._read(name, region) for region in regions}

    def _read(self, name: str, region: Region) -> np.ndarray:
        info, number, shape = self._parts[name]
        wanted: Region = tuple((0, n) for n in info.shape)
        if region != tuple((0, n) for n in shape):
            wanted = (region[0], *wanted[1:])
        if name == info.path:
            return self._source.read(self._prefix + name, [wanted])[wanted]
        if self._last[0] != (info.path, wanted):  # a weight's arrays are read one after the other
            kernel = self._source.read(self._prefix + info.path, [wanted])[wanted]
            with jax.default_device(jax.devices("cpu")[0]):
                made = _encode(self._weights, kernel, info.contracted)
            self._last = (info.path, wanted), [np.array(x) for x in jax.tree.leaves(made)]
        return self._last[1][number]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encode(weights: WeightFormat, kernel: Any, contracted: tuple[int, ...]) -> Any:
    return weights.encode(kernel, contracted)


class Resident(NamedTuple):
    """Bytes of parameters on the devices, over all of them.

    Args:
      now: at this moment.
      peak: the most so far.
      bound: what `peak` cannot pass: what always stays, and the two largest layers next to each other.
      whole: what the model takes when nothing is streamed.
    """

    now: int
    peak: int
    bound: int
    whole: int


class Layers:
    """A model's parameters, of which embedding, last norm and head stay on the device and layers come and go.

    At most two copies of a run's group are there: one that computes, and one that a thread brings meanwhile (Li et al.
    2024, TPI-LLM's sliding window of memory).

    Args:
      infos: a `TensorInfo` for each parameter.
      source: where they are, by the infos' paths behind `prefix`.
      layout: onto which devices each is brought; `None` is the default one.
      prefix: of the source's names.
    """

    def __init__(self, infos: Tree, source: Source, layout: Layout | None = None, prefix: str = ""):
        self.infos, self._source, self._prefix = infos, source, prefix
        self._placed = shardings_of(infos, layout)
        self._device = None if layout is not None else jax.devices()[0]
        self._lock, self._now, self._peak = threading.Lock(), 0, 0
        runs = list(infos["runs"])
        self.order = [(n, i) for n, name in enumerate(runs) for i in range(_copies(infos["runs"][name]))]
        each = [_bytes(infos["runs"][runs[n]]) // _copies(infos["runs"][runs[n]]) for n, _ in self.order]
        self.largest = max(a + b for a, b in zip(each, each[1:] + each[:1], strict=True))
        self._stays = {name: part for name, part in infos.items() if name != "runs"}
        placed = None if self._placed is None else {name: self._placed[name] for name in self._stays}
        self.rest = self._bring(self._stays, placed, None)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxscale-layers")
        self._coming: tuple[int, Future[Tree]] | None = None

    @property
    def resident(self) -> Resident:
        """How much is on the devices."""
        stays = _bytes(self._stays)
        with self._lock:
            return Resident(self._now, self._peak, stays + self.largest, _bytes(self.infos))

    def each(self) -> Iterator[tuple[int, int, Tree]]:
        """The layers in order: the run, which copy of its group, and its parameters, with a leading dimension of 1.

        What was given is deleted when the next is asked for: whoever uses it has to have waited for the result.
        """
        for place, (run, copy) in enumerate(self.order):
            params = self._take(place)
            self._coming = ((place + 1) % len(self.order), self._pool.submit(self._load, place + 1))
            try:
                yield run, copy, params
            finally:
                self._forget(params)

    def close(self) -> None:
        """Lets go of everything."""
        if self._coming is not None:
            self._forget(self._coming[1].result())
            self._coming = None
        self._forget(self.rest)
        self._pool.shutdown()

    def _take(self, place: int) -> Tree:
        if self._coming is not None:
            at, coming = self._coming
            self._coming = None
            if at == place:
                return coming.result()
            self._forget(coming.result())  # a pass was left before its end
        return self._load(place)

    def _load(self, place: int) -> Tree:
        run, copy = self.order[place % len(self.order)]
        name = list(self.infos["runs"])[run]
        return self._bring(self.infos["runs"][name], None if self._placed is None else self._placed["runs"][name], copy)

    def _bring(self, infos: Tree, placed: Tree | None, copy: int | None) -> Tree:
        """Reads arrays, or a copy of a group's, and puts them on the devices."""
        leaves, tree = jax.tree.flatten(infos)
        where = [self._device] * len(leaves) if placed is None else jax.tree.leaves(placed)
        out = []
        for info, home in zip(leaves, where, strict=True):
            out.append(jax.device_put(self._read(info, copy), home))
            with self._lock:
                self._now += out[-1].nbytes
                self._peak = max(self._peak, self._now)
        jax.block_until_ready(out)
        return jax.tree.unflatten(tree, out)

    def _read(self, info: TensorInfo, copy: int | None) -> np.ndarray:
        region = tuple((0, n) for n in info.shape)
        if copy is not None:
            region = ((copy, copy + 1), *region[1:])
        found = self._source.read(self._prefix + info.path, [region])[region]
        if found.dtype != np.dtype(info.dtype) or found.shape != tuple(b - a for a, b in region):
            raise CheckpointError(
                f"{info.path} is {found.dtype}{list(found.shape)} where it is kept, and the model's is "
                f"{np.dtype(info.dtype)}{[b - a for a, b in region]}"
            )
        return found

    def _forget(self, params: Tree) -> None:
        for x in jax.tree.leaves(params):
            with self._lock:
                self._now -= x.nbytes
            x.delete()


def _copies(run: Tree) -> int:
    return jax.tree.leaves(run)[0].shape[0]


def _bytes(infos: Tree) -> int:
    return sum(info.nbytes for info in jax.tree.leaves(infos))
