"""Layers of a model that are loaded to the device one by one, each while the one before computes."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array

from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.nn import WeightFormat
from jaxscale.nn.weight_format import refuse_flaws
from jaxscale.parallel import Weight

Region = tuple[tuple[int, int], ...]
Tree = Any


class Source(Protocol):
    """Where arrays are while they are not on the device, as `jaxscale.train.checkpoints.read.Arrays`."""

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """Return regions of an array.

        Args:
          name: the array's path.
          regions: the regions, each (begin, end) for every dimension.
        """


class OnHost:
    """Arrays in the host's memory.

    Args:
      params: arrays by path.
    """

    def __init__(self, params: dict[str, np.ndarray]):
        self._params = params

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `Source`."""
        return {r: self._params[name][tuple(slice(*ends) for ends in r)] for r in regions}


class Encoded:
    """Parameters in another weight format, encoded on the host whenever they are read.

    Args:
      source: the parameters as they are stored, named by `prefix` and the path in their info.
      infos: a `TensorInfo` for each parameter of the model.
      weights: the format.
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
        """See `Source`; regions are whole arrays, or one repeat of a stack's."""
        return {region: self._read(name, region) for region in regions}

    def _read(self, name: str, region: Region) -> np.ndarray:
        info, number, shape = self._parts[name]
        stored: Region = tuple((0, n) for n in info.shape)
        if region != tuple((0, n) for n in shape):
            stored = (region[0], *stored[1:])
        if name == info.path:
            return self._source.read(self._prefix + name, [stored])[stored]
        if self._last[0] != (info.path, stored):  # a weight's arrays are read one after the other: encode it once
            kernel = self._source.read(self._prefix + info.path, [stored])[stored]
            with jax.default_device(jax.devices("cpu")[0]):
                encoded, flaws = _encode(self._weights, kernel, info.contracted)
            refuse_flaws(self._weights, info, flaws)
            self._last = (info.path, stored), [np.array(x) for x in jax.tree.leaves(encoded)]
        return self._last[1][number]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _encode(weights: WeightFormat, kernel: Array, contracted: tuple[int, ...]) -> tuple[Weight | Array, Array]:
    return weights.checked(kernel, contracted)


class Resident(NamedTuple):
    """Bytes of parameters on all devices together.

    Args:
      now: at this moment.
      peak: the most so far.
      bound: the most possible: what always stays, and the `window` neighbouring layers that are largest together.
      whole: of the whole model, without streaming.
    """

    now: int
    peak: int
    bound: int
    whole: int


