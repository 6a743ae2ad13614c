"""Start JAX on several hosts."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxscale.errors import LayoutError
from jaxscale.layout.program_cache import compile_reordered_anew

log = logging.getLogger("jaxscale")


def init_distributed(
    address: str | None = None, processes: int | None = None, process: int | None = None, *, timeout: int = 300
) -> None:
    """Connect this process to the others; call it before anything uses a JAX device.

    Without arguments, JAX recognises the cluster: SLURM, Cloud TPU and GKE, Open MPI. Elsewhere give all three
    arguments, or the environment variables `JAXSCALE_COORDINATOR`, `JAXSCALE_PROCESSES`, `JAXSCALE_PROCESS`.

    Args:
      address: `host:port` of process 0, reachable from all processes.
      processes: the number of processes.
      process: this process's number, from 0.
      timeout: seconds to wait for the other processes.

    Raises:
      LayoutError: some of the three are missing, no cluster was recognised, or the other processes did not connect.
    """
    env = os.environ
    address = address or env.get("JAXSCALE_COORDINATOR")
    try:
        processes = processes if processes is not None else _number(env.get("JAXSCALE_PROCESSES"))
        process = process if process is not None else _number(env.get("JAXSCALE_PROCESS"))
    except ValueError as e:
        raise LayoutError(f"JAXSCALE_PROCESSES and JAXSCALE_PROCESS must be whole numbers: {e}") from None
    arguments = {"address": address, "processes": processes, "process": process}
    missing = [k for k, v in arguments.items() if v is None]
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


def compile_anew(devices: Sequence[jax.Device]) -> None:
    """Keep programs whose collectives would be reordered out of JAX's compilation cache; see `program_cache`.

    With CPU devices of several processes the whole cache is turned off, with a warning: only process 0 writes to it, so
    that process 0 could load a program that the other processes compile.

    Args:
      devices: the devices that programs will run on.
    """
    cpus = [d for d in devices if d.platform == "cpu"]
    if len(cpus) < 2 or (len({d.process_index for d in cpus}) == 1 and compile_reordered_anew()):
        return
    values = jax.config.values
    if values["jax_enable_compilation_cache"] and values["jax_compilation_cache_dir"]:
        log.warning(
            "JAX's compilation cache (%s) is off for programs over several CPU devices: a cached program can run its "
            "collectives in another order on each device",
            values["jax_compilation_cache_dir"],
        )
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()  # JAX reads the setting once


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)
