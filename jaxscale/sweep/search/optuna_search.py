"""Optuna's samplers and pruners as a search."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxscale.config import register
from jaxscale.errors import ConfigError, near
from jaxscale.sweep.base import BAD, FINISHED, PAUSED, STOPPED, Axis, Record
from jaxscale.sweep.search.as_optuna import Coded, modelled, optuna, quietly
from jaxscale.sweep.search.sampler import Sampler

_NEEDS = {"CmaEsSampler": "cmaes", "GPSampler": "torch", "QMCSampler": "scipy"}
_REMEMBERING = ("BaseGASampler", "CmaEsSampler", "QMCSampler")  # keep in the study what they draw next from
_RECALLING = ("HyperbandPruner", "SuccessiveHalvingPruner")  # keep in the study how far each trial was let through


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptunaSearch(Sampler):
    """Any sampler and pruner of Optuna (Akiba et al. 2019), on a study that is made anew from the records each time.

    A sampler is seeded with the search's seed and the trial's number, so that what it draws follows from the records.
    Those which keep notes in the study (CMA-ES, QMC, genetic ones) are led through all trials again. A trial that
    runs is there for them to see; one that was stopped or paused counts as pruned.

    Args:
      sampler: "TPE", "CmaEs", "GP", "Random", "QMC" and so on, or a class or function that takes `seed`.
      options: its arguments, such as `{"multivariate": True}`.
      pruner: "Median", "Percentile", "Hyperband" and so on, or a class or function; by default none.
      pruner_options: its arguments, such as `{"percentile": 25.0}`.
    """

    sampler: str | Callable[..., Any] = "TPE"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pruner: str | Callable[..., Any] | None = None
    pruner_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sampler = self._sampler(0)
        self._pruner()
        if self.options.get("with_margin"):
            raise ConfigError(
                "OptunaSearch.options: 'with_margin' keeps more about each draw than its record tells; leave it out"
            )
        for kind in type(sampler).__mro__:
            module = _NEEDS.get(kind.__name__)
            if module is not None and importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"OptunaSearch.sampler = {self.sampler!r} needs {module}, which is not installed: "
                    f"pip install {module}"
                )

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """What the sampler suggests next."""
        codes = {name: modelled(axis) for name, axis in space.items()}
        distributions = {name: code.distribution for name, code in codes.items()}
        with quietly():
            sampler = self._sampler(0)
            if _is(sampler, _REMEMBERING):
                storage = optuna("OptunaSearch").storages.InMemoryStorage()
                study = self._study(sampler=sampler, storage=storage)
                for record in records:
                    trial, frozen = study.ask(distributions), _frozen(codes, record)
                    for name, distribution in distributions.items():  # what was drawn then, when less was known
                        inner = distribution.to_internal_repr(frozen.params[name])
                        storage.set_trial_param(trial._trial_id, name, inner, distribution)
                    if frozen.state.is_finished():
                        _finish(study, trial, frozen)
            else:
                study = self._study(sampler=self._sampler(len(records)))
                study.add_trials([_frozen(codes, record) for record in records])
            params = study.ask(distributions).params
        return {name: code.decode(params[name]) for name, code in codes.items()}

    def keeps(self, record: Record, records: Sequence[Record], steps: int) -> bool:
        """What the pruner says, and the stopper."""
        if not self.stopper.keeps(record, records, steps):
            return False
        pruner = self._pruner()
        if pruner is None or not record.curve:
            return True
        with quietly():
            if not _is(pruner, _RECALLING):
                study = self._study()
                study.add_trials([_frozen({}, other) for other in records])
                return not pruner.prune(study, study.trials[record.trial.id])
            study = self._study(pruner=pruner)
            trials = [study.ask() for _ in records]
            for other, trial in zip(records, trials, strict=True):
                if other.trial.id != record.trial.id:
                    _walk(trial, other)
                    frozen = _frozen({}, other)
                    if frozen.state.is_finished():
                        _finish(study, trial, frozen)
            return not _walk(trials[record.trial.id], record)

    def _sampler(self, trial: int) -> Any:
        seed = int(self.random(trial, 2).integers(2**31))
        make = _named(self.sampler, "sampler", "BaseSampler")
        return _made("sampler", make, {**self.options, "seed": seed})

    def _pruner(self) -> Any:
        if self.pruner is None:
            return None
        return _made("pruner", _named(self.pruner, "pruner", "BasePruner"), self.pruner_options)

    def _study(self, **how: Any) -> Any:
        return optuna("OptunaSearch").create_study(study_name="sweep", **how)


def _named(choice: str | Callable[..., Any], field: str, base: str) -> Callable[..., Any]:
    """The class of a name, which may leave out the `Sampler` or `Pruner` at its end."""
    module = getattr(optuna("OptunaSearch"), f"{field}s")
    if not isinstance(choice, str):
        if isinstance(choice, getattr(module, base)):
            options = {"sampler": "options", "pruner": "pruner_options"}[field]
            raise ConfigError(
                f"OptunaSearch.{field} is a {type(choice).__name__} that was made already, which cannot be made again "
                f"for each trial; give the class, and its arguments as OptunaSearch.{options}"
            )
        return choice
    tail = field.capitalize()
    known = {n.removesuffix(tail): n for n in module.__all__ if n.endswith(tail) and not n.startswith("Base")}
    plain = {_plain(name): name for name in known}
    name = plain.get(_plain(choice.removesuffix(tail)))
    if name is None:
        raise ConfigError(f"OptunaSearch.{field} = '{choice}' is none of Optuna's{near(choice, known)}")
    return getattr(module, known[name])


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _made(field: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        with quietly():
            return make(**options)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"OptunaSearch.{field} cannot be made: {e}") from None


def _is(value: Any, names: Iterable[str]) -> bool:
    return any(kind.__name__ in names for kind in type(value).__mro__)


def _params(codes: Mapping[str, Coded], record: Record) -> dict[str, Any]:
    return {name: code.encode(record.trial.bindings[name]) for name, code in codes.items()}


def _frozen(codes: Mapping[str, Coded], record: Record) -> Any:
    """A record as a trial of Optuna's."""
    module = optuna("OptunaSearch")
    states = module.trial.TrialState
    state = {FINISHED: states.COMPLETE, PAUSED: states.PRUNED, STOPPED: states.PRUNED} | dict.fromkeys(BAD, states.FAIL)
    curve = {step: value for step, value in record.curve if not math.isnan(value)}
    last = record.curve[-1][1] if record.curve else math.nan
    now = state.get(record.state, states.RUNNING)
    if now == states.COMPLETE and math.isnan(last):
        now = states.FAIL
    return module.trial.create_trial(
        state=now,
        value=last if now == states.COMPLETE else None,
        params=_params(codes, record),
        distributions={name: code.distribution for name, code in codes.items()},
        intermediate_values=curve,
    )


def _finish(study: Any, trial: Any, frozen: Any) -> None:
    for step, value in frozen.intermediate_values.items():
        trial.report(value, step)
    study.tell(trial, frozen.value, state=frozen.state)


def _walk(trial: Any, record: Record) -> bool:
    """Goes through a curve point by point, asking the pruner at each; what it said at the last."""
    pruned = False
    for step, value in record.curve:
        trial.report(value, step)
        pruned = trial.should_prune()
    return pruned
