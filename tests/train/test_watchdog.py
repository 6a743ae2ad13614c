"""The watchdog chooses the failed process of a run of several processes."""

from __future__ import annotations

import dataclasses

import pytest

from jaxscale.errors import LOST, MISTAKE, ConfigError
from jaxscale.train.watchdog import Status, Watchdog, verdict

NOW = 1000.0
WAITS = Status(phases=9, step=5, phase="step", since=NOW - 30, limit=10, last_beat=NOW - 1)
"""A process that waits for another one in a collective."""

BROKEN = "JaxRuntimeError: INTERNAL: connection closed by peer"
"""The error that it raises when the other one dies."""

FAILURES = {
    "killed": ([{"disconnected": True}], "process 1 disconnected in step 5, phase 'step'"),
    "stopped": ([{"last_beat": NOW - 9}], "process 1 has sent no heartbeat for 9 s, in step 5, phase 'step'"),
    "asleep": ([{}, {"phases": 8, "phase": "data"}], "process 2 is stuck: 30 s in step 5, phase 'data'"),
    "all": ([{}], "all 2 processes are stuck: 30 s in step 5, phase 'step'"),
    "raised": ([{"error": "OSError: no disk"}], "process 1 raised OSError: no disk, in step 5, phase 'step'"),
    "killed-not-who-met-it": ([{"error": BROKEN}, {"disconnected": True}], "process 2 disconnected"),
    "raised-not-who-met-it": ([{"error": BROKEN}, {"error": "OSError: no disk"}], "process 2 raised OSError"),
}


def judge(*others):
    """The verdict on process 0, which waits, and others that differ from it in these fields."""
    return verdict([WAITS, *(dataclasses.replace(WAITS, **other) for other in others)], 8.0, NOW)


@pytest.mark.parametrize("others, message", FAILURES.values(), ids=FAILURES)
def test_the_failed_process_is_named_with_its_step_and_phase(others, message):
    assert judge(*others).text.startswith(message)


def test_a_process_that_is_slow_within_its_limit_has_not_failed_though_others_wait():
    assert judge({"phases": 8, "phase": "save", "limit": 600}) is None


def test_a_process_that_finished_has_not_failed():
    done = {"finished": True, "disconnected": True, "last_beat": 0.0, "phases": 1}
    assert judge(done).text.startswith("process 0 is stuck")
    assert verdict([dataclasses.replace(WAITS, finished=True, disconnected=True)], 8.0, NOW) is None


def test_an_error_of_ours_is_a_mistake_for_all_and_any_other_error_is_not():
    assert judge({"error": "CheckpointError: no space", "code": MISTAKE}).code == MISTAKE
    assert judge({"error": "OSError: no disk"}).code == LOST


def test_a_time_below_two_signs_of_life_is_refused():
    with pytest.raises(ConfigError, match="Watchdog.silent = 1: must be above 2 seconds"):
        Watchdog(silent=1)
