"""`RunFolder`: a run as a folder of config, metrics and checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxscale import config as gin_config
from jaxscale import digests
from jaxscale.buckets import is_url
from jaxscale.data import HFTokenizer, Tokenizer
from jaxscale.errors import AlteredFile, ConfigError, RunError, near
from jaxscale.interop import Companions, copy_companions
from jaxscale.interop.links import check_links
from jaxscale.layout import Layout, shardings_of
from jaxscale.layout.tensors import Tree
from jaxscale.step.blueprint import blueprint_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.rates import parameter_count
from jaxscale.step.state import TrainState, describe_model
from jaxscale.step.stored import as_arrays, stored_infos
from jaxscale.step.texts import text_ids
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.checkpoints.staged import StagedCheckpoints
from jaxscale.train.files import CONFIG, INFO, list_files, read_gin, read_json, write_gin
from jaxscale.train.metrics import read_metrics
from jaxscale.train.plot import plot_loss
from jaxscale.version import __version__
from jaxscale.working_copy import Mirror, NoMirror, as_named, inside, local, url_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxscale.nn import WeightFormat

HF = "hf"
"""Subfolder of a run with the files of an imported checkpoint: config.json, tokenizer.json, chat template and so on."""


class RunFolder:
    """A run's folder; `jaxscale.Run` is one that can also generate text.

    `config.gin` rebuilds the run's settings, `run.json` records versions, hardware and data, `metrics.jsonl` has one
    line per step, `checkpoints/` the training states, `loss.png` the loss curve.

    Args:
      path: the folder, or its URL in a bucket (`s3://` or `gs://`).
      config: the run's settings; read from `config.gin` if omitted.
      state: the last training state, if it is in memory.

    Attributes:
      path: the folder; of a run in a bucket its working copy, which has all but the checkpoints.
      mirror: uploads the working copy during training.
      stopped_by: the signal, such as "SIGTERM", that stopped training in this process before the last step.
    """

    def __init__(self, path: str | Path, config: TrainConfig | None = None, state: TrainState | None = None):
        self.path = local(path)
        self.mirror: Mirror | NoMirror = NoMirror()
        self._config = config
        self.state = state
        self.stopped_by: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place!r})"

    @property
    def place(self) -> str:
        """The run's folder as a user names it: its URL if it is in a bucket."""
        return as_named(self.path)

    @property
    def is_main(self) -> bool:
        """Whether this is process 0, which writes and prints."""
        return jax.process_index() == 0

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The run's settings.

        Raises:
          RunError: the folder is not a run, or its settings could not be written as text.
        """
        return self._config if self._config is not None else read_config(self.path)

    @property
    def info(self) -> dict[str, Any]:
        """The content of `run.json`.

        Raises:
          RunError: there is no `run.json`, or it cannot be read.
          AlteredFile: it is not what was written.
        """
        try:
            return read_json(self.path / INFO)
        except OSError as e:
            why = f"it has no readable run.json ({e.strerror})" if self.path.exists() else "it does not exist"
            raise RunError(f"{self.place} is not a run folder: {why}{_near_run(self.path)}") from None

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints."""
        keep: Any = {"keep": self.config.keep, "keep_every": self.config.keep_every}
        own = checkpoints_in(self.path, **keep, before_publish=self.mirror.flush)
        staging = self.config.staging
        if staging is None or url_of(self.path) is None:
            return own
        return StagedCheckpoints(own, staging, **keep)

    @property
    def imported(self) -> Companions | None:
        """The files of an imported checkpoint (tokenizer, chat template); `None` if the run has none.

        Raises:
          AlteredFile: one of the files is not what was written.
          CheckpointError: one of them is a link out of the folder.
        """
        if not (self.path / HF).is_dir():
            return None
        check_links(self.path / HF)
        digests.check(self.path, [name for name in digests.listed(self.path) if name.startswith(f"{HF}/")])
        return Companions(self.path / HF)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: an imported checkpoint's own, else the one in the settings.

        Raises:
          DataError: an imported checkpoint has no tokenizer.
        """
        imported = self.imported
        return self.config.tokenizer if imported is None else imported.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a completion; none if an imported checkpoint names none and has no tokenizer.

        Raises:
          DataError: a file of an imported checkpoint names something else than ids.
        """
        imported = self.imported
        return (self.config.tokenizer.eos_id,) if imported is None else imported.end_ids

    def prompt_ids(self, prompt: str) -> np.ndarray:
        """Return the int32 token ids of a prompt: the id that starts a document, then those of the text.

        Args:
          prompt: the text.

        Raises:
          ConfigError: an id is outside of the model's vocabulary.
          DataError: the text cannot be encoded.
        """
        imported = self.imported
        return text_ids(self.config, prompt, None if imported is None else imported.prompt_ids(prompt))

    def as_left(self, config: TrainConfig) -> TrainConfig:
        """Return `config` with the run's own copy of the tokenizer, if the tokenizer file in `config` no longer exists.

        Args:
          config: settings of this run.
        """
        own, used = self.imported, config.tokenizer
        if own is None or not isinstance(used, HFTokenizer) or is_url(used.path) or Path(used.path).exists():
            return config
        return dataclasses.replace(config, tokenizer=own.tokenizer)

    def metrics(self) -> list[dict[str, Any]]:
        """Return a dict per step: `step`, `loss`, `grad_norm`, `lr`, `tokens_per_second`, `time`, some `eval_loss`.

        A run that went on from a checkpoint has several lines of the steps after it; the last one is returned.
        """
        return read_metrics(self.path / "metrics.jsonl")

    def plot(self, path: str | Path | None = None) -> Figure:
        """Plot the loss.

        Args:
          path: a PNG to write, if any.

        Returns:
          the matplotlib figure.
        """
        return plot_loss(self.metrics(), f"{self.path.name}", None if path is None else Path(path))

    def params(self, step: int | None = None, layout: Layout | None = None) -> Tree:
        """Return the model's parameters: those in memory, else those of a checkpoint.

        These are the parameters that the run's algorithm evaluates (see `Algorithm.weights`; for a schedule-free
        optimizer an average). For a run with adapters they are the parameters of the run it started from, with the
        adapters merged into them; matrices in a weight format are converted to plain arrays (see `weights`).

        Args:
          step: the checkpoint's step; by default the parameters in memory, else the newest checkpoint that is not
            damaged.
          layout: where to place them; by default on the default device, or where they are if they are in memory.

        Returns:
          a tree of `jax.Array`s.

        Raises:
          CheckpointError: there is no such checkpoint.
          LayoutError: the layout does not fit the parameters.
        """
        if self.config.adapters is not None:
            return self._with_adapters(step, self.config.layout if self.state is not None and not layout else layout)
        if self.config.stored is not None:
            _, infos = describe_model(self.config.model)
            whole = functools.partial(as_arrays, infos=infos)
            return jax.jit(whole, out_shardings=shardings_of(infos, layout))(self.weights(step, layout))
        return self.trained(step, layout)

    def weights(self, step: int | None = None, layout: Layout | None = None, part: WeightFormat | None = None) -> Tree:
        """Return the model's parameters as the checkpoint holds them: with `train.stored`, matrices are `Weight`s.

        Args:
          step: as in `params`.
          layout: as in `params`.
          part: a format whose arrays are some of those that the run stores, such as that of `FewerBlocks`; only these
            are read.

        Returns:
          a tree of `jax.Array`s and `jaxscale.nn.Weight`s; of a run without `train.stored` that of `params`.
        """
        if self.config.stored is None:
            return self.params(step, layout)
        if step is None:
            self.last_step()  # raises if there is no checkpoint
        if part is not None:
            return self.some_weights(part.infos(describe_model(self.config.model)[1]), step, layout)
        return self.checkpoints.restore_params(step, stored_infos(self.config), layout)

    def some_weights(self, infos: Tree, step: int | None = None, layout: Layout | None = None) -> Tree:
        """Return some of the arrays that a checkpoint of a run with `train.stored` holds.

        Args:
          infos: a tree with a `TensorInfo` for each of them, and `None` for the others.
          step: as in `params`.
          layout: as in `params`.
        """
        return self.checkpoints.restore_params(step, infos, layout, some=True)

    def _with_adapters(self, step: int | None, layout: Layout | None) -> Tree:
        blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=layout))
        adaptation = blueprint.adaptation
        assert adaptation is not None
        frozen = blueprint.own(blueprint.read_frozen() if self.state is None else self.state.frozen)
        if self.state is not None and layout != self.config.layout:
            frozen = jax.device_put(frozen, shardings_of(adaptation.base, layout))
        placed = shardings_of(adaptation.infos, layout)
        return jax.jit(adaptation.merged, out_shardings=placed)(self.trained(step, layout), frozen)

    def model(self, step: int | None = None) -> nnx.Module:
        """Return the model as an `nnx.Module` with parameters of this run; raises as `params`.

        Args:
          step: as in `params`.
        """
        graphdef, _ = describe_model(self.config.model)
        return nnx.merge(graphdef, self.params(step))

    def trained(self, step: int | None = None, layout: Layout | None = None) -> Tree:
        """Return the parameters that were trained, which are the model's or its adapters; raises as `params`.

        Args:
          step: as in `params`.
          layout: as in `params`.
        """
        if self.state is not None and step is None:
            live = self.config.algorithm.weights(self.state)
            if layout is None or layout == self.config.layout:
                return live
            blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=layout))
            return jax.device_put(live, shardings_of(blueprint.infos, layout))
        if step is None:
            self.last_step()  # raises if there is no checkpoint
        blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=layout))
        part = blueprint.algorithm.weights_in(blueprint)
        if part is not None:
            return self.checkpoints.restore_params(step, blueprint.infos, layout, part=part)
        state = self.checkpoints.restore(step, blueprint.abstract_state(), blueprint.shardings())
        return blueprint.algorithm.weights(state)

    def last_step(self) -> int:
        """Return the step of the newest finished checkpoint.

        Raises:
          RunError: there is no finished checkpoint yet.
        """
        steps = self.checkpoints.steps()
        if not steps:
            raise RunError(f"{self.place} has no finished checkpoint yet; train it until it writes one")
        return steps[-1]