class Layers:
    """A model's parameters: embedding, last norm and head stay on the device, layers are loaded when they compute.

    At most `window` repeats of a run's blocks are on the device: one computes while a thread loads the next ones (Li et
    al. 2024, TPI-LLM's sliding window of memory). More than two even out layers, or reads, of unlike times.

    Args:
      infos: a `TensorInfo` for each parameter.
      source: the parameters, named by `prefix` and the path in their info.
      layout: how they are sharded on the devices; `None` is the default device.
      prefix: of the source's names.
      window: the most layers on the device.

    Raises:
      ConfigError: the window is below 2, or holds all layers.
    """

    def __init__(self, infos: Tree, source: Source, layout: Layout | None = None, prefix: str = "", window: int = 2):
        self.infos, self._source, self._prefix, self.window = infos, source, prefix, window
        self._shardings = shardings_of(infos, layout)
        self._device = None if layout is not None else jax.devices()[0]
        self._lock, self._now, self._peak = threading.Lock(), 0, 0
        runs = list(infos["runs"])
        self.order = [(n, i) for n, name in enumerate(runs) for i in range(_repeats(infos["runs"][name]))]
        each = [_bytes(infos["runs"][runs[n]]) // _repeats(infos["runs"][runs[n]]) for n, _ in self.order]
        if window != 2 and not 2 <= window < len(each):
            raise ConfigError(
                f"a window of {window} streamed layers: must be 2{f' to {len(each) - 1}' if len(each) > 3 else ''}, "
                f"since this model is loaded in {len(each)} parts"
            )
        self.largest = max(sum((each + each)[i : i + window]) for i in range(len(each)))
        self._stays = {name: part for name, part in infos.items() if name != "runs"}
        shardings = None if self._shardings is None else {name: self._shardings[name] for name in self._stays}
        self.rest = self._put(self._stays, shardings, None)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxscale-layers")
        self._coming: deque[tuple[int, Future[Tree]]] = deque()

    @property
    def resident(self) -> Resident:
        """Bytes of parameters on the devices."""
        stays = _bytes(self._stays)
        with self._lock:
            return Resident(self._now, self._peak, stays + self.largest, _bytes(self.infos))

    def each(self) -> Iterator[tuple[int, int, Tree]]:
        """Yield the layers in order: the index of the run of blocks, the index of the repeat, and its parameters.

        Parameters have a leading dimension of 1. They are deleted when the next layer is requested: block until the
        computation with them is done before that.
        """
        for place, (run, repeat) in enumerate(self.order):
            params = self._take(place)
            for ahead in range(place + 1 + len(self._coming), place + self.window):
                self._coming.append((ahead % len(self.order), self._pool.submit(self._load, ahead)))
            try:
                yield run, repeat, params
            finally:
                self._delete(params)

    def close(self) -> None:
        """Delete all parameters on the devices, and end the thread."""
        self._forget()
        self._delete(self.rest)
        self._pool.shutdown()

    def _forget(self) -> None:
        while self._coming:
            self._delete(self._coming.popleft()[1].result())

    def _take(self, place: int) -> Tree:
        if self._coming and self._coming[0][0] == place:
            return self._coming.popleft()[1].result()
        self._forget()  # the previous pass was abandoned before its last layer
        return self._load(place)

    def _load(self, place: int) -> Tree:
        run, repeat = self.order[place % len(self.order)]
        name = list(self.infos["runs"])[run]
        shardings = None if self._shardings is None else self._shardings["runs"][name]
        return self._put(self.infos["runs"][name], shardings, repeat)

    def _put(self, infos: Tree, shardings: Tree | None, repeat: int | None) -> Tree:
        """Read arrays, or one repeat of a run's, and put them on the devices."""
        leaves, tree = jax.tree.flatten(infos)
        where = [self._device] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
        out = [
            info if self.elsewhere(info) else self.put(self._read(info, repeat), sharding)
            for info, sharding in zip(leaves, where, strict=True)
        ]
        jax.block_until_ready([x for x in out if not isinstance(x, TensorInfo)])
        return jax.tree.unflatten(tree, out)

    def put(self, array: np.ndarray, where: Any = None) -> Array:
        """Return an array on the devices, and count its bytes.

        Args:
          array: the array.
          where: a sharding or device; the default device by default.
        """
        out = jax.device_put(array, where)
        with self._lock:
            self._now += out.nbytes
            self._peak = max(self._peak, self._now)
        return out

    def elsewhere(self, info: TensorInfo) -> bool:
        """Return whether an array is not loaded with its layer: its `TensorInfo` is in its place.

        Args:
          info: of the array.
        """
        return False

    def _read(self, info: TensorInfo, *places: int | None) -> np.ndarray:
        """Read an array, or of its first dimensions one place each."""
        region = tuple((0, n) for n in info.shape)
        of = tuple((at, at + 1) for at in places if at is not None)
        region = (*of, *region[len(of) :])
        array = self._source.read(self._prefix + info.path, [region])[region]
        if array.dtype != np.dtype(info.dtype) or array.shape != tuple(b - a for a, b in region):
            raise CheckpointError(
                f"{info.path} is stored as {array.dtype}{list(array.shape)}, and the model needs "
                f"{np.dtype(info.dtype)}{[b - a for a, b in region]}"
            )
        return array

    def _delete(self, params: Tree) -> None:
        for x in jax.tree.leaves(params):
            if isinstance(x, TensorInfo):
                continue
            with self._lock:
                self._now -= x.nbytes
            x.delete()


def _repeats(run: Tree) -> int:
    return jax.tree.leaves(run)[0].shape[0]


def _bytes(infos: Tree) -> int:
    return sum(info.nbytes for info in jax.tree.leaves(infos))
