"""A run is a folder: what was trained, how, and what came out."""

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
from typing import Any

import jax
from flax import nnx

from jaxscale import config as gin_config
from jaxscale import digests
from jaxscale.data import HFTokenizer, Tokenizer
from jaxscale.errors import AlteredFile, ConfigError, RunError, near
from jaxscale.interop import Companions, copy_companions
from jaxscale.interop.links import check_links
from jaxscale.layout import Layout, shardings_of
from jaxscale.step.config import TrainConfig
from jaxscale.step.prepare import blueprint_of
from jaxscale.step.rates import parameter_count
from jaxscale.step.state import TrainState, describe_model
from jaxscale.step.texts import text_ids
from jaxscale.train.checkpoints import Checkpoints
from jaxscale.train.files import CONFIG, INFO, list_files, read_gin, read_json, write_gin
from jaxscale.train.metrics import read_metrics
from jaxscale.train.plot import plot_loss
from jaxscale.version import __version__

HF = "hf"
"""Of a run folder, what came with an imported checkpoint: config.json, tokenizer.json, chat template and their like."""


class RunFolder:
    """A run's folder; `jaxscale.Run` is one that also generates.

    `config.gin` rebuilds the run's settings, `run.json` says where and with what it ran, `metrics.jsonl` has a line
    a step, `checkpoints/` its states, `loss.png` its picture.

    Args:
      path: the folder.
      config: its settings, when they are at hand; else they are read from `config.gin`.
      state: the last state, when it is in memory.

    Attributes:
      stopped_by: the signal, such as "SIGTERM", that stopped its training in this process before the last step.
    """

    def __init__(self, path: str | Path, config: TrainConfig | None = None, state: TrainState | None = None):
        self.path = Path(path)
        self._config = config
        self.state = state
        self.stopped_by: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes and prints."""
        return jax.process_index() == 0

    @functools.cached_property
    def config(self) -> TrainConfig:
        """The run's settings.

        Raises:
          RunError: the folder is no run, or its settings cannot be rebuilt from text.
        """
        return self._config if self._config is not None else read_config(self.path)

    @property
    def info(self) -> dict[str, Any]:
        """`run.json`.

        Raises:
          RunError: there is none.
          AlteredFile: it is not what was written.
        """
        try:
            return read_json(self.path / INFO)
        except OSError as e:
            raise RunError(f"{self.path} is not a run folder: it has no readable run.json ({e})") from None

    @property
    def checkpoints(self) -> Checkpoints:
        """The run's checkpoints."""
        return checkpoints_in(self.path, keep=self.config.keep, keep_every=self.config.keep_every)

    @property
    def imported(self) -> Companions | None:
        """What came with an imported checkpoint; `None` of a run of our own.

        Raises:
          AlteredFile: a file of it is not what was written.
          CheckpointError: one is a link out of the folder.
        """
        if not (self.path / HF).is_dir():
            return None
        check_links(self.path / HF)
        digests.check(self.path, [name for name in digests.listed(self.path) if name.startswith(f"{HF}/")])
        return Companions(self.path / HF)

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns text into the model's ids: the one in the folder, else that of its settings.

        Raises:
          DataError: an imported checkpoint came without one.
        """
        imported = self.imported
        return self.config.tokenizer if imported is None else imported.tokenizer

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Token ids that end a text.

        Raises:
          DataError: an imported checkpoint does not tell.
        """
        imported = self.imported
        return (self.config.tokenizer.eos_id,) if imported is None else imported.end_ids

    def prompt_ids(self, prompt: str) -> Any:
        """The ids that a prompt starts from, int32: what opens a text (here the end of the one before), and the text's.

        Raises:
          ConfigError: the model does not know one of them.
          DataError: the text cannot be encoded.
        """
        imported = self.imported
        return text_ids(self.config, prompt, None if imported is None else imported.prompt_ids(prompt))

    def as_left(self, config: TrainConfig) -> TrainConfig:
        """Settings of the run with its own copy of the tokenizer, where the file that they name is gone."""
        own = self.imported
        if own is None or not isinstance(config.tokenizer, HFTokenizer) or Path(config.tokenizer.path).exists():
            return config
        return dataclasses.replace(config, tokenizer=own.tokenizer)

    def metrics(self) -> list[dict[str, Any]]:
        """A dict per step: `step`, `loss`, `grad_norm`, `lr`, `tokens_per_second`, `time`, now and then `eval_loss`."""
        return read_metrics(self.path / "metrics.jsonl")

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws the loss; a matplotlib figure, also written as PNG where `path` says."""
        return plot_loss(self.metrics(), f"{self.path.name}", None if path is None else Path(path))

    def params(self, step: int | None = None, layout: Layout | None = None) -> Any:
        """The parameters of a checkpoint, by default the live ones, or the newest that is whole.

        Those that its algorithm evaluates (see `Algorithm.weights`; of a schedule-free optimizer an average); of a run
        with adapters the model's, read from the run it started from, with the adapters added to them.

        Args:
          step: of which checkpoint.
          layout: onto its devices, each its shards; else on the default device, the live ones where they are.

        Raises:
          CheckpointError: there is none.
          LayoutError: they cannot be laid out.
        """
        if self.config.adapters is not None:
            return self._with_adapters(step, self.config.layout if self.state is not None and not layout else layout)
        return self.trained(step, layout)

    def _with_adapters(self, step: int | None, layout: Layout | None) -> Any:
        blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=layout))
        adaptation = blueprint.adaptation
        assert adaptation is not None
        live = self.state is not None and layout == self.config.layout
        frozen = self.state.frozen if live else blueprint.read_frozen()  # type: ignore[union-attr]
        placed = shardings_of(adaptation.infos, layout)
        return jax.jit(adaptation.merged, out_shardings=placed)(self.trained(step, layout), frozen)

    def model(self, step: int | None = None) -> Any:
        """The module with the parameters of a checkpoint, to be called as it is; arguments and errors as `params`."""
        graphdef, _ = describe_model(self.config.model)
        return nnx.merge(graphdef, self.params(step))

    def trained(self, step: int | None = None, layout: Layout | None = None) -> Any:
        """The parameters that were trained: the model's, or its adapters; arguments as `params`."""
        if self.state is not None and step is None:
            live = self.config.algorithm.weights(self.state)
            if layout is None or layout == self.config.layout:
                return live
            blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=layout))
            return jax.device_put(live, shardings_of(blueprint.infos, layout))
        if step is None:
            self.last_step()  # says so where there is none
        blueprint, _ = blueprint_of(dataclasses.replace(self.config, layout=layout))
        part = blueprint.algorithm.weights_in(blueprint)
        if part is not None:
            return self.checkpoints.restore_params(step, blueprint.infos, layout, part=part)
        state = self.checkpoints.restore(step, blueprint.abstract_state(), blueprint.shardings())
        return blueprint.algorithm.weights(state)

    def last_step(self) -> int:
        """The step of the newest finished checkpoint.

        Raises:
          RunError: there is none yet.
        """
        steps = self.checkpoints.steps()
        if not steps:
            raise RunError(f"{self.path} has no finished checkpoint yet; train it to one first")
        return steps[-1]


