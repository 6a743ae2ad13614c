"""Starting JAX on several hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.errors import LayoutError
from jaxscale.layout.program_cache import compile_reordered_anew

log = logging.getLogger("jaxscale")


def init_distributed(
    address: str | None = None, processes: int | None = None, process: int | None = None, *, timeout: int = 300
) -> None:
    """Joins this process to the others; call it first thing, before any device is touched.

    With no arguments the cluster is recognised by JAX itself: SLURM, Cloud TPU and GKE, Open MPI. Elsewhere give all
    three arguments, or the environment variables `JAXSCALE_COORDINATOR`, `JAXSCALE_PROCESSES`, `JAXSCALE_PROCESS`.

    Args:
      address: `host:port` of process 0, reachable from all.
      processes: number of processes.
      process: this process's number, from 0.
      timeout: seconds to wait for the others.

    Raises:
      LayoutError: some of the three are missing, nothing was recognised, or the others did not come.
    """
    env = os.environ
    address = address or env.get("JAXSCALE_COORDINATOR")
    try:
        processes = processes if processes is not None else _number(env.get("JAXSCALE_PROCESSES"))
        process = process if process is not None else _number(env.get("JAXSCALE_PROCESS"))
    except ValueError as e:
        raise LayoutError(f"JAXSCALE_PROCESSES and JAXSCALE_PROCESS must be whole numbers: {e}") from None
    given = {"address": address, "processes": processes, "process": process}
    missing = [k for k, v in given.items() if v is None]
    if 0 < len(missing) < 3:
        raise LayoutError(f"init_distributed got no {' and no '.join(missing)}; give address, processes and process")
    if processes is not None and process is not None and not 0 <= process < processes:
        raise LayoutError(f"process {process} is not one of {processes} processes; count from 0 to {processes - 1}")
    if jax.distributed.is_initialized():
        return  # a notebook cell run twice
    if getattr(jax.config, "jax_platforms", None) == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(address, processes, process, initialization_timeout=timeout)
    except (ValueError, RuntimeError) as e:
        hint = "" if address else "; no cluster was recognised: give --distributed host:port,processes,process"
        raise LayoutError(f"could not start distributed JAX: {str(e).splitlines()[0]}{hint}") from None


def compile_anew(devices: Sequence[Any]) -> None:
    """Keeps programs whose collectives would be reordered out of JAX's compilation cache; see `program_cache`.

    Over the CPUs of several processes the whole cache is turned off, and this is said: process 0 alone writes, and
    would read what the others compile.

    Args:
      devices: those that programs will go over.
    """
    cpus = [d for d in devices if d.platform == "cpu"]
    if len(cpus) < 2 or (len({d.process_index for d in cpus}) == 1 and compile_reordered_anew()):
        return
    values = jax.config.values
    if values["jax_enable_compilation_cache"] and values["jax_compilation_cache_dir"]:
        log.warning(
            "programs over several CPU devices are compiled anew, and JAX's compilation cache (%s) is off: "
            "those that come from it can mix up the devices' messages",
            values["jax_compilation_cache_dir"],
        )
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # whether there is one is asked once


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
