"""Layers that `quantize` has finished, in a folder, and the arrays of the run that it writes of them."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.convert.recipes import Recipe
from jaxscale.infer.streaming.layers import Source
from jaxscale.layout import TensorInfo
from jaxscale.layout.tensors import Tree, path_name
from jaxscale.nn.weight_format import refuse_flaws
from jaxscale.train.checkpoints.chunks import Region


class FinishedLayers:
    """Finished layers in a folder beside the new run, until it is written.

    Args:
      path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path

    def begin(self, mark: str, say: Callable[[str], None]) -> None:
        """Remove the layers of another mark; to be called by the holder of the folder's lock.

        Args:
          mark: identifies recipe, run and data.
          say: prints a line.
        """
        about = self.path / "mark.json"
        if about.is_file() and about.read_text() == mark:
            return
        layers = [x for x in self.path.iterdir() if x.is_dir()]
        if layers:
            say(f"{self.path} is of another recipe, run or data; its layers are quantised again")
        for folder in layers:
            shutil.rmtree(folder)
        about.write_text(mark)

    def has(self, run: int, repeat: int) -> bool:
        """Return whether a layer is finished."""
        return (self.path / f"{run}-{repeat}").is_dir()

    def write(self, run: int, repeat: int, params: Tree) -> None:
        """Write a layer's arrays: all of them, or none."""
        unfinished = self.path / f"{run}-{repeat}.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            file = unfinished / path_name(path).replace("/", ".")
            with file.open("wb") as f:
                f.write(np.ascontiguousarray(np.asarray(x)).tobytes())
                f.flush()
                os.fsync(f.fileno())
        unfinished.rename(self.path / f"{run}-{repeat}")

    def array(self, run: int, repeat: int, name: str, info: TensorInfo) -> np.ndarray:
        """Return an array of a layer, with a leading dimension of 1.

        Args:
          run: the run.
          repeat: of its group.
          name: path within the run.
          info: the array of all layers.
        """
        data = np.fromfile(self.path / f"{run}-{repeat}" / name.replace("/", "."), np.uint8)
        return data.view(np.dtype(info.dtype)).reshape(1, *info.shape[1:])

    def read(self, run: int, repeat: int, infos: Tree) -> Tree:
        """Return a layer's parameters.

        Args:
          run: the run.
          repeat: of its group.
          infos: a `TensorInfo` for each array of the run.
        """
        return jax.tree_util.tree_map_with_path(lambda p, i: self.array(run, repeat, path_name(p), i), infos)

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.path)


class QuantizedArrays:
    """The arrays of the new run, by the names of a checkpoint: finished layers, and what is as it was.

    Args:
      work: finished layers.
      source: the parameters of the old run.
      prefix: of the source's names.
      recipe: how matrices outside of layers are rounded, if the format covers any.
      infos: a `TensorInfo` for each parameter of the model.
      stored: a `TensorInfo` for each array of the new run.
    """

    def __init__(self, work: FinishedLayers, source: Source, prefix: str, recipe: Recipe, infos: Tree, stored: Tree):
        self._work, self._source, self._prefix, self._recipe = work, source, prefix, recipe
        self._layers: dict[str, tuple[int, str, TensorInfo]] = {}
        self._other: dict[str, TensorInfo] = {}
        for n, (name, part) in enumerate(stored.get("runs", {}).items()):
            for path, info in jax.tree_util.tree_leaves_with_path(part):
                self._layers[f"params/runs/{name}/{path_name(path)}"] = (n, path_name(path), info)
        for info in jax.tree.leaves({k: v for k, v in infos.items() if k != "runs"}):
            if info.contracted is not None and recipe.format.covers(info):
                for part in jax.tree.leaves(recipe.format.infos(info)):
                    self._other[f"params/{part.path}"] = info

    def read(self, name: str, regions: Iterable[Region]) -> dict[Region, np.ndarray]:
        """See `jaxscale.train.checkpoints.read.Arrays`."""
        return {region: self._read(name, region) for region in regions}

    def _read(self, name: str, region: Region) -> np.ndarray:
        inner = tuple(slice(*ends) for ends in region)
        if name in self._layers:
            run, path, info = self._layers[name]
            layers = [self._work.array(run, n, path, info)[:, *inner[1:]] for n in range(*region[0])]
            return np.concatenate(layers)
        if name in self._other:
            return self._rounded(self._other[name])[name][inner]
        source = self._prefix + name.removeprefix("params/")
        return self._source.read(source, [region])[region]

    @functools.lru_cache(1)  # noqa: B019  (the object lives as long as the call)
    def _rounded(self, info: TensorInfo) -> dict[str, np.ndarray]:
        assert info.contracted is not None
        whole: Region = tuple((0, n) for n in info.shape)
        kernel = jnp.asarray(self._source.read(self._prefix + info.path, [whole])[whole])
        own = self._recipe.of(info)
        weight = own.quantize(kernel, info.contracted)
        refuse_flaws(own.format, info, own.format.flaws(kernel, weight))
        parts = jax.tree.leaves(self._recipe.format.infos(info))
        return {f"params/{p.path}": np.asarray(x) for p, x in zip(parts, jax.tree.leaves(weight), strict=True)}

    def faults(self) -> Iterator[str]:
        """See `jaxscale.train.checkpoints.read.Arrays`: none."""
        yield from ()