def bring_companions(source: RunFolder, to: RunFolder) -> None:
    """Copies what came with an imported checkpoint (tokenizer, chat template) to a run made of it, of the same ids."""
    own = source.imported
    if own is not None and own.tokenizer.fingerprint == to.config.tokenizer.fingerprint:
        take_companions(source.path / HF, to.path)


def take_companions(folder: Path, run: Path) -> None:
    """Copies what travels with the weights into a run's folder, and writes its digests."""
    names = copy_companions(folder, run / HF)
    list_files(run, [f"{HF}/{name}" for name in names])


def checkpoints_in(path: Path, **keep: Any) -> Checkpoints:
    """The checkpoints in a run's folder; those of another run are refused.

    Args:
      path: the folder.
      **keep: see `Checkpoints`.
    """
    try:
        own = RunFolder(path).info.get("id")
    except AlteredFile:
        raise
    except RunError:  # not written yet, or lost: then whatever is there counts as its own
        own = None
    return Checkpoints(path / "checkpoints", run=own, **keep)


def read_config(path: Path, bindings: Sequence[str] = (), *, given: Collection[str] = ()) -> TrainConfig:
    """A run's settings from its `config.gin`, in which nothing is imported; the config in force stays as it is.

    Args:
      path: the run folder.
      bindings: gin bindings that change them.
      given: settings that the caller replaces, so that it matters little if the text could not hold them.

    Raises:
      RunError: the folder is no run, or parts of it could not be written as text.
      AlteredFile: the text is not what was written.
      ConfigError: the text does not fit this version, or nothing reads a binding.
    """
    file = path / CONFIG
    if not file.is_file():
        raise RunError(f"{path} is not a run folder: it has no config.gin")
    try:
        text = read_gin(file)
    except OSError as e:
        raise RunError(f"{file} cannot be read: {e.strerror}") from None
    lost = [name for name in gin_config.lost(text) if name.split(".")[1:2] and name.split(".")[1] not in given]
    if lost:
        raise RunError(
            f"{file} could not hold {', '.join(lost)}, which came from Python; resume it from Python with "
            f"jaxscale.fit({lost[0].split('.')[1]}=..., run={str(path)!r}, resume=True)"
        )
    with gin_config.isolated():
        try:
            if _OLD_LOSS.search(text):  # before objectives
                text = _OLD_LOSS.sub(r"NextToken.\1 =", text) + "\ntrain.objective = @NextToken()\n"
                gin_config.load([], [text, *bindings], allow_imports=False)
            else:
                gin_config.load([file], bindings, allow_imports=False)
        except ConfigError as e:
            if "registered" not in str(e):
                raise
            raise ConfigError(f"{e}; a part of your own has to be imported first: {_imports(path)}") from None
        config = gin_config.call("train")
        unread = gin_config.unused()
        if bindings:  # what belonged to a part that they replace is left over, and no mistake
            typed = {b.partition("=")[0].strip() for b in bindings}
            unread = [name for name in unread if name in typed]
        if unread:
            known = [line.partition(" =")[0] for line in text.splitlines() if " = " in line]
            tail = unread[0].rsplit("/", 1)[-1]
            same = [name for name in known if name.endswith(f"/{tail}")]
            hint = f"; the run's own name for it is {' or '.join(same)}" if same else near(unread[0], known)
            raise ConfigError(f"nothing in {file} reads the binding {unread[0]}{hint}")
    return config  # type: ignore[return-value]


_OLD_LOSS = re.compile(r"^train\.(loss|z_loss) =", re.MULTILINE)


def _imports(path: Path) -> str:
    """The options that import a run's own parts. They are typed, since a folder may be anybody's."""
    try:
        modules = RunFolder(path).info["imports"]
    except (RunError, KeyError, TypeError):
        modules = []
    named = isinstance(modules, list) and all(
        isinstance(m, str) and m.replace(".", "_").isidentifier() for m in modules
    )
    return " ".join(f"--import {m}" for m in modules) if named and modules else "--import ITS_MODULE"


def write_config(path: Path, config: TrainConfig, step: int) -> list[str]:
    """Writes `config.gin`; one that said something else is kept as `config.until-<step>.gin`.

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
    """What `run.json` says of the machine, the versions and the data."""
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
