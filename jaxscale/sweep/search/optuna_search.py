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
from jaxscale.sweep.search.as_optuna import Coded, optuna, quietly, sampler_code
from jaxscale.sweep.search.sampler import Sampler

_NEEDS = {"CmaEsSampler": "cmaes", "GPSampler": "torch", "QMCSampler": "scipy"}
_STATEFUL_SAMPLERS = ("BaseGASampler", "CmaEsSampler", "QMCSampler")  # store their state in the study
_STATEFUL_PRUNERS = ("HyperbandPruner", "SuccessiveHalvingPruner")  # store each trial's rung in the study


@register
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptunaSearch(Sampler):
    """Any sampler and pruner of Optuna (Akiba et al. 2019), on a study rebuilt from the records for each draw.

    The sampler is seeded with the search's seed and the trial's number, so that its draws depend on the records only.
    Samplers that store state in the study (CMA-ES, QMC, genetic ones) replay all trials. The study has running trials
    too; stopped and paused ones count as pruned.

    Args:
      seed, stopper: as in `Sampler`.
      sampler: "TPE", "CmaEs", "GP", "Random", "QMC" and so on, or a class or function that takes `seed`.
      options: arguments of the sampler, such as `{"multivariate": True}`.
      pruner: "Median", "Percentile", "Hyperband" and so on, or a class or function; by default none.
      pruner_options: arguments of the pruner, such as `{"percentile": 25.0}`.
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
                "OptunaSearch.options: 'with_margin' needs state that a sweep's records do not have; remove it"
            )
        for kind in type(sampler).__mro__:
            module = _NEEDS.get(kind.__name__)
            if module is not None and importlib.util.find_spec(module) is None:
                raise ConfigError(
                    f"OptunaSearch.sampler = {self.sampler!r} needs {module}, which is not installed: "
                    f"pip install {module}"
                )

    def draw(self, space: Mapping[str, Axis], records: Sequence[Record], steps: int) -> dict[str, Any]:
        """Return the bindings that the sampler suggests next."""
        codes = {name: sampler_code(axis) for name, axis in space.items()}
        distributions = {name: code.distribution for name, code in codes.items()}
        with quietly():
            sampler = self._sampler(0)
            if _is(sampler, _STATEFUL_SAMPLERS):
                storage = optuna("OptunaSearch").storages.InMemoryStorage()
                study = self._study(sampler=sampler, storage=storage)
                for record in records:
                    trial, frozen = study.ask(distributions), _frozen(codes, record)
                    for name, distribution in distributions.items():  # replace the new draw by the recorded one
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
        """Whether both the stopper and the pruner let a running trial continue."""
        if not self.stopper.keeps(record, records, steps):
            return False
        pruner = self._pruner()
        if pruner is None or not record.curve:
            return True
        with quietly():
            if not _is(pruner, _STATEFUL_PRUNERS):
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

    def _study(self, **options: Any) -> Any:
        return optuna("OptunaSearch").create_study(study_name="sweep", **options)


def _named(choice: str | Callable[..., Any], field: str, base: str) -> Callable[..., Any]:
    """The class with a name, whose suffix `Sampler` or `Pruner` may be omitted."""
    module = getattr(optuna("OptunaSearch"), f"{field}s")
    if not isinstance(choice, str):
        if isinstance(choice, getattr(module, base)):
            options = {"sampler": "options", "pruner": "pruner_options"}[field]
            raise ConfigError(
                f"OptunaSearch.{field} is an instance of {type(choice).__name__}, but one is created for each trial; "
                f"give the class, and its arguments as OptunaSearch.{options}"
            )
        return choice
    tail = field.capitalize()
    known = {n.removesuffix(tail): n for n in module.__all__ if n.endswith(tail) and not n.startswith("Base")}
    plain = {_plain(name): name for name in known}
    name = plain.get(_plain(choice.removesuffix(tail)))
    if name is None:
        raise ConfigError(f"OptunaSearch.{field} = '{choice}' does not exist in Optuna{near(choice, known)}")
    return getattr(module, known[name])


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _made(field: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        with quietly():
            return make(**options)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"OptunaSearch.{field} cannot be created: {e}") from None


def _is(value: object, names: Iterable[str]) -> bool:
    return any(kind.__name__ in names for kind in type(value).__mro__)


def _params(codes: Mapping[str, Coded], record: Record) -> dict[str, Any]:
    return {name: code.encode(record.trial.bindings[name]) for name, code in codes.items()}


def _frozen(codes: Mapping[str, Coded], record: Record) -> Any:
    """A record as Optuna's frozen trial."""
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
    """Report a curve point by point; returns whether the pruner would prune at the last."""
    pruned = False
    for step, value in record.curve:
        trial.report(value, step)
        pruned = trial.should_prune()
    return pruned