def bring_companions(source: RunFolder, to: RunFolder) -> None:
    """Copy the files of an imported checkpoint to a run that starts from it, if both have the same tokenizer.

    Args:
      source: the run with the imported checkpoint.
      to: the run that starts from it.
    """
    own = source.imported
    if own is not None and own.tokenizer.fingerprint == to.config.tokenizer.fingerprint:
        take_companions(source.path / HF, to.path)


def take_companions(folder: Path, run: Path) -> None:
    """Copy a Hugging Face checkpoint's tokenizer, chat template and so on into a run folder, and write their digests.

    Args:
      folder: the Hugging Face checkpoint.
      run: the run folder.
    """
    names = copy_companions(folder, run / HF)
    list_files(run, [f"{HF}/{name}" for name in names])


def checkpoints_in(path: str | Path, **settings: Any) -> Checkpoints:
    """Return the checkpoints in a run's folder; loading one of another run raises an error.

    Args:
      path: the run folder, or its URL in a bucket.
      **settings: arguments of `Checkpoints`, such as `keep`.

    Raises:
      AlteredFile: `run.json` is not what was written.
    """
    path = local(path)
    try:
        own = RunFolder(path).info.get("id")
    except AlteredFile:
        raise
    except RunError:  # run.json is not written yet, or lost: accept any checkpoint
        own = None
    return Checkpoints(inside(path, "checkpoints"), run=own, **settings)


