"""Settings of a training run: one frozen dataclass, `train` in gin."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxscale.config import meant, register
from jaxscale.data import ByteTokenizer, Corpus, Tokenizer, as_corpus, python_stdlib
from jaxscale.data.batching import HDP, FlexSP
from jaxscale.data.packing import PACKINGS
from jaxscale.errors import ConfigError, DataError, LayoutError, near
from jaxscale.layout import Layout, parse_mesh
from jaxscale.layout.axes import MESH_AXES
from jaxscale.layout.rules import PRESETS
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.nn import WeightFormat
from jaxscale.optim import AdamW, LRSchedule, Optimizer, WarmupCosine
from jaxscale.reading import clipped
from jaxscale.signatures import check_method
from jaxscale.step.adaptation import Adapters
from jaxscale.step.algorithm import Algorithm
from jaxscale.step.backprop import Backprop
from jaxscale.step.callbacks import check_callbacks
from jaxscale.step.functions import as_model, as_objective
from jaxscale.step.guards import FiniteGuard, Guard
from jaxscale.step.histograms import Histograms
from jaxscale.step.loss import Loss
from jaxscale.step.objective import NextToken, Objective, token_loss
from jaxscale.step.objective_checks import check_objective_of
from jaxscale.step.snapshots import Snapshots
from jaxscale.step.start import Start
from jaxscale.step.trackers import Tracker
from jaxscale.step.watchdog import Watchdog


@register(name="train")
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; in gin `train.lr = 3e-3`, in Python `jaxscale.fit(lr=3e-3)`.

    Args:
      model: a model config, such as `Transformer.Config(depth=8)`; in Python also a function of `nnx.Rngs` that returns
        a Flax module, or the module's class.
      data: a corpus, such as `python_stdlib()`; other objects with `__len__` and `__getitem__` become `records(data)`.
      start: where initial parameters are from, such as `FromRun('runs/qwen3')`; `None` draws random ones. If `model` or
        `tokenizer` has its default, that run's is used (see `settled`).
      stored: the weight format in which the run's checkpoint holds matrices, such as that of `jaxscale quantize`; the
        run is then not trained. `None` is plain arrays.
      adapters: `LoRA()` trains adapters beside a frozen model, `Unfreeze(targets)` some of its parameters, `None` all.
      layout: mesh and rules; by default all devices, data-parallel. `None` is one device and no mesh.
      tokenizer: turns text into token ids; ignored by corpora that consist of token ids.
      steps: optimizer steps of the whole run.
      lr: peak learning rate.
      batch_size: rows of a global batch (over all devices and micro-batches).
      seq_len: tokens of a row.
      seed: seed of initial values, data order and dropout.
      optimizer: an `Optimizer` such as `AdamW()`; in Python also an `optax.GradientTransformation`, which has its own
        learning rate.
      schedule: learning-rate schedule, such as `WarmupCosine()`; its peak is `lr`.
      clip_norm: the largest global norm (float32) of gradients, which are scaled down to it; `None` does not clip.
      accumulate: micro-batches in a step; changes memory, not the gradient.
      batching: cuts longer documents over more devices: `FlexSP()` by micro-batches of one degree (see
        `jaxscale.step.by_degree`), `HDP()` by rows on groups of devices of their own (see `jaxscale.step.by_group`);
        `None` has one layout for all.
      algorithm: what owns the state and takes steps: `Backprop()`, `MeZO()`, `WeightEMA()`, `LocalSteps()`, `DiLoCo()`,
        or your own `Algorithm`.
      objective: what training minimises: `NextToken()`, whose `loss` and `z_loss` define the loss of each token, or
        your own `Objective`; in Python also a function of the module and a batch that returns the loss of each row.
      balance_rate: how much a step changes the biases of balanced routers (see `jaxscale.nn.SigmoidRouter`).
      packing: how documents fill rows: "stream" (cut from the concatenation) or "fit" (whole if they fit, padded).
      even_rows: order the rows of each step such that devices, and micro-batches of a pipeline, have equal work in
        attention, by the lengths of documents; the rows of a step stay the same (see `jaxscale.data.even_rows`).
      segments: whether attention stays within a document, and positions restart in each; else a row is one document.
      eval_every: steps between evaluations on held-out documents; 0 evaluates only at the end.
      eval_batches: batches of an evaluation; 0 never evaluates.
      evaluate_on: further corpora by name, for evaluation only; the loss on their held-out documents is the metric
        `eval_loss/NAME`.
      checkpoint_every: steps between checkpoints; 0 writes one only at the end.
      overlap_saves: copy the state to host memory while the next steps run, from a copy on the devices, which takes
        the memory of another state; else a step waits for it.
      keep: number of newest checkpoints to keep.
      keep_every: checkpoints whose step is a multiple of this are never deleted; `None` makes no such exception.
      staging: for runs in a bucket, a folder of a disk that all processes share: checkpoints are written there first
        and uploaded behind the run. `None` writes into the bucket.
      guards: checks during the run (see `jaxscale.step.guards`), such as `FiniteGuard()` and `SpikeGuard()`.
      prompt: text from which a sample is generated at the end; `None` generates none.
      snapshots: copies of the state in host memory, such as `Snapshots(every=10)`; none by default.
      watchdog: when another process counts as failed, which ends this one.
      trackers: where metrics go besides `metrics.jsonl`, such as `TensorBoard()`, `Wandb()`, `MLflow()` and
        `Trackio()` (see `jaxscale.step.trackers`).
      histograms: parameters and gradients of which the trackers get histograms, such as
        `Histograms(params=("embed",), every=100)`; `None` makes none.
      callbacks: your own code after steps, evaluations and checkpoints (see `jaxscale.step.Callback`).

    Raises:
      ConfigError: a setting is out of its range.
      DataError: a packing that does not exist.
    """

    model: ModelConfig = TransformerConfig()
    start: Start | None = None
    adapters: Adapters | None = None
    stored: WeightFormat | None = None
    data: Corpus = python_stdlib()
    layout: Layout | None = Layout()
    tokenizer: Tokenizer = ByteTokenizer()
    steps: int = 400
    lr: float = 3e-3
    batch_size: int = 16
    seq_len: int = 256
    seed: int = 0
    optimizer: Optimizer | optax.GradientTransformation = AdamW()
    schedule: LRSchedule = WarmupCosine()
    clip_norm: float | None = 1.0
    accumulate: int = 1
    batching: FlexSP | HDP | None = None
    algorithm: Algorithm = Backprop()
    objective: Objective = NextToken()
    balance_rate: float = 1e-3
    packing: str = "stream"
    even_rows: bool = False
    segments: bool = True
    eval_every: int = 0
    eval_batches: int = 16
    evaluate_on: Mapping[str, Corpus] = dataclasses.field(default_factory=dict)
    checkpoint_every: int = 0
    overlap_saves: bool = False
    keep: int = 3
    keep_every: int | None = None
    staging: str | None = None
    guards: tuple[Guard, ...] = (FiniteGuard(),)
    prompt: str | None = None
    snapshots: Snapshots = Snapshots(every=0)
    watchdog: Watchdog = Watchdog()
    trackers: tuple[Tracker, ...] = ()
    histograms: Histograms | None = None
    callbacks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", as_corpus(self.data))
        object.__setattr__(self, "model", as_model(self.model))
        object.__setattr__(self, "objective", as_objective(self.objective))
        object.__setattr__(self, "evaluate_on", {n: as_corpus(corpus) for n, corpus in self.evaluate_on.items()})
        for name, (methods, example) in _PARTS.items():
            value = getattr(self, name)
            plain = name == "optimizer" and isinstance(value, optax.GradientTransformation)
            if isinstance(value, type) or not (plain or all(hasattr(value, m) for m in methods)):
                hint = meant(value, methods, _TAKES.get(name, {}))
                raise ConfigError(f"train.{name} must be {example}, not {_called(value)}{hint}")
            if name == "model" and not _takes_keys(value.make):
                raise ConfigError(f"train.model must be {example}, not {_called(value)}")
            if name in _CALLED and not plain:
                method, positional, named = _CALLED[name]
                named += ("reference",) if name == "objective" and value.reference else ()
                check_method(f"train.{name}", value, method, positional, named)
        if not isinstance(self.layout, Layout | None):
            raise ConfigError(
                f"train.layout must be a layout such as Layout('data=8'), or None, not {self.layout!r}"
                f"{_layout_meant(self.layout)}"
            )
        if not isinstance(self.batching, FlexSP | HDP | None):
            raise ConfigError(
                "train.batching must be FlexSP() or HDP(), the batch planners that train, or None, not "
                f"{_called(self.batching)}; for one degree in all steps, leave it None and give the mesh that size of "
                "'context'"
            )
        self._check_start()
        self._check_guards()
        self._check_trackers()
        self._check_evaluate_on()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and name != "balance_rate" and not whole:
                hint = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
                raise ConfigError(f"train.{name} = {value!r}: must be a whole number{hint}")
            if value is not None and not least <= value < math.inf:
                finite = " and finite" if value == math.inf else ""
                raise ConfigError(f"train.{name} = {value}: must be at least {least}{finite}")
        if self.packing not in PACKINGS:
            raise DataError(f"train.packing = '{self.packing}' does not exist{near(str(self.packing), PACKINGS)}")
        if self.even_rows and not self.segments:
            raise ConfigError(
                "train.even_rows = True: with train.segments = False all rows have equal work; change one of them"
            )
        if self.even_rows and self.batching is not None:
            raise ConfigError(
                f"train.even_rows = True: {type(self.batching).__name__}() places documents by their work already; set "
                "train.even_rows = False"
            )
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"train.lr = {self.lr}: must be above 0{' and finite' if self.lr == math.inf else ''}")
        if self.seed >= 2**32:
            raise ConfigError(f"train.seed = {self.seed}: must be below 2**32, since random keys use 32 bits of it")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"train.clip_norm = {self.clip_norm}: must be above 0, or None for no clipping")
        check_objective_of(self)
        if self.batch_size % self.accumulate:
            fit = max(d for d in range(1, self.accumulate + 1) if self.batch_size % d == 0)
            raise ConfigError(
                f"train.accumulate = {self.accumulate} does not divide train.batch_size = {self.batch_size}; the "
                f"nearest that does is {fit}"
            )

    def _check_start(self) -> None:
        methods_of_start = ("settled", "check", "params")
        for name, methods, example in (
            ("start", methods_of_start, "FromRun('runs/base')"),
            ("adapters", ("adapt",), "LoRA()"),
        ):
            value = getattr(self, name)
            if value is not None and not all(hasattr(type(value), method) for method in methods):
                raise ConfigError(f"train.{name} must be {example} or None, not {_called(value)}{meant(value)}")
        if not isinstance(self.stored, WeightFormat | None):
            raise ConfigError(
                f"train.stored must be a weight format such as GroupedIntegers(), or None, not {_called(self.stored)}"
                f"{meant(self.stored)}"
            )
        if self.stored is not None and self.adapters is not None:
            raise ConfigError(
                "train.stored is the format of a run's own checkpoint, and the frozen matrices of adapters are in "
                "another run's; set LoRA.base in its place"
            )
        if self.adapters is not None and self.start is None:
            raise ConfigError("train.adapters needs a trained model; set train.start, as FromRun('runs/base')")

    def _check_guards(self) -> None:
        if not isinstance(self.guards, tuple | list) or not all(isinstance(g, Guard) for g in self.guards):
            raise ConfigError(f"train.guards must be a tuple of guards, such as (FiniteGuard(),), not {self.guards!r}")
        object.__setattr__(self, "guards", tuple(self.guards))
        names = [g.name for g in self.guards]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise ConfigError(f"train.guards has two guards named '{twice}'; remove one of them")

    def _check_trackers(self) -> None:
        if not isinstance(self.trackers, tuple | list) or not all(isinstance(t, Tracker) for t in self.trackers):
            raise ConfigError(
                f"train.trackers must be a tuple of trackers, such as (TensorBoard(),), not {self.trackers!r}"
            )
        object.__setattr__(self, "trackers", tuple(self.trackers))
        if not isinstance(self.histograms, Histograms | None):
            raise ConfigError(
                f"train.histograms must be Histograms() or None, not {_called(self.histograms)}{meant(self.histograms)}"
            )
        object.__setattr__(self, "callbacks", check_callbacks(self.callbacks))

    def _check_evaluate_on(self) -> None:
        for name, corpus in self.evaluate_on.items():
            if not isinstance(name, str) or not name or not set(name).isdisjoint(" \t\n/"):
                raise ConfigError(f"train.evaluate_on has a corpus named {name!r}; use a word, such as 'markdown'")
            if isinstance(corpus, type) or not hasattr(corpus, "source"):
                raise ConfigError(
                    f"train.evaluate_on['{name}'] must be a corpus such as text_files('docs/*.md'), not {corpus!r}"
                )

    @property
    def keeps_start(self) -> bool:
        """Whether all steps need the parameters of `train.start`, which are not in the run's own checkpoints."""
        return self.adapters is not None or (self.objective.reference and self.objective.teacher is None)

    @property
    def frozen_starts(self) -> dict[str, Start]:
        """Where the frozen parameters that all steps need are from, by name."""
        starts = {"start": self.start if self.keeps_start else None, "teacher": self.objective.teacher}
        return {name: start for name, start in starts.items() if start is not None}

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return self.batch_size // self.accumulate

    @property
    def token_loss(self) -> Loss:
        """The objective's loss of each token; see `jaxscale.step.objective.token_loss`."""
        return token_loss(self)

    def values(self) -> dict[str, Any]:
        """Return all settings by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def _takes_keys(make: Callable[..., object]) -> bool:
    """Return whether a function can be called with one argument, as a model config's `make` is with random keys."""
    needed = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    return len([p for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]) == 1


