"""Quantise a run: a new run whose checkpoint holds the matrices of its layers in few bits."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.buckets import is_url
from jaxscale.convert.calibration import Calibration, batches_of, observable, widest_of
from jaxscale.convert.folding import Fold, folds_of
from jaxscale.convert.pretrained import write_run
from jaxscale.convert.quantized_layers import FinishedLayers, QuantizedArrays
from jaxscale.convert.recipes import Cost, Folding, Inputs, Recipe, output_error
from jaxscale.convert.recipes.base import as_matrix
from jaxscale.data import Corpus, HFTokenizer
from jaxscale.errors import ConfigError, RunError
from jaxscale.infer.streaming.layers import Layers, OnHost, Source
from jaxscale.layout import Layout, TensorInfo, shardings_of
from jaxscale.layout.tensors import Tree, path_name
from jaxscale.models import ModelConfig
from jaxscale.nn.weight_format import refuse_flaws
from jaxscale.run import Run
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.state import describe_model
from jaxscale.train.folders import is_new, lock
from jaxscale.train.run import HF

log = logging.getLogger("jaxscale")


def quantize(
    run: Run,
    out: str | Path,
    recipe: Recipe,
    *,
    data: Corpus | None = None,
    rows: int = 64,
    batch: int = 8,
    step: int | None = None,
    layout: Layout | None = None,
    say: Callable[[str], None] = log.warning,
) -> Run:
    """Write a run whose matrices are rounded by a recipe; embedding, output head, norms and biases stay as they are.

    Layers are rounded one after the other, and a recipe with calibration sees the outputs of the layers that are
    rounded already. One layer's parameters are on the devices at a time, and the hidden states of the calibration
    tokens in host memory. If it is interrupted, the same call continues after the last finished layer and writes the
    same bytes.

    Args:
      run: a run with a checkpoint; with adapters, they are merged.
      out: the new folder.
      recipe: how matrices are rounded.
      data: calibration text, in place of the run's own corpus.
      rows: calibration rows of the run's `seq_len` tokens.
      batch: rows that are computed at once.
      step: the checkpoint's step; the newest by default.
      layout: where to compute; the default device by default. It is also the new run's.
      say: prints a line.

    Returns:
      the new run.

    Raises:
      ConfigError: the run is quantised already; the recipe does not fit the model.
      DataError: there is too little calibration data.
      CheckpointError: a matrix has numbers that the format cannot hold, or a checkpoint cannot be read.
      RunError: `out` exists already or is in a bucket, or `run` has no checkpoint.
    """
    if run.config.stored is not None:
        raise ConfigError(
            f"{run.place} is quantised already, as {run.config.stored.describe()}; "
            "name the run that it was made from, or write "
            f"plain arrays first with jaxscale merge {run.place} OUT"
        )
    if is_url(out):
        raise RunError(f"{out} is in a bucket, and this run is written to a disk; name a folder, and copy it later")
    if jax.process_count() > 1:
        raise RunError("only one process can quantise; run it on one host, into a folder that all hosts share")
    path, step = Path(out), run.last_step() if step is None else step
    occupied = path.exists() and not (path.is_dir() and is_new(path))
    if occupied and not _unfinished(path):
        raise RunError(f"{out} already exists; name another folder")
    infos = describe_model(run.config.model)[1]
    recipe.infos(infos)  # raises if the format does not fit
    recipe.model(run.config.model)  # likewise
    batches = []
    if recipe.reads_inputs:
        observable(run.config.model)
        batches = batches_of(run.config, data, rows, batch, widest_of(infos))
    source, prefix = _source(run, step)
    made = {"run": str(run.path.absolute()), "id": run.info.get("id"), "step": step, "recipe": repr(recipe)}
    written = run.checkpoints.manifest(step).get("time")
    mark = json.dumps([made, written, rows, batch, repr(data), str(layout), _digest(batches)])
    made["digest"] = hashlib.sha256(mark.encode()).hexdigest()[:16]
    if occupied and (Run(path).info.get("quantized") or {}).get("digest") != made["digest"]:
        raise RunError(
            f"{out} holds an unfinished run that was not quantised with this recipe, run and data; remove it, or name "
            "another folder"
        )
    work = FinishedLayers(path.parent / f".{path.name}.quantizing")
    with _alone(work.path, out):
        work.begin(mark, say)
        if recipe.reads_inputs and "runs" in infos:
            with_costs = functools.partial(_costs, run.config, recipe, infos, source, prefix, batches, layout, say)
            recipe = recipe.settled(with_costs)
        stored = recipe.format.infos(infos)
        if "runs" in infos:
            _quantize_layers(run.config, recipe, work, Layers(infos, source, layout, prefix), batches, layout, say)
        config = _settings(run, path, recipe, layout)
        arrays = QuantizedArrays(work, source, prefix, recipe, infos, stored)
        facts = {"source": str(run.path.absolute()), "quantized": made}
        hf = run.path / HF if run.imported is not None else None
        done = write_run(path, config, arrays, hf=hf, facts=facts, mark=mark, status="quantized", say=say)
    work.remove()
    return done


@contextlib.contextmanager
def _alone(folder: Path, out: str | Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder)
    except RunError:
        raise RunError(f"{out} is being written by another process; wait for it, or name another folder") from None
    with held:
        yield


def _unfinished(path: Path) -> bool:
    with contextlib.suppress(RunError):
        return bool(Run(path).info.get("status") == "importing")
    return False


def _settings(run: Run, path: Path, recipe: Recipe, layout: Layout | None) -> TrainConfig:
    model, form = recipe.model(run.config.model), recipe.format
    config = dataclasses.replace(run.config, model=model, start=None, adapters=None, stored=form, layout=layout)
    if run.imported is not None and isinstance(config.tokenizer, HFTokenizer):
        file = str((path / HF / "tokenizer.json").absolute())
        config = dataclasses.replace(config, tokenizer=dataclasses.replace(config.tokenizer, path=file))
    return config


def _source(run: Run, step: int) -> tuple[Source, str]:
    """Return the run's parameters: its checkpoint's files, or arrays in host memory if they have to be computed."""
    blueprint, _ = blueprint_of(dataclasses.replace(run.config, layout=None))
    part = None if run.config.adapters is not None else blueprint.algorithm.weights_in(blueprint)
    if part is not None:
        return run.checkpoints.arrays(step), f"{part}/"
    with jax.default_device(jax.devices("cpu")[0]):
        params = run.params(step)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return OnHost({path_name(p): np.array(x) for p, x in leaves}), ""


def _digest(batches: list[Any]) -> str:
    total = hashlib.sha256()
    for b in batches:
        for name in sorted(b):
            total.update(name.encode() + b[name].tobytes())
    return total.hexdigest()


def _costs(
    config: TrainConfig,
    recipe: Recipe,
    infos: Tree,
    source: Source,
    prefix: str,
    batches: list[Any],
    layout: Layout | None,
    say: Callable[[str], None],
) -> dict[str, Cost]:
    """Return what rounding each matrix would lose, from the inputs of the model as it is."""
    layers, losses = Layers(infos, source, layout, prefix), dict[str, float]()
    graphdef, _ = describe_model(observable(config.model))
    calibration, numbers = Calibration(graphdef, infos, batches, layout), _numbers_of(layers, config.model)
    names = list(infos["runs"])
    of_path = {i.path: i for i in jax.tree.leaves(infos) if i.contracted is not None and recipe.format.covers(i)}
    try:
        calibration.begin(layers.rest)
        for number, (run, repeat, params) in enumerate(layers.each(), 1):
            leaves = {path_name(p): x for p, x in jax.tree_util.tree_leaves_with_path(params)}
            inputs = calibration.inputs(run, repeat, params, [n for n in leaves if f"runs/{names[run]}/{n}" in of_path])
            for name, own in inputs.items():
                info = of_path[f"runs/{names[run]}/{name}"]
                each = [recipe.cost(k, info, i) for k, i in own.each(leaves[name][0]) if i is not None]
                losses[info.path] = losses.get(info.path, 0.0) + sum(each)
            if number < len(layers.order):
                calibration.advance(run, repeat, params)
            say(f"costs of {_said(numbers, run, repeat)}")
    finally:
        layers.close()
    unseen = [path for path in of_path if path not in losses]
    if unseen:
        raise ConfigError(
            f"{type(recipe).__name__} has no inputs of {unseen[0]} to weigh it by; use a recipe with one "
            "number of bits, such as GPTQ()"
        )
    return {path: Cost(loss, of_path[path].size) for path, loss in losses.items()}


def _numbers_of(layers: Layers, model: ModelConfig) -> dict[tuple[int, int], range]:
    """Return the numbers, from 1, of the model's layers that have the matrices of each run's repeats."""
    sizes = [len(run["blocks"]) * getattr(model, "uses", 1) for run in layers.infos["runs"].values()]
    ends = itertools.accumulate(sizes[run] for run, _ in layers.order)
    return {place: range(end - sizes[place[0]] + 1, end + 1) for place, end in zip(layers.order, ends, strict=True)}


def _said(numbers: dict[tuple[int, int], range], run: int, repeat: int) -> str:
    own, total = numbers[run, repeat], max(r[-1] for r in numbers.values())
    return f"layer {own[0]} of {total}" if len(own) == 1 else f"layers {own[0]} to {own[-1]} of {total}"


def _quantize_layers(
    config: TrainConfig,
    recipe: Recipe,
    work: FinishedLayers,
    layers: Layers,
    batches: list[Any],
    layout: Layout | None,
    say: Callable[[str], None],
) -> None:
    infos, numbers = layers.infos, _numbers_of(layers, config.model)
    missing = [place for place in layers.order if not work.has(*place)]
    if missing:
        rows = sum(len(next(iter(b.values()))) for b in batches)
        after = f" after {rows} calibration rows are embedded" if recipe.reads_inputs else ""
        count, total = (sum(len(numbers[place]) for place in places) for places in (missing, layers.order))
        say(f"{count} of {total} layers are to be rounded{after}; the first one also compiles")
    calibration, graphdef = None, None
    if recipe.reads_inputs:
        graphdef, _ = describe_model(observable(config.model))
        calibration = Calibration(graphdef, infos, batches, layout)
        calibration.begin(layers.rest)
    names = list(infos["runs"])
    stored = recipe.format.infos(infos)
    try:
        if not missing:
            return
        for number, (run, repeat, params) in enumerate(layers.each(), 1):
            began, what = time.monotonic(), _said(numbers, run, repeat)
            of_run = infos["runs"][names[run]]
            if not work.has(run, repeat):
                one = _Layer(recipe, of_run, run, repeat, calibration, layout)
                with layout if layout is not None else contextlib.nullcontext():
                    weights, share = one.quantized(params, layers.infos, graphdef)
                if number == 1 and one.unseen:
                    say(f"no inputs of {', '.join(one.unseen)} are recorded; they are rounded to nearest")
                work.write(run, repeat, weights)
                error = f"squared error of the outputs {share:.3%} of their square, " if share is not None else ""
                say(f"{what}: {error}{time.monotonic() - began:.1f} s")
            else:
                say(f"{what}: done before")
            if calibration is not None and (run, repeat) < missing[-1]:
                shardings = shardings_of(stored["runs"][names[run]], layout)
                weights = work.read(run, repeat, stored["runs"][names[run]])
                calibration.advance(run, repeat, weights if shardings is None else jax.device_put(weights, shardings))
    finally:
        layers.close()


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """One repeat of a run's group of blocks, to be rounded.

    Args:
      recipe: how.
      infos: a `TensorInfo` for each of the run's parameters.
      run: number of the run.
      repeat: of its group.
      calibration: the calibration tokens, or `None`.
      layout: where to compute.
      unseen: the matrices that are rounded without the statistics which the recipe reads.
    """

    recipe: Recipe
    infos: Tree
    run: int
    repeat: int
    calibration: Calibration | None
    layout: Layout | None
    unseen: list[str] = dataclasses.field(default_factory=list)

    def quantized(self, params: Tree, infos: Tree, graphdef: Any) -> tuple[Tree, float | None]:
        """Return the weights, with a leading dimension of 1, and the share of the outputs' square that is error."""
        kernels = {
            path_name(p): i
            for p, i in jax.tree_util.tree_leaves_with_path(self.infos)
            if i.contracted is not None and self.recipe.format.covers(i)
        }
        inputs: dict[str, Inputs] = {}
        if self.calibration is not None:
            inputs = self.calibration.inputs(self.run, self.repeat, params, list(kernels))
            self.unseen.extend(name for name in kernels if name not in inputs)
            if isinstance(self.recipe, Folding):
                params, inputs = self._folded(self.recipe, params, inputs, infos, graphdef)
        wrong = total = 0.0

        def one(path: tuple[Any, ...], kernel: Any) -> Any:
            nonlocal wrong, total
            name = path_name(path)
            if name not in kernels:
                return kernel
            info, own = kernels[name], inputs.get(name)
            assert info.contracted is not None
            kernel = self._by_outputs(kernel, info)
            if own is None:
                weight = self.recipe.of(info).quantize(kernel, info.contracted)
            else:
                singles = []
                for matrix, seen in own.each(kernel[0]):
                    singles.append(self.recipe.of(info).quantize(matrix, info.contracted, seen))
                    if seen is not None:
                        error, square = _errors(matrix, singles[-1], seen, info.contracted)
                        wrong, total = wrong + float(error), total + float(square)
                together = jax.tree.map(lambda *x: jnp.stack(x), *singles)
                weight = together if own.second.ndim == 2 else jax.tree.map(lambda x: x[None], together)
            form = self.recipe.of(info).format
            refuse_flaws(form, info, form.flaws(kernel, weight))
            return weight

        weights = jax.tree_util.tree_map_with_path(one, params)
        return weights, wrong / total if total else None

    def _by_outputs(self, kernel: jax.Array, info: TensorInfo) -> jax.Array:
        """Return a kernel of which each device has whole columns: inputs are rounded one after the other."""
        if self.layout is None or info.contracted is None:
            return kernel
        inputs = {d % len(info.shape) for d in info.contracted}
        axes = tuple(None if d in inputs else a for d, a in enumerate(info.axes))
        return jax.device_put(kernel, shardings_of(dataclasses.replace(info, axes=axes), self.layout))

    def _folded(
        self, recipe: Folding, params: Tree, inputs: dict[str, Inputs], infos: Tree, graphdef: Any
    ) -> tuple[Tree, dict[str, Inputs]]:
        params = {**params, "blocks": dict(params["blocks"])}
        model: Any = nnx.merge(graphdef, infos)
        for n, block in enumerate(model.runs[self.run].blocks):
            key = list(params["blocks"])[n]
            for fold in folds_of(block, params["blocks"][key]):
                if recipe.only_norms and len(fold.before) > 1:
                    continue
                of_block = params["blocks"][key]
                paths = [f"blocks/{key}/{'/'.join(path)}/kernel" for path in fold.kernels]
                own = inputs.get(paths[0])
                if own is None or any(inputs.get(p) is not own for p in paths):
                    continue  # something else reads these inputs
                params["blocks"][key] = self._with_factors(recipe, fold, of_block, own, paths, inputs)
        return params, inputs

    def _with_factors(
        self, recipe: Folding, fold: Fold, block: Tree, own: Inputs, paths: list[str], inputs: dict[str, Inputs]
    ) -> Tree:
        """Return a block with the factors of a fold, and put the statistics of the inputs after it in place."""
        kernels, width = [], 1
        for path in fold.kernels:
            kernel = functools.reduce(lambda t, k: t[k], path, block)["kernel"]
            inputs_of = [d for d in range(1, kernel.ndim) if np.prod(kernel.shape[1:d]) < len(own.mean)]
            width = kernel.shape[inputs_of[-1]]
            kernels.append(kernel[0].astype(jnp.float32).reshape(len(own.mean), -1))
        by = recipe.factors(kernels, own, fold.repeats, width)
        changed = own.scaled(1 / by)
        inputs.update(dict.fromkeys(paths, changed))
        return fold.applied(block, by)


@functools.partial(jax.jit, static_argnums=3)
def _errors(kernel: Any, weight: Any, inputs: Inputs, contracted: tuple[int, ...]) -> tuple[Any, Any]:
    matrix = as_matrix(kernel, contracted)
    return output_error(as_matrix(weight.dense(), contracted) - matrix, inputs), output_error(matrix, inputs)
