"""Searches, which choose a sweep's trials: grids, random draws, halving, density models, Optuna's samplers."""

from jaxscale.sweep.search.asha import ASHA
from jaxscale.sweep.search.extrapolate import Extrapolated
from jaxscale.sweep.search.grid import Grid
from jaxscale.sweep.search.halving import SuccessiveHalving
from jaxscale.sweep.search.hyperband import BOHB, Hyperband
from jaxscale.sweep.search.kde import KDE
from jaxscale.sweep.search.optuna_search import OptunaSearch
from jaxscale.sweep.search.quasi import QuasiRandom
from jaxscale.sweep.search.random import Random
from jaxscale.sweep.search.sampler import Sampler
from jaxscale.sweep.search.stopping import Never, Stopper

__all__ = [
    "ASHA",
    "BOHB",
    "KDE",
    "Extrapolated",
    "Grid",
    "Hyperband",
    "Never",
    "OptunaSearch",
    "QuasiRandom",
    "Random",
    "Sampler",
    "Stopper",
    "SuccessiveHalving",
]
