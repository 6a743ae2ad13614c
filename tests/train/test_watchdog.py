"""Who is to blame when a run of several processes does not get on."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale.errors import LOST, MISTAKE, ConfigError
from jaxscale.train.watchdog import Seen, Watchdog, verdict

NOW = 1000.0
WAITS = Seen(at=9, step=5, phase="step", since=NOW - 30, limit=10, heard=NOW - 1)
"""A process that waits for another in a collective."""

BROKEN = "JaxRuntimeError: INTERNAL: connection closed by peer"
"""What it meets when that one dies."""

BLAMED = {
    "killed": ([{"ended": True}], "process 1 ended without a word in step 5, phase 'step'"),
    "stopped": ([{"heard": NOW - 9}], "process 1 has given no sign of life for 9 s, in step 5, phase 'step'"),
    "asleep": ([{}, {"at": 8, "phase": "data"}], "process 2 does not get on: 30 s in step 5, phase 'data'"),
    "all": ([{}], "none of 2 processes gets on: 30 s in step 5, phase 'step'"),
    "raised": ([{"raised": "OSError: no disk"}], "process 1 raised OSError: no disk, in step 5, phase 'step'"),
    "killed-not-who-met-it": ([{"raised": BROKEN}, {"ended": True}], "process 2 ended without a word"),
    "raised-not-who-met-it": ([{"raised": BROKEN}, {"raised": "OSError: no disk"}], "process 2 raised OSError"),
}


def judge(*others):
    """The verdict on process 0, which waits, and others that are as it is but for what is given."""
    return verdict([WAITS, *(dataclasses.replace(WAITS, **other) for other in others)], 8.0, NOW)


@pytest.mark.parametrize("others, said", BLAMED.values(), ids=BLAMED)
def test_the_one_to_blame_is_named_with_its_step_and_phase(others, said):
    assert judge(*others).text.startswith(said)


def test_one_that_is_slow_within_its_limit_is_not_blamed_though_others_wait():
    assert judge({"at": 8, "phase": "save", "limit": 600}) is None


def test_one_that_came_to_the_end_is_not_missed():
    assert judge({"left": True, "ended": True, "heard": 0.0, "at": 1}).text.startswith("process 0 does not get on")
    assert verdict([dataclasses.replace(WAITS, left=True, ended=True)], 8.0, NOW) is None


def test_an_error_of_ours_is_a_mistake_for_all_and_any_other_error_is_not():
    assert judge({"raised": "CheckpointError: no space", "code": MISTAKE}).code == MISTAKE
    assert judge({"raised": "OSError: no disk"}).code == LOST


def test_a_time_below_two_signs_of_life_is_refused():
    with pytest.raises(ConfigError, match="Watchdog.silent = 1: must be above 2 seconds"):
        Watchdog(silent=1)