def _near_run(path: Path) -> str:
    """For a folder that does not exist: `; did you mean 'runs/demo-1'?`, if there is a similar one beside it."""
    runs = [] if path.exists() else [str(info.parent) for info in path.parent.glob(f"*/{INFO}")]
    hint = near(str(path), runs)
    return hint if "did you mean" in hint else ""


def read_config(path: str | Path, bindings: Sequence[str] = (), *, replaced: Collection[str] = ()) -> TrainConfig:
    """Read a run's settings from its `config.gin`, without importing modules or changing gin's current config.

    Args:
      path: the run folder, or its URL in a bucket.
      bindings: gin bindings that override settings; the scope of one may be left out where a single object of the run
        has the setting.
      replaced: settings that the caller replaces, which need not be in `config.gin`.

    Raises:
      RunError: the folder is not a run, or a setting could not be written as text.
      AlteredFile: `config.gin` is not what was written.
      ConfigError: `config.gin` does not fit this version, or a binding is not used.
    """
    path = local(path)
    file = path / CONFIG
    if not file.is_file():
        why = "it has no config.gin" if path.exists() else "it does not exist"
        raise RunError(f"{as_named(path)} is not a run folder: {why}{_near_run(path)}")
    try:
        text = read_gin(file)
    except OSError as e:
        raise RunError(f"{as_named(file)} cannot be read: {e.strerror}") from None
    from_python = gin_config.lost(text)
    lost = [name for name in from_python if name.split(".")[1:2] and name.split(".")[1] not in replaced]
    if lost:
        raise RunError(
            f"{as_named(file)} does not hold {', '.join(lost)}, which came from Python; resume the run from Python "
            f"with jaxscale.fit({lost[0].split('.')[1]}=..., run={as_named(path)!r}, resume=True)"
        )
    known = [line.partition(" =")[0] for line in text.splitlines() if " = " in line]

    def called(bindings: Sequence[str]) -> tuple[object, list[str]]:
        """Return the settings, and which of `bindings` nothing reads."""
        with gin_config.isolated():
            options = {"allow_imports": False, "partial": bool(from_python)}
            try:
                if (new := _with_new_settings(text)) != text:
                    gin_config.load([], [new, *bindings], **options)
                else:
                    gin_config.load([file], bindings, **options)
            except ConfigError as e:
                if "registered" not in str(e):
                    raise
                raise ConfigError(f"{e}; if you wrote it, import its module: {_imports(path)}") from None
            config, names = gin_config.call("train"), {_named(b) for b in bindings}
            # settings of a part that `bindings` replaces may be left over
            return config, [name for name in gin_config.unused() if not bindings or name in names]

    config, unread = called(bindings)
    scoped = {name: [one for one in known if one.endswith(f"/{name}")] for name in unread}
    if unread and all(len(names) == 1 for names in scoped.values()):
        # `Transformer.depth` can only be `model/Transformer.depth`, unless another model takes the place of that one
        full = [f"{scoped.get(_named(b), [_named(b)])[0]} = {b.partition('=')[2]}" for b in bindings]
        config, still = called(full)
        unread = unread if still else []
    if unread:
        tail = unread[0].rsplit("/", 1)[-1]
        same = [name for name in known if name.endswith(f"/{tail}")]
        hint = f"; in this run it is called {' or '.join(same)}" if same else near(unread[0], known)
        raise ConfigError(f"nothing in {as_named(file)} reads the binding {unread[0]}{hint}")
    return config  # type: ignore[return-value]


