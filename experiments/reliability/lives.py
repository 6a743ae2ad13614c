"""Processes that are killed: forked from one that has imported everything, so that a start takes one second, not five.

The parent never uses a device. A child simulates its devices, joins the others where there are several, and runs a
function; it returns results to the parent only through files, since it may be killed at any time.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

import jaxscale as js
import jaxscale.infer
import jaxscale.train

os.environ.setdefault("JAX_PLATFORMS", "cpu")
for late in ("jax.experimental.multihost_utils", "rich.console", "rich.table", "einops"):
    importlib.import_module(late)  # what a run would import later


def configure(cache: Path) -> None:
    """Configure the parent before it forks: a shared compilation cache, and fast compilation without optimisation."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def start(run: Callable[[], None], processes: int, devices: int, log: Path) -> list[int]:
    """Fork children that run a function, joined by `init_distributed` where there are several; return their ids.

    Args:
      run: the function.
      processes: number of children.
      devices: simulated devices of each child.
      log: file for what they print.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    children = []
    for number in range(processes):
        child = os.fork()
        if child == 0:
            _live(run, number, processes, devices, address, log)
        children.append(child)
    return children


def _live(run: Callable[[], None], number: int, processes: int, devices: int, address: str, log: Path) -> None:
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        js.simulate_devices(devices)
        if processes > 1:
            js.init_distributed(address, processes, number, timeout=60)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def kill(children: Sequence[int]) -> None:
    """Send SIGKILL to children; they may be dead already, but nobody has waited for them yet."""
    for child in children:
        os.kill(child, signal.SIGKILL)


def wait(children: Sequence[int]) -> list[int]:
    """Wait for children to end; return their exit codes, negative for a signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def is_dead(child: int) -> bool:
    """Return whether a child has ended; it can still be waited for."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def until(condition: Callable[[], bool], children: Sequence[int], seconds: float = 120) -> bool:
    """Poll a condition as fast as possible; return whether it held before a child ended and the time was over."""
    end, looks = time.monotonic() + seconds, 0
    while not condition():
        looks += 1
        if looks % 200 == 0 and (any(map(is_dead, children)) or time.monotonic() > end):
            return condition()
        time.sleep(0.0002)
    return True
