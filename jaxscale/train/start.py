"""Start a run from the parameters of another one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.buckets import is_url
from jaxscale.config import register
from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.layout import Layout, TensorInfo, path_name, shardings_of
from jaxscale.models.with_head import BACKBONE, HEAD
from jaxscale.nn import WeightFormat
from jaxscale.step.state import describe_model
from jaxscale.step.stored import is_weight
from jaxscale.train.run import RunFolder
from jaxscale.working_copy import url_of

log = logging.getLogger("jaxscale")

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class FromRun:
    """Start from the parameters of another run's checkpoint, trained here or imported (`jaxscale import`).

    Each device reads its own shards. The models must have the same shapes; dtypes may differ. If this run's model is
    `@WithHead()` and that run's is its backbone alone, the head begins as zeros.

    Args:
      path: the run folder, or its URL in a bucket.
      step: the checkpoint's step; `None` is the newest, whose step the new run records.

    Raises:
      ConfigError: the path is empty.
    """

    path: str
    step: int | None = None

    def __post_init__(self) -> None:
        if not str(self.path):
            raise ConfigError("FromRun.path is empty; name a run folder, such as 'runs/qwen3'")

    @property
    def run(self) -> RunFolder:
        """The run whose parameters are used.

        Raises:
          RunError: it does not exist.
        """
        run = RunFolder(self.path if is_url(self.path) else Path(self.path).expanduser())
        _ = run.info
        return run

    def settled(self) -> FromRun:
        """Return a copy with the checkpoint's step and the folder's absolute path, which later runs can rely on.

        Raises:
          RunError: there is no such run, or it has no checkpoint.
        """
        run = self.run
        step = run.last_step() if self.step is None else run.checkpoints.manifest(self.step)["step"]
        return FromRun(url_of(run.path) or str(run.path.absolute()), step)

    def check(self, infos: Tree) -> None:
        """Check that the run's model has the parameters of `infos`, without reading them.

        Args:
          infos: a `TensorInfo` per parameter.

        Raises:
          RunError: there is no such run.
          CheckpointError: parameters are missing, extra or of another shape; the message lists them.
        """
        stored = describe_model(self.run.config.model)[1]
        theirs, ours = _by_name(stored), _by_name(_shared(infos, stored))
        wrong = [f"{name} is missing there" for name in ours if name not in theirs]
        wrong += [f"{name} is not in this model" for name in theirs if name not in ours]
        wrong += [
            f"{name} is {list(theirs[name].shape)} there and {list(i.shape)} here"
            for name, i in ours.items()
            if name in theirs and theirs[name].shape != i.shape
        ]
        if wrong:
            more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            setting = "train.model" if _shared(infos, stored) is infos else "WithHead.backbone"
            raise CheckpointError(
                f"the model of {self.path} is not this one: {'; '.join(wrong[:8])}{more}; leave out {setting} to use "
                "that run's model"
            )

    def params(self, infos: Tree, layout: Layout | None, *, stored: WeightFormat | None = None) -> Tree:
        """Return the parameters with the dtypes of `infos`, sharded by `layout`.

        Args:
          infos: a `TensorInfo` per parameter.
          layout: where to place them; `None` is the default device.
          stored: a weight format; if the run stores its matrices in it, they are returned as `Weight`s.

        Raises:
          CheckpointError: see `check`, and `Checkpoints.restore`.
        """
        self.check(infos)
        run = self.run
        as_stored = stored is not None and stored == run.config.stored
        params = run.weights(self.step, layout) if as_stored else run.params(self.step, layout)
        whole, infos = infos, _shared(infos, params)
        leaves, structure = jax.tree.flatten(params, is_leaf=is_weight)
        del params
        targets = jax.tree.leaves(infos)
        narrowed = [i.path for x, i in zip(leaves, targets, strict=True) if not is_weight(x) and _narrower(x, i)]
        if narrowed:
            log.info("%s and %d more are rounded to a narrower dtype", narrowed[0], len(narrowed) - 1)
        placed = shardings_of(infos, layout)
        where = [None] * len(targets) if placed is None else jax.tree.leaves(placed)
        for n, (info, to) in enumerate(zip(targets, where, strict=True)):  # one by one, to hold one extra array at most
            if not is_weight(leaves[n]) and leaves[n].dtype != info.dtype:
                leaves[n] = jax.jit(lambda x, d=info.dtype: x.astype(d), out_shardings=to)(leaves[n])
        params = jax.tree.unflatten(structure, leaves)
        return params if infos is whole else {BACKBONE: params, HEAD: _zeros(whole[HEAD], layout)}

    def fingerprint(self) -> str:
        """Return a hex SHA-256 over the digests of the checkpoint's parameters."""
        run = self.settled().run
        manifest = run.checkpoints.manifest(run.last_step() if self.step is None else self.step)
        leaves = {n: [x["shape"], x["dtype"], x.get("files")] for n, x in manifest["leaves"].items() if "params/" in n}
        text = json.dumps([leaves, manifest.get("start")], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def about(self) -> dict[str, Any]:
        """Return the entry "start" of the new run's `run.json`."""
        return {"run": self.path, "step": self.step, "id": self.run.info.get("id"), "fingerprint": self.fingerprint()}


def _by_name(infos: Tree) -> dict[str, TensorInfo]:
    return {path_name(path): i for path, i in jax.tree_util.tree_leaves_with_path(infos)}


def _shared(infos: Tree, theirs: Tree) -> Tree:
    """Return the backbone's part if `infos` are of a model with a head (`WithHead`) and `theirs` are not, else all."""
    return infos[BACKBONE] if set(infos) == {BACKBONE, HEAD} and BACKBONE not in theirs else infos


def _zeros(infos: Tree, layout: Layout | None) -> Tree:
    def make() -> Tree:
        return jax.tree.map(lambda i: jnp.zeros(i.shape, i.dtype), infos)

    return jax.jit(make, out_shardings=shardings_of(infos, layout))()


def _narrower(x: jax.Array, info: TensorInfo) -> bool:
    return jnp.finfo(x.dtype).nmant > jnp.finfo(info.dtype).nmant
