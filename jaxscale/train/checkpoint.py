"""Checkpoints: global arrays by name, written by the processes that hold them, restored onto any layout."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.errors import CheckpointError
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.tensors import path_name
from jaxscale.optim import convert_state, is_quantized
from jaxscale.train.state import TrainState
from pallas_kernels.blockwise import Quantized

log = logging.getLogger("jaxscale")

Tree = Any
SCHEMA = 1


class Checkpoints:
    """The checkpoints of one run, in `folder/<step>/`, written in the background by Orbax.

    A checkpoint is a flat dict of global arrays, `params/embed/weight`, `opt_state/...`, `rng`, `step`, and a manifest
    with each one's shape, dtype and logical axes. Kept are the newest `keep`, and every one whose step is a multiple
    of `keep_every`. One that was not finished has another name and is never picked up.

    Args:
      folder: made when the first one is saved.
      keep: how many of the newest stay.
      keep_every: steps that stay for good, or `None`.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3, keep_every: int | None = None):
        self.folder = Path(folder).absolute()
        self._keep, self._keep_every = keep, keep_every
        self._manager_: Any = None

    @property
    def _manager(self) -> Any:
        if self._manager_ is None:
            import orbax.checkpoint as ocp  # heavy; only when there is something to read or write

            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._keep, keep_period=self._keep_every, create=True, enable_async_checkpointing=True
            )
            self._manager_ = ocp.CheckpointManager(self.folder, options=options)
        return self._manager_

    def steps(self) -> list[int]:
        """Steps with a finished checkpoint, ascending."""
        if not self.folder.is_dir():
            return []
        # Orbax renames a finished checkpoint to its number; the manifest is part of it
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdigit() and (p / "manifest").is_dir())

    def save(self, state: TrainState, infos: Tree, about: dict[str, Any]) -> None:
        """Starts writing `state`; returns once its arrays may be overwritten.

        Args:
          state: what to save, under the name of its step.
          infos: a `TensorInfo` per parameter.
          about: JSON-able facts that go into the manifest.

        Raises:
          CheckpointError: an earlier save failed in the background, or this one cannot start.
        """
        import orbax.checkpoint as ocp

        arrays = flatten(state)
        manifest = {"schema": SCHEMA, "leaves": _leaves(state, arrays, infos), **about}
        step = int(state.step)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(arrays=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(manifest)),
                force=True,
            )
        except (OSError, ValueError, RuntimeError) as e:
            raise CheckpointError(f"could not write checkpoint {step} into {self.folder}: {_first_line(e)}") from e

    def wait(self) -> None:
        """Blocks until everything is on disk.

        Raises:
          CheckpointError: a save failed in the background.
        """
        if self._manager_ is None:
            return
        try:
            self._manager_.wait_until_finished()
            self._manager_.check_for_errors()
        except Exception as e:  # whatever the writing thread met
            raise CheckpointError(f"a checkpoint could not be written into {self.folder}: {_first_line(e)}") from e

    def close(self) -> None:
        """Waits, and lets go of the writing threads."""
        self.wait()
        if self._manager_ is not None:
            self._manager_.close()
            self._manager_ = None

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a checkpoint.

        Raises:
          CheckpointError: it is missing, unreadable, or of a newer schema.
        """
        path = self.folder / str(step) / "manifest" / "metadata"
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError) as e:
            raise CheckpointError(f"checkpoint {step} in {self.folder} has no readable manifest: {e}") from e
        if manifest.get("schema", 0) > SCHEMA:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} has schema {manifest['schema']}, and this version reads up to "
                f"{SCHEMA}; update jaxscale"
            )
        return manifest

    def restore(
        self, step: int, state: TrainState, shardings: TrainState | None, say: Callable[[str], None] = log.info
    ) -> TrainState:
        """The state of a step, onto the layout of `shardings`.

        Optimizer state that was saved in 32 bits and is wanted in 8, the other way round, or in other blocks, is
        converted; `say` is told.

        Args:
          step: which checkpoint.
          state: shapes and dtypes, as `Blueprint.abstract_state()` gives.
          shardings: a sharding per array, or `None` for the default device.
          say: takes a sentence for the user.

        Raises:
          CheckpointError: arrays are missing, extra or of another shape or dtype; all are listed, nothing is loaded.
        """
        saved = self.manifest(step)["leaves"] if step in self.steps() else {}
        stored, places = _as_saved(state, shardings, saved)
        want = flatten(stored)
        got = self._read(step, want, flatten(places) if places else dict.fromkeys(want, _default_sharding()), "")
        got["rng"] = jax.random.wrap_key_data(got["rng"])
        treedef: Any
        paths, treedef = jax.tree_util.tree_flatten_with_path(stored)
        restored = jax.tree.unflatten(treedef, [got[path_name(path)] for path, _ in paths])
        dtypes = [[x.dtype for x in jax.tree.leaves(s.opt_state)] for s in (stored, state)]
        if dtypes[0] == dtypes[1] and treedef == jax.tree.structure(state):
            return restored
        say(f"checkpoint {step} keeps its optimizer state in another precision or other blocks; it was converted")
        there = shardings.opt_state if shardings else None
        convert = jax.jit(lambda s: convert_state(s, state.opt_state), out_shardings=there)
        return dataclasses.replace(restored, opt_state=convert(restored.opt_state))

    def restore_params(self, step: int, infos: Tree, layout: Layout | None) -> Tree:
        """The parameters alone, onto any layout.

        Raises:
          CheckpointError: as `restore`.
        """
        params = jax.tree.map(lambda i: jax.ShapeDtypeStruct(i.shape, i.dtype), infos)
        want = {f"params/{path_name(p)}": x for p, x in jax.tree_util.tree_leaves_with_path(params)}
        placed = shardings_of(infos, layout)
        where = dict.fromkeys(want, _default_sharding())
        if placed is not None:
            where = {f"params/{path_name(p)}": s for p, s in jax.tree_util.tree_leaves_with_path(placed)}
        got = self._read(step, want, where, "params/")
        return jax.tree.unflatten(jax.tree.structure(params), [got[name] for name in want])

    def _read(self, step: int, want: dict[str, Any], where: dict[str, Any], prefix: str) -> dict[str, jax.Array]:
        import orbax.checkpoint as ocp

        if step not in self.steps():
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"there is no finished checkpoint {step} in {self.folder}; finished are: {have}")
        saved = self.manifest(step)["leaves"]
        _check_same({k: v for k, v in saved.items() if k.startswith(prefix)}, want, f"checkpoint {step}")
        targets = {k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where[k]) for k, x in want.items()}
        args = ocp.args.PyTreeRestore(
            item=targets,
            restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
            partial_restore=bool(prefix),
        )
        path = self.folder / str(step) / "arrays"
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                return reader.restore(path, args=args)
        except Exception as e:  # Orbax and TensorStore raise many kinds
            raise CheckpointError(f"checkpoint {step} in {self.folder} cannot be read: {_first_line(e)}") from e


def flatten(state: Any) -> dict[str, Any]:
    """A state (of arrays, shapes or shardings) as a flat dict by name; the random key as its data."""
    out = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        elif isinstance(leaf, jax.ShapeDtypeStruct) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        out[path_name(path)] = leaf
    return out


def _leaves(state: TrainState, arrays: dict[str, Any], infos: Tree) -> dict[str, Any]:
    axes = {f"params/{i.path}": i.axes for i in jax.tree.leaves(infos)}
    leaves: dict[str, dict[str, Any]] = {
        name: {"shape": list(x.shape), "dtype": np.dtype(x.dtype).name, "axes": list(axes.get(name, ())) or None}
        for name, x in arrays.items()
    }
    for path, q in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_quantized):
        if is_quantized(q):
            how = {"tile": list(q.tile), "format": q.format, "signed": q.signed}
            leaves[f"{path_name(path)}/codes"]["quantized"] = how
    return leaves


def _as_saved(
    state: TrainState, shardings: TrainState | None, saved: dict[str, Any]
) -> tuple[TrainState, TrainState | None]:
    """`state` and `shardings` with the optimizer's leaves in the precision a manifest says they were saved in."""
    structure: Any
    leaves, structure = jax.tree_util.tree_flatten_with_path(state.opt_state, is_leaf=is_quantized)
    places = structure.flatten_up_to(shardings.opt_state) if shardings else [None] * len(leaves)
    new_leaves, new_places = [], []
    for (path, leaf), place in zip(leaves, places, strict=True):
        name = f"opt_state/{path_name(path)}"
        home = place.codes if is_quantized(place) else place  # scales are cut as the codes are
        how = saved.get(f"{name}/codes", {}).get("quantized")
        if name in saved and (is_quantized(leaf) or _other_float(leaf, saved[name])):
            leaf, place = jax.ShapeDtypeStruct(leaf.shape, np.dtype(saved[name]["dtype"])), home
        elif how is not None and (not is_quantized(leaf) or tuple(how["tile"]) != leaf.tile
                                  or how["format"] != leaf.format):  # fmt: skip
            parts = (saved[f"{name}/codes"], saved[f"{name}/scales"])
            shapes: Any = [jax.ShapeDtypeStruct(tuple(x["shape"]), np.dtype(x["dtype"])) for x in parts]
            leaf = Quantized(shapes[0], shapes[1], tuple(how["tile"]), how["format"], how["signed"])
            place = dataclasses.replace(leaf, codes=home, scales=_uncut(home))
        new_leaves.append(leaf)
        new_places.append(place)
    stored = dataclasses.replace(state, opt_state=structure.unflatten(new_leaves))
    if shardings is None:
        return stored, None
    return stored, dataclasses.replace(shardings, opt_state=structure.unflatten(new_places))


