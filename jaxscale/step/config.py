"""What a training run is told: one frozen dataclass, `train` in gin."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import optax

from jaxscale.config import meant, register
from jaxscale.data import ByteTokenizer, Corpus, Tokenizer, python_stdlib
from jaxscale.data.packing import PACKINGS
from jaxscale.errors import ConfigError, DataError, near
from jaxscale.layout import Layout
from jaxscale.models import ModelConfig, TransformerConfig
from jaxscale.optim import AdamW, LRSchedule, Optimizer, WarmupCosine
from jaxscale.signatures import check_method
from jaxscale.step.adaptation import Adapters
from jaxscale.step.algorithm import Algorithm
from jaxscale.step.backprop import Backprop
from jaxscale.step.guards import FiniteGuard, Guard
from jaxscale.step.loss import Loss
from jaxscale.step.objective import NextToken, Objective, token_loss
from jaxscale.step.objective_checks import check_objective_of
from jaxscale.step.snapshots import Snapshots
from jaxscale.step.start import Start
from jaxscale.step.watchdog import Watchdog


@register(name="train")
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run; in gin `train.lr = 3e-3`, in Python `jaxscale.fit(lr=3e-3)`.

    Args:
      model: a model config, such as `Transformer.Config(depth=8)`.
      data: a corpus, such as `python_stdlib()`.
      start: the run whose parameters are the first ones, as `FromRun('runs/qwen3')`; `None` draws random ones. What
        `model` and `tokenizer` are left at their defaults is then that run's (see `settled`).
      adapters: `LoRA()` trains adapters beside a frozen model, `Unfreeze(targets)` some of its parameters; `None` all.
      layout: where things live; all devices, data-parallel, by default. `None` is one device and no mesh.
      tokenizer: turns text into ids; ignored by corpora that are tokens already.
      steps: optimizer steps of the whole run.
      lr: peak learning rate.
      batch_size: rows of a global batch (over all devices and micro-batches).
      seq_len: tokens of a row.
      seed: of initial values, data order and dropout.
      optimizer: an `Optimizer` such as `AdamW()`, or from Python an `optax.GradientTransformation` as it is (which
        brings its own learning rate).
      schedule: learning rate over time, such as `WarmupCosine()`; `lr` is its peak.
      clip_norm: gradients are scaled down to this global norm, float32; `None` leaves them.
      accumulate: micro-batches a step; changes memory, not the gradient.
      algorithm: what owns the state and takes a step: `Backprop()`, `WeightEMA()`, `LocalSteps()`, or an `Algorithm` of
        your own.
      objective: what is trained for: `NextToken()`, whose `loss` and `z_loss` say how each token's loss is made, or an
        `Objective` of your own.
      balance_rate: what a step moves the biases of balanced routers by (see `jaxscale.nn.SigmoidRouter`).
      packing: how documents fill rows: "stream" (cut from the concatenation) or "fit" (whole where they fit, padded).
      segments: attention stays within a document, and positions start anew in each; else a row is one text.
      eval_every: steps between evaluations on held-out documents; 0 evaluates at the end only.
      eval_batches: batches of an evaluation; 0 never evaluates.
      evaluate_on: further corpora by name, whose held-out documents are evaluated on as well: the metric
        `eval_loss/NAME` beside `eval_loss`. Nothing is trained on them.
      checkpoint_every: steps between checkpoints; 0 writes one at the end only.
      keep: how many of the newest checkpoints stay.
      keep_every: checkpoints of multiples of this step stay for good; `None` keeps none of them.
      guards: what looks after the run (see `jaxscale.step.guards`): `FiniteGuard()`, `SpikeGuard()`; `()` is nothing.
      prompt: what a sample is continued from at the end; `None` prints none.
      snapshots: copies of the state in memory, such as `Snapshots(every=10)`; none by default.
      watchdog: when another process counts as lost, which ends this one.
      tensorboard: also write TensorBoard events; `None` does when tensorboardX is installed.

    Raises:
      ConfigError: a setting out of its range.
      DataError: a packing that does not exist.
    """

    model: ModelConfig = TransformerConfig()
    start: Start | None = None
    adapters: Adapters | None = None
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
    algorithm: Algorithm = Backprop()
    objective: Objective = NextToken()
    balance_rate: float = 1e-3
    packing: str = "stream"
    segments: bool = True
    eval_every: int = 0
    eval_batches: int = 16
    evaluate_on: Mapping[str, Corpus] = dataclasses.field(default_factory=dict)
    checkpoint_every: int = 0
    keep: int = 3
    keep_every: int | None = None
    guards: tuple[Guard, ...] = (FiniteGuard(),)
    prompt: str | None = None
    snapshots: Snapshots = Snapshots(every=0)
    watchdog: Watchdog = Watchdog()
    tensorboard: bool | None = None

    def __post_init__(self) -> None:
        for name, (methods, what) in _PARTS.items():
            value = getattr(self, name)
            plain = name == "optimizer" and isinstance(value, optax.GradientTransformation)
            if isinstance(value, type) or not (plain or all(hasattr(value, m) for m in methods)):
                raise ConfigError(f"train.{name} must be {what}, not {_called(value)}{meant(value, methods)}")
            if name == "model" and not _takes_keys(value.make):
                raise ConfigError(f"train.model must be {what}, not {_called(value)}")
            if name in _CALLED and not plain:
                method, positional, named = _CALLED[name]
                named += ("reference",) if name == "objective" and value.reference else ()
                check_method(f"train.{name}", value, method, positional, named)
        if not isinstance(self.layout, Layout | None):
            raise ConfigError(f"train.layout must be a layout such as Layout('data=8'), or None, not {self.layout!r}")
        self._check_start()
        self._check_guards()
        self._check_evaluate_on()
        for name, least in _LEAST.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and name != "balance_rate" and not whole:
                raise ConfigError(f"train.{name} = {value!r}: must be a whole number")
            if value is not None and not least <= value < math.inf:
                finite = " and finite" if value == math.inf else ""
                raise ConfigError(f"train.{name} = {value}: must be at least {least}{finite}")
        if self.packing not in PACKINGS:
            raise DataError(f"train.packing = '{self.packing}' does not exist{near(str(self.packing), PACKINGS)}")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"train.lr = {self.lr}: must be above 0{' and finite' if self.lr == math.inf else ''}")
        if self.seed >= 2**32:
            raise ConfigError(f"train.seed = {self.seed}: must be below 2**32, since keys keep 32 bits of it")
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
        reads = ("settled", "check", "params")
        for name, methods, example in (("start", reads, "FromRun('runs/base')"), ("adapters", ("adapt",), "LoRA()")):
            value = getattr(self, name)
            if value is not None and not all(hasattr(type(value), method) for method in methods):
                raise ConfigError(f"train.{name} must be {example} or None, not {_called(value)}{meant(value)}")
        if self.adapters is not None and self.start is None:
            raise ConfigError("train.adapters needs a trained model; set train.start, as FromRun('runs/base')")

    def _check_guards(self) -> None:
        if not isinstance(self.guards, tuple | list) or not all(isinstance(g, Guard) for g in self.guards):
            raise ConfigError(f"train.guards must be a tuple of guards, such as (FiniteGuard(),), not {self.guards!r}")
        object.__setattr__(self, "guards", tuple(self.guards))
        names = [g.name for g in self.guards]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise ConfigError(f"train.guards has two called '{twice}'; leave one of them")

    def _check_evaluate_on(self) -> None:
        for name, corpus in self.evaluate_on.items():
            if not isinstance(name, str) or not name or not set(name).isdisjoint(" \t\n/"):
                raise ConfigError(f"train.evaluate_on names a corpus {name!r}; use a word, such as 'markdown'")
            if isinstance(corpus, type) or not hasattr(corpus, "source"):
                raise ConfigError(
                    f"train.evaluate_on['{name}'] must be a corpus such as text_files('docs/*.md'), not {corpus!r}"
                )

    @property
    def keeps_start(self) -> bool:
        """Whether every step needs the parameters of `train.start`, which are not in the run's own checkpoints."""
        return self.adapters is not None or self.objective.reference

    @property
    def micro_batch(self) -> int:
        """Rows of a micro-batch."""
        return self.batch_size // self.accumulate

    @property
    def token_loss(self) -> Loss:
        """How the objective makes the loss of each token; see `jaxscale.step.objective.token_loss`."""
        return token_loss(self)

    def values(self) -> dict[str, Any]:
        """Every setting by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def _takes_keys(make: Any) -> bool:
    """Whether a function is called with random keys and nothing else, as a model config's `make` is."""
    needed = [p for p in inspect.signature(make).parameters.values() if p.default is p.empty]
    return len([p for p in needed if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]) == 1


def _called(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else repr(value)


# What each part is asked to do, and what it is called; a class without its brackets is the usual slip.
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

# How training calls a part: the method, what it passes by place, and what by name.
_CALLED: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "optimizer": ("make", ("learning_rate", "infos"), ()),
    "schedule": ("make", ("peak", "steps"), ()),
    "objective": ("terms", ("model", "batch"), ("key",)),
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
