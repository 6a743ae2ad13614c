"""Compiled programs are kept on disk, so that trials of one shape compile once, in whichever process."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from jaxscale.data.cache import cache_folder

_OPTIONS = {
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def keep_programs() -> None:
    """In this process; where somebody has chosen a folder, that is left alone."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder().parent / "xla"))
        for name, value in _OPTIONS.items():
            jax.config.update(name, value)


def environment() -> dict[str, str]:
    """Of a process that runs trials: our modules, as many simulated devices as here, and the same kept programs."""
    kept = {"jax_compilation_cache_dir": str(cache_folder().parent / "xla"), **_OPTIONS}
    if jax.config.jax_compilation_cache_dir is not None:
        kept = {name: getattr(jax.config, name) for name in kept}
    if jax.config.jax_num_cpu_devices > 0:
        kept["jax_num_cpu_devices"] = jax.config.jax_num_cpu_devices
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, **{name.upper(): str(value) for name, value in kept.items()}, "PYTHONPATH": path}
