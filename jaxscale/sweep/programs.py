"""JAX's persistent compilation cache, so that trials of one shape compile once, in any process."""

from __future__ import annotations

import os
from typing import Any

import jax

from jaxscale.data.cache import cache_folder
from jaxscale.import_path import python_path

_NUMERICS = (
    "jax_platforms",
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
"""JAX options that change a run's numbers, and that may have been set in this process by `jax.config`."""


def keep_programs() -> None:
    """Turn on JAX's compilation cache in this process, unless the user has set its folder."""
    if _set("jax_compilation_cache_dir") is None:
        for name, value in _cache_options().items():
            jax.config.update(name, value)


def environment() -> dict[str, str]:
    """Return environment variables for a process that runs trials: same modules, JAX options and compilation cache."""
    options = _cache_options()
    if _set("jax_compilation_cache_dir") is not None:
        options = {name: _set(name) for name in options}
    options |= {name: _set(name) for name in _NUMERICS if _set(name) not in (None, "")}
    if _set("jax_num_cpu_devices") > 0:
        options["jax_num_cpu_devices"] = _set("jax_num_cpu_devices")
    more = {name.upper(): str(value) for name, value in options.items()}
    return {**os.environ, **more, "PYTHONPATH": python_path()}


def _cache_options() -> dict[str, Any]:
    return {
        "jax_compilation_cache_dir": str(cache_folder().parent / "xla"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def _set(name: str) -> Any:
    return getattr(jax.config, name)