def _named(binding: str) -> str:
    """Return what a binding sets, such as `train.lr`."""
    return binding.partition("=")[0].strip()


_OLD_LOSS = re.compile(r"^train\.(loss|z_loss) =", re.MULTILINE)
_OLD_TENSORBOARD = re.compile(r"^train\.tensorboard = (\w+)$", re.MULTILINE)


def _with_new_settings(text: str) -> str:
    """The text of a `config.gin` with today's settings in the place of those of earlier versions."""
    if _OLD_LOSS.search(text):  # before objectives
        text = _OLD_LOSS.sub(r"NextToken.\1 =", text) + "\ntrain.objective = @NextToken()\n"
    tracker = {"True": "train.trackers = (@TensorBoard(),)"}  # None: where tensorboardX was installed
    return _OLD_TENSORBOARD.sub(lambda old: tracker.get(old[1], ""), text)


def _imports(path: Path) -> str:
    """Command-line options that import a run's own modules; never imported by us, since a run may come from anybody."""
    try:
        modules = RunFolder(path).info["imports"]
    except (RunError, KeyError, TypeError):
        modules = []
    named = isinstance(modules, list) and all(
        isinstance(m, str) and m.replace(".", "_").isidentifier() for m in modules
    )
    return " ".join(f"--import {m}" for m in modules) if named and modules else "--import ITS_MODULE"


def write_config(path: Path, config: TrainConfig, step: int) -> list[str]:
    """Write `config.gin`; an existing one that differs is renamed to `config.until-<step>.gin`.

    Args:
      path: the run folder.
      config: the settings.
      step: the step that the new settings start from.

    Returns:
      the settings that could not be written as text.
    """
    text = gin_config.dumps("train", config.values())
    file = path / CONFIG
    before = read_gin(file) if file.exists() else text
    if before != text:
        write_gin(path / f"config.until-{step}.gin", before)
    write_gin(file, text)
    return gin_config.lost(text)


def about(config: TrainConfig, data_fingerprint: str) -> dict[str, Any]:
    """Return the facts about machine, versions and data that `run.json` records."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    devices = jax.devices()
    layout = config.layout
    return {
        "jaxscale": __version__,
        "versions": {"python": platform.python_version(), **{p: importlib.metadata.version(p) for p in packages}},
        "hardware": {
            "platform": devices[0].platform,
            "device": devices[0].device_kind,
            "devices": len(devices),
            "processes": jax.process_count(),
            "host": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
        },
        "layout": None if layout is None else {"mesh": layout.sizes, "rules": str(layout)},
        "flags": {k: os.environ[k] for k in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS") if k in os.environ},
        "command": sys.argv,
        "imports": gin_config.own_modules(gin_config.dumps("train", config.values())),
        "seed": config.seed,
        "data": {"corpus": config.data.name, "fingerprint": data_fingerprint},
        "parameters": parameter_count(config),
        "loss": config.objective.describe(config),
    }
