"""Export a run whose matrices are stored in few bits with their codes and scales, in another program's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxscale.errors import CheckpointError
from jaxscale.interop.companions import CONFIG
from jaxscale.interop.fields import Fields
from jaxscale.interop.kept import FACTS, Keep, tensors_as_kept
from jaxscale.interop.maps import Bound, Region
from jaxscale.interop.stored import FIELD, layout_of
from jaxscale.interop.stored.layout import Kind
from jaxscale.interop.stored.writing import kind_of, other_modules, same_kinds, written_as
from jaxscale.interop.write import Written
from jaxscale.nn.formats import ByName, Stored
from jaxscale.run import Run
from jaxscale.step.state import describe_model


def as_imported(run: Run, step: int, bound: list[Bound]) -> dict[str, Written]:
    """Return the tensors of a run whose quantised weights an import kept, as they were.

    Args:
      run: the run.
      step: the checkpoint's step.
      bound: a `Bound` per parameter.

    Raises:
      CheckpointError: no import kept weights in it.
    """
    facts, imported = run.info.get(FACTS), run.imported
    if not facts or imported is None or not isinstance(run.config.stored, ByName):
        raise CheckpointError(f"{run.place} has no quantised weights that an import kept; leave out --as-imported")
    layout, _ = layout_of(imported.config, str(imported.folder / CONFIG))
    infos = _infos(run)
    keeps = {}
    for b in bound:
        if b.name in facts:
            own = run.config.stored.of(infos[b.name])
            assert isinstance(own, Stored)
            keeps[b.name] = Keep(b, infos[b.name].contracted or (), Kind(**facts[b.name]), own)
    return tensors_as_kept(keeps, bound, layout, _reader(run, step))


def in_layout(
    run: Run, step: int, bound: list[Bound], method: str, dtype: str
) -> tuple[dict[str, Written], dict[str, Any]]:
    """Return the tensors of a quantised run in a layout of quantised weights, and its `quantization_config`.

    Args:
      run: the run.
      step: the checkpoint's step.
      bound: a `Bound` per parameter.
      method: the layout's `quant_method`, such as "compressed-tensors".
      dtype: of the parameters that are written.

    Raises:
      CheckpointError: an unknown method; the run's matrices are plain arrays; the layout does not hold their format.
    """
    layout, stored = written_as(method), run.config.stored
    if stored is None:
        raise CheckpointError(
            f"{run.place} stores its matrices as plain arrays; quantise it first: jaxscale quantize {run.place} OUT "
            f"--recipe '@GPTQ(weights=@{layout.nearest(4)}())', or leave out --as {method}"
        )
    infos, keeps = _infos(run), {}
    for b in bound:
        info = infos[b.name]
        if info.contracted is not None and stored.covers(info):
            own = stored.of(info)
            kind = kind_of(own, b, info, dtype, layout)
            assert isinstance(own, Stored)
            keeps[b.name] = Keep(b, info.contracted, kind, own)
    kinds = {name: keep.kind for name, keep in keeps.items()}
    symmetric = not any(keep.format.zeros for keep in keeps.values())
    about = layout.settings(same_kinds(kinds, bound), other_modules(kinds, bound), symmetric)
    made = layout(Fields(about, FIELD))
    return tensors_as_kept(keeps, bound, made, _reader(run, step)), about


def _infos(run: Run) -> dict[str, Any]:
    return {i.path: i for i in jax.tree.leaves(describe_model(run.config.model)[1])}


def _reader(run: Run, step: int) -> Callable[[str, Region], np.ndarray]:
    arrays = run.checkpoints.arrays(step)
    return lambda name, region: arrays.read(f"params/{name}", [region])[region]