def _called(value: object) -> str:
    """Return a value in a few words; of arrays, types and shapes."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Mapping):
        items = [f"{k!r}: {_called(v)}" for k, v in itertools.islice(value.items(), 3)]
        return f"a {type(value).__name__} of {', '.join(items)}{', ...' if len(value) > 3 else ''}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return clipped(" ".join(repr(value).split()))


def _layout_meant(value: object) -> str:
    """Return what a value that is no layout was probably meant to be, for the end of a message."""
    if isinstance(value, Mapping):
        value = ",".join(f"{axis}={size}" for axis, size in value.items())
    if not isinstance(value, str):
        return ""
    if "=" not in value:
        preset, axis = (near(value, names) for names in (PRESETS, MESH_AXES))
        if value not in PRESETS and axis.startswith("; did you mean"):
            return f"""; write Layout('{axis.split("'")[1]}=-1')"""
        if preset.startswith("; did you mean"):
            return f"""; write rules with a mesh, such as Layout('data=-1', rules='{preset.split("'")[1]}')"""
    try:
        parse_mesh(value)
    except LayoutError as e:
        return f"; {e}"
    return f"; write Layout('{value}')"


# For each setting the methods that its value needs, and a description for errors. (A class without its brackets is a
# common mistake.)
_PARTS = {
    "model": (("make",), "a model such as Transformer(), or any frozen dataclass whose make(rngs) gives an nnx.Module"),
    "data": (("source",), "a corpus such as python_stdlib(), or text_files() with text_files.glob = 'data/*.txt'"),
    "tokenizer": (
        ("encode", "decode"),
        "a tokenizer such as ByteTokenizer(), or HFTokenizer() with HFTokenizer.path = 'FOLDER/tokenizer.json'",
    ),
    "optimizer": (("make",), "an optimizer such as AdamW()"),
    "schedule": (("make",), "a schedule such as WarmupCosine()"),
    "snapshots": (("every", "root"), "snapshots such as Snapshots()"),
    "algorithm": (
        ("infos", "init", "step", "weights", "weights_in"),
        "an algorithm such as Backprop(), or a subclass of jaxscale.step.Algorithm",
    ),
    "watchdog": (("silent", "stuck", "disk", "first"), "a watchdog such as Watchdog(stuck=60)"),
    "objective": (
        ("inputs", "weights", "terms", "value", "metrics"),
        "an objective such as NextToken(), or a subclass of jaxscale.step.Objective",
    ),
}

# How training calls a method of a setting's value: its name, positional arguments, keyword arguments.
_CALLED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "optimizer": ("make", ("learning_rate", "infos"), ()),
    "schedule": ("make", ("peak", "steps"), ()),
    "objective": ("terms", ("model", "batch"), ("key",)),
}

# Parameters of the method `make`, by which parts that have it differ.
_TAKES: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {"make": ("rngs",)},
    "optimizer": {"make": _CALLED["optimizer"][1]},
    "schedule": {"make": _CALLED["schedule"][1]},
}

_LEAST = {
    "steps": 1,
    "batch_size": 1,
    "seq_len": 2,
    "seed": 0,
    "accumulate": 1,
    "balance_rate": 0,
    "eval_every": 0,
    "eval_batches": 0,
    "checkpoint_every": 0,
    "keep": 1,
    "keep_every": 1,
}
