"""Where a run's first parameters come from, when not from random numbers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.config import register
from jaxscale.errors import CheckpointError, ConfigError
from jaxscale.layout import Layout, TensorInfo, path_name, shardings_of
from jaxscale.step.state import describe_model
from jaxscale.train.run import RunFolder

log = logging.getLogger("jaxscale")

Tree = Any


@register
@dataclasses.dataclass(frozen=True)
class FromRun:
    """The parameters of another run's checkpoint: one of our own, or an imported one (`jaxscale import`).

    They are read straight to the shards of the layout in force. The model's shapes have to be those of that run; its
    number type need not be.

    Args:
      path: the run folder.
      step: which checkpoint; `None` is the newest, and the new run writes down which one it was.

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
        """The run.

        Raises:
          RunError: it is not there.
        """
        run = RunFolder(Path(self.path).expanduser())
        _ = run.info
        return run

    def settled(self) -> FromRun:
        """With the checkpoint's step and the folder's whole path, so that it means the same tomorrow.

        Raises:
          RunError: there is no such run, or it has no checkpoint.
        """
        run = self.run
        step = run.last_step() if self.step is None else run.checkpoints.manifest(self.step)["step"]
        return FromRun(str(run.path.absolute()), step)

    def check(self, infos: Tree) -> None:
        """That the run's model has these parameters; reads none.

        Raises:
          RunError: there is no such run.
          CheckpointError: listing those that are missing, extra or of another shape.
        """
        theirs = _by_name(describe_model(self.run.config.model)[1])
        ours = _by_name(infos)
        wrong = [f"{name} is missing there" for name in ours if name not in theirs]
        wrong += [f"{name} is not in this model" for name in theirs if name not in ours]
        wrong += [
            f"{name} is {list(theirs[name].shape)} there and {list(i.shape)} here"
            for name, i in ours.items()
            if name in theirs and theirs[name].shape != i.shape
        ]
        if wrong:
            more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
            raise CheckpointError(
                f"the model of {self.path} is not this one: {'; '.join(wrong[:8])}{more}; leave out train.model, and "
                "it is that run's"
            )

    def params(self, infos: Tree, layout: Layout | None) -> Tree:
        """The parameters, in the types of `infos`, each device its shards.

        Raises:
          CheckpointError: see `check`, and `Checkpoints.restore`.
        """
        self.check(infos)
        found = self.run.params(self.step, layout)
        narrowed = [i.path for x, i in zip(*map(jax.tree.leaves, (found, infos)), strict=True) if _narrower(x, i)]
        if narrowed:
            log.info("%s and %d more are rounded to a narrower type", narrowed[0], len(narrowed) - 1)
        placed = shardings_of(infos, layout)
        leaves, structure = jax.tree.flatten(found)
        del found
        wanted = jax.tree.leaves(infos)
        where = [None] * len(wanted) if placed is None else jax.tree.leaves(placed)
        for n, (info, to) in enumerate(zip(wanted, where, strict=True)):  # one by one: no two whole copies at a time
            if leaves[n].dtype != info.dtype:
                leaves[n] = jax.jit(lambda x, d=info.dtype: x.astype(d), out_shardings=to)(leaves[n])
        return jax.tree.unflatten(structure, leaves)

    def fingerprint(self) -> str:
        """Hex, of the values in the checkpoint, by the digests in its manifest."""
        run = self.settled().run
        manifest = run.checkpoints.manifest(run.last_step() if self.step is None else self.step)
        leaves = {n: [x["shape"], x["dtype"], x.get("files")] for n, x in manifest["leaves"].items() if "params/" in n}
        said = json.dumps([leaves, manifest.get("start")], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()

    def about(self) -> dict[str, Any]:
        """What `run.json` says of it."""
        return {"run": self.path, "step": self.step, "id": self.run.info.get("id"), "fingerprint": self.fingerprint()}


def _by_name(infos: Tree) -> dict[str, TensorInfo]:
    return {path_name(path): i for path, i in jax.tree_util.tree_leaves_with_path(infos)}


def _narrower(x: Any, info: TensorInfo) -> bool:
    return jnp.finfo(x.dtype).nmant > jnp.finfo(info.dtype).nmant