def _other_float(leaf: Any, saved: dict[str, Any]) -> bool:
    """Whether an array was saved as another float: moments are of their parameter's dtype, or float32 beside 8 bits."""
    dtype = np.dtype(saved["dtype"])
    return leaf.dtype != dtype and all(jnp.issubdtype(d, jnp.floating) for d in (leaf.dtype, dtype))


def _uncut(sharding: Any) -> Any:
    """Whole on every device: blocks of another size need not divide as these do."""
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec())


def _check_same(saved: dict[str, Any], want: dict[str, Any], what: str) -> None:
    wrong = [f"{k} is missing" for k in want if k not in saved]
    wrong += [f"{k} is not in the model" for k in saved if k not in want]
    for k in want:
        if k in saved:
            a, b = (tuple(saved[k]["shape"]), saved[k]["dtype"]), (tuple(want[k].shape), np.dtype(want[k].dtype).name)
            if a != b:
                wrong.append(f"{k} is {a[1]}{list(a[0])}, the model has {b[1]}{list(b[0])}")
    if wrong:
        more = f", and {len(wrong) - 12} more" if len(wrong) > 12 else ""
        raise CheckpointError(f"{what} does not fit this model and optimizer: {'; '.join(wrong[:12])}{more}")


def _default_sharding() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _first_line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0]
