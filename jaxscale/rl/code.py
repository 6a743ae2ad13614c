"""Run generated code in a process of its own, with limits."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

from jaxscale.config import register
from jaxscale.errors import ConfigError
from jaxscale.rl.rewards import Sample

_LAUNCHER = """
import ctypes, resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
NEWUSER, NEWNET = 0x10000000, 0x40000000
try:
    alone = ctypes.CDLL(None, use_errno=True).unshare(NEWUSER | NEWNET) == 0
except (OSError, AttributeError):
    alone = False
if not alone and sys.argv[3] == "require":
    sys.exit(97)
for name, limit in (("CPU", seconds), ("AS", memory), ("FSIZE", 1 << 20), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
source = sys.stdin.read()
exec(compile(source, "<generated>", "exec"), {"__name__": "__main__"})
"""
"""Runs first in the new process: leaves the network (Linux, where users may), sets limits, then runs the code."""

_NO_ISOLATION = 97


class CodeResult(NamedTuple):
    """What a piece of code did.

    Args:
      passed: whether it ended without an error.
      output: the last 10,000 characters of stdout and stderr.
      why: "passed", "error", "time" or "no isolation".
    """

    passed: bool
    output: str
    why: str


def run_code(source: str, *, seconds: float = 5.0, memory: int = 512 * 2**20, network: bool = False) -> CodeResult:
    """Run Python code in a new process, in an empty temporary folder, without this process's environment.

    It is no sandbox: the code runs as this user and may read files. On Linux it has no network where the kernel lets
    users make namespaces.

    Args:
      source: the code.
      seconds: of wall time, and of processor time rounded up.
      memory: bytes of address space.
      network: run it where the network cannot be taken away, too; else it then does not run.

    Raises:
      ConfigError: a limit is not above 0.
    """
    if not seconds > 0 or not memory > 0:
        raise ConfigError(f"run_code with seconds = {seconds} and memory = {memory}: both must be above 0")
    mode = "any" if network else "require"
    args = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(int(-(-seconds // 1))), str(memory), mode]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            args,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        why = ""
        try:
            process.communicate(source.encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            why = "time"
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the code has started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        size = out.seek(0, os.SEEK_END)
        out.seek(max(0, size - 10_000))
        output = out.read().decode(errors="replace")
    code = process.returncode
    if not why:
        killed = code == -signal.SIGXCPU or code == -signal.SIGKILL
        why = "passed" if code == 0 else "no isolation" if code == _NO_ISOLATION else "time" if killed else "error"
    return CodeResult(why == "passed", output, why)


@register
@dataclasses.dataclass(frozen=True)
class CodeReward:
    """1 where a completion's Python code passes the tests in the prompt's answer, else 0 (see `run_code`).

    Args:
      seconds: time limit of each.
      memory: bytes of address space of each.
      network: as of `run_code`.
      with_prompt: whether the code begins with the prompt.
    """

    seconds: float = 5.0
    memory: int = 512 * 2**20
    network: bool = False
    with_prompt: bool = True

    def __call__(self, sample: Sample) -> float:
        """Return the reward.

        Args:
          sample: the sample; its answer is Python code that raises an error if a test fails.

        Raises:
          RuntimeError: the network cannot be taken away from a process here.
        """
        source = f"{sample.prompt if self.with_prompt else ''}{sample.text}\n\n{sample.answer or ''}\n"
        result = run_code(source, seconds=self.seconds, memory=self.memory, network=self.network)
        if result.why == "no isolation":
            raise RuntimeError("this system does not let a process leave the network; set CodeReward.network = True")
        return float(result.passed)
