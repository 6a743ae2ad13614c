"""Generated code runs apart, with limits of time, memory and network."""

from __future__ import annotations

import pytest

from jaxscale.errors import ConfigError
from jaxscale.rl import CodeReward, Sample, run_code


def ran(source, **limits):
    return run_code(source, network=True, **{"seconds": 5.0, **limits})


def test_code_that_ends_without_an_error_passes():
    assert ran("print(sum(range(5)))") == (True, "10\n", "passed")
    failed = ran("assert 1 + 1 == 3, 'no'")
    assert not failed.passed and failed.why == "error" and "AssertionError: no" in failed.output
    assert ran("def f(:").why == "error" and ran("import os; os._exit(3)").why == "error"


def test_limits_of_time_and_memory_hold():
    assert ran("while True: pass", seconds=0.5).why == "time"
    assert "MemoryError" in ran("x = bytearray(10**9)", memory=256 * 2**20).output
    many = "open('a', 'wb').write(b'x' * 2**22)"
    assert not ran(many).passed
    assert ran("import os, time\nif os.fork() == 0: time.sleep(60)\nelse: print('left a child')").passed
    with pytest.raises(ConfigError, match="both must be above 0"):
        run_code("", seconds=0)


def test_code_does_not_see_this_process_or_the_network(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_USER", "1")
    assert ran("import os; print('SECRET_OF_THE_USER' in os.environ, os.listdir('.'))").output == "False []\n"
    connect = "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 1)\nexcept OSError as e: print(e.errno)"
    isolated = run_code(connect)
    assert isolated.why == "no isolation" or isolated.output == "101\n", isolated  # 101: network is unreachable


def test_a_completion_is_rewarded_by_the_tests_in_its_answer():
    def sample(text):
        return Sample("def double(x):\n", text, "assert double(4) == 8", (), (), (), "stop")

    reward = CodeReward(network=True)
    assert [reward(sample(t)) for t in ("    return 2 * x", "    return x", "  retur")] == [1, 0, 0]
