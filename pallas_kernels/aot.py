"""Compile for hardware that is not present: TPUs through libtpu, GPUs through the CUDA plugin and a device description.

The compilers are real and the devices are not: programs can be compiled, measured and inspected, but not run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, PartitionSpec

from pallas_kernels.dispatch import BLACKWELL, JAX_VERSION, KernelError

log = logging.getLogger("pallas_kernels")

SHARED_MEMORY = 232448
"""Bytes of shared memory that one thread block may use on Hopper."""

SMALLEST = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""A TPU generation -> its smallest topology."""

# What XLA has to know about a GPU that is not present: figures of NVIDIA's data sheets, `deviceQuery` and XLA's own
# descriptions (openxla/xla, xla/backends/gpu/target_config/specs).
_GPU_TEXT = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: {shared} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
 memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
 shared_memory_per_block_optin: {block} cuda_compute_capability {{ {capability} }}
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "{name}"
 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{name}"
"""
_HOPPER = {
    "capability": "major: 9 feature_extension: ACCELERATED_FEATURES",
    **{"cores": 132, "fpus": 128, "clock": 1.98, "cache": 52428800, "shared": 233472, "block": SHARED_MEMORY},
}
_BLACKWELL = _HOPPER | {
    "capability": "major: 10 feature_extension: ACCELERATED_FEATURES",
    **{"cores": 148, "clock": 1.965, "cache": 132644864},
}
_AMPERE = {
    "capability": "major: 8",
    **{"cores": 108, "fpus": 64, "clock": 1.41, "cache": 41943040, "shared": 167936, "block": 166912},
}
GPUS = {
    "a100": _GPU_TEXT.format(name="NVIDIA A100-SXM4-80GB", bandwidth=2039000000000, memory=85100068864, **_AMPERE),
    "h100": _GPU_TEXT.format(name="NVIDIA H100 80GB HBM3", bandwidth=3350000000000, memory=84942979072, **_HOPPER),
    "h200": _GPU_TEXT.format(name="NVIDIA H200", bandwidth=4800000000000, memory=151397597184, **_HOPPER),
    "b200": _GPU_TEXT.format(name="NVIDIA B200", bandwidth=7672000000000, memory=191514411008, **_BLACKWELL),
}
"""A GPU's name -> its description for XLA."""


def kind_of(topology: str) -> str:
    """Return the device kind of named hardware. Of a GPU this works without a compiler for it.

    Args:
      topology: as for `devices_of`.

    Raises:
      KernelError: as `devices_of`.
    """
    if text := GPUS.get(topology.strip().lower().partition(":")[0]):
        return text.partition('device_description_str: "')[2].partition('"')[0]
    return str(devices_of(topology)[0].device_kind)


@functools.cache
def devices_of(topology: str) -> tuple[Any, ...]:
    """Return the devices of named hardware, none of which has to be present.

    Args:
      topology: a TPU slice, as "v5p:8x8x8" or "v5e:4x4" (a generation alone is its smallest slice); several slices, as
        "v5p:8x8x8*2" (each device has its `slice_index`); a number of GPUs, as "h200:8" ("h200" is one); or "h200:8x4"
        for four hosts of eight GPUs.

    Raises:
      KernelError: the name is unknown, or the compiler for it is not installed.
    """
    topology = topology.strip().lower()
    slice_name, star, slices = topology.partition("*")
    name, _, shape = slice_name.partition(":")
    if star and (name not in SMALLEST or not slices.isdigit() or not int(slices)):
        raise KernelError(f"'{topology}': only TPUs have several slices, written as 'v5p:8x8x8*2'")
    if name in GPUS:
        return _gpu_devices(name, shape or "1", topology)
    if name in SMALLEST:
        return _tpu_devices(slice_name if shape else SMALLEST[name], int(slices or 1))
    known = ", ".join((*SMALLEST, *GPUS))
    raise KernelError(f"there is no hardware '{topology}'; name one of {known}, as in 'v5p:8x8x8' or 'h200:8'")


def why_no_tpu() -> str | None:
    """Return why this process cannot compile for TPUs, or `None`."""
    if importlib.util.find_spec("libtpu") is None:
        return "compiling for a TPU needs libtpu, which the extra [tpu] brings: make install EXTRAS=plot,tpu"
    return None


def why_no_gpu() -> str | None:
    """Return why this process cannot compile for a GPU that is not present, or `None`."""
    if JAX_VERSION < (0, 11):
        return f"compiling for a GPU that is not here needs jax 0.11 (Python 3.12), and this is jax {jax.__version__}"
    if importlib.util.find_spec("jax_cuda13_plugin") is None or _cuda_folder() is None:
        return "compiling for a GPU that is not here needs the extra [gpu-aot]: make install EXTRAS=plot,gpu-aot"
    return None


def _tpu_devices(topology: str, slices: int) -> tuple[Any, ...]:
    if why := why_no_tpu():
        raise KernelError(why)
    import libtpu
    from jax.experimental import topologies

    if not list(Path("/dev").glob("accel*")) and not list(Path("/dev").glob("vfio/[0-9]*")):
        # No TPU: do not ask the cloud's metadata server about this machine, and allow several processes.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        # libtpu complains where these are unset; topologies do not depend on them.
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_LIBRARY_PATH", str(Path(libtpu.__file__).parent / "libtpu.so"))
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    options: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # one device per chip, as on Cloud TPU; libtpu's default is two
    try:
        return tuple(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    except Exception as e:  # what it raises is not documented
        reason = str(e).strip().splitlines()[-1][:200]
        near = SMALLEST[topology.partition(":")[0]]
        raise KernelError(f"libtpu knows no slice '{topology}' ({reason}); the smallest is '{near}'") from e


def _gpu_devices(name: str, count: str, topology: str) -> tuple[Any, ...]:
    if why := why_no_gpu():
        raise KernelError(why)
    per_host, by, hosts = count.partition("x")
    n = int(per_host) * int(hosts or 1) if per_host.isdigit() and (hosts.isdigit() or not by) else 0
    if not n or (n > 8 and n % 8) or (by and int(per_host) > 8):
        raise KernelError(
            f"'{topology}': give a number of GPUs, 1 to 8 or a multiple of 8, as in '{name}:8' or '{name}:8x4'"
        )
    from jax.experimental import topologies

    each = int(per_host) if by else min(n, 8)
    shape = f"1x{n // each}x{each}"  # slices, hosts, GPUs of a host
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # drivers and libraries that only a GPU needs
    try:
        with _cuda_tools():
            devices = topologies.get_topology_desc(platform="cuda", target_config=GPUS[name], topology=shape).devices
    except Exception as e:  # what it raises is not documented
        raise KernelError(
            f"JAX's CUDA plugin cannot describe '{topology}' ({str(e).strip().splitlines()[0][:120]}); start Python "
            "with JAX_PLATFORMS=cpu in the environment"
        ) from e
    return tuple(devices)


def _cuda_folder() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        if (Path(root) / "cu13" / "bin" / "ptxas").exists():
            return Path(root) / "cu13"
    return None


@contextlib.contextmanager
def _cuda_tools() -> Iterator[None]:
    """Put ptxas on the path: Mosaic searches there, while XLA has an option for it."""
    folder, before = _cuda_folder(), os.environ.get("PATH", "")
    os.environ["PATH"] = f"{folder / 'bin'}{os.pathsep}{before}" if folder is not None else before
    try:
        yield
    finally:
        os.environ["PATH"] = before


def compiler_options(devices: Sequence[Any]) -> dict[str, Any]:
    """Return options of `Lowered.compile` for devices that are not present.

    Args:
      devices: of `devices_of`.
    """
    if devices[0].platform not in ("gpu", "cuda"):
        return {}
    return {"xla_gpu_cuda_data_dir": str(_cuda_folder()), "xla_gpu_autotune_level": 0}  # autotuning needs a device


def compile_lowered(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> jax.stages.Compiled:
    """Compile a lowered program for devices that are not present.

    Where XLA would have to try Triton configurations on a device, compile with cuBLAS instead and log a warning.

    Args:
      lowered: a `jax.stages.Lowered`.
      devices: of `devices_of`.

    Returns:
      a `jax.stages.Compiled`, which cannot be run.
    """
    options = compiler_options(devices)
    if options:
        _same_architecture(lowered, devices)
    with _uncached(), _cuda_tools() if devices[0].platform in ("gpu", "cuda") else contextlib.nullcontext():
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as e:
            if "No supported config found" not in str(e):
                raise
            # XLA chooses the Triton configuration of some matrix products by trying them on a device.
            log.warning(
                "without a GPU to try them on, XLA finds no Triton configuration for a matrix product: this program's "
                "products use cuBLAS instead, and time and memory may differ on a GPU"
            )
            return lowered.compile(compiler_options=options | {"xla_gpu_enable_triton_gemm": False})


_compiled_for: list[str] = []
"""The kind of GPU that this process compiled kernels for first."""


def _same_architecture(lowered: jax.stages.Lowered, devices: Sequence[Any]) -> None:
    """Refuse kernels for a second architecture.

    JAX 0.11 would start ptxas with the options of the first one, and 0.12 would take its machine code.
    """
    if "mosaic_gpu" not in lowered.as_text():
        return
    kind = devices[0].device_kind
    if not _compiled_for:
        _compiled_for.append(kind)
    first = _compiled_for[0]
    if any(name in kind for name in BLACKWELL) != any(name in first for name in BLACKWELL):
        raise KernelError(
            f"this process has compiled kernels for {first}, and JAX compiles them for one architecture in a process: "
            f"start another one for {kind}"
        )


@contextlib.contextmanager
def _uncached() -> Iterator[None]:
    """Disable the compilation cache: it stores these programs and cannot load them without a device."""
    before = jax.config.values["jax_enable_compilation_cache"]
    if not before or not jax.config.values["jax_compilation_cache_dir"]:
        yield
        return

    def enable(value: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", value)
        compilation_cache.reset_cache()  # JAX decides only once whether it uses a cache

    enable(False)
    try:
        yield
    finally:
        enable(True)


def compile_kernel(fn: Callable[..., Any], *shapes: Any, topology: str) -> jax.stages.Compiled:
    """Compile a function of local arrays inside `shard_map`, as it runs on every device of a mesh.

    Args:
      fn: the function that one device runs.
      *shapes: trees of `jax.ShapeDtypeStruct`: the local arrays.
      topology: as for `devices_of`; the smallest suffices, since the number of devices makes no difference.

    Returns:
      a `jax.stages.Compiled`, which cannot be run.

    Raises:
      KernelError: no compiler for this hardware is installed.
    """
    devices = devices_of(topology)
    mesh = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    whole = PartitionSpec()
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        shapes = jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=jax.NamedSharding(mesh, whole)), shapes
        )
        return compile_lowered(jax.jit(mapped).lower(*shapes), devices)


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas reports about a kernel.

    Args:
      name: of the kernel.
      registers: per thread.
      spill_bytes: bytes stored and loaded because registers ran out.
      wgmma_serialised: whether asynchronous matrix products wait for each other.
      shared_memory: bytes per thread block; of several kernels of one name, the most.
      instructions: static count in the PTX.
    """

    name: str
    registers: int
    spill_bytes: int
    wgmma_serialised: bool
    shared_memory: int
    instructions: int

    @property
    def problem(self) -> str | None:
        """Why this kernel must not ship, or `None`."""
        if self.spill_bytes:
            return f"{self.spill_bytes} bytes of registers spilled"
        if self.wgmma_serialised:
            return "its wgmma instructions are serialised"
        if self.shared_memory > SHARED_MEMORY:
            return f"{self.shared_memory} bytes of shared memory, and a block may use {SHARED_MEMORY}"
        return None


def kernel_reports(fn: Callable[..., Any], *shapes: Any, topology: str | None = "h200") -> list[Report]:
    """Compile a function for a GPU and return ptxas' report on each Mosaic kernel in it.

    Some versions of jax (0.12) compile equal kernels of two functions once in a process; the second function then gets
    the reports of the first.

    Args:
      fn: the function that one device runs.
      *shapes: trees of `jax.ShapeDtypeStruct`: its arguments.
      topology: a GPU, or `None` for the device of this process, with the compiler that it runs with.

    Raises:
      KernelError: the compiler is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_TO": folder}
        before = {name: os.environ.get(name) for name in flags}
        os.environ.update(flags)
        jax.clear_caches()
        try:
            if topology is None:
                compiled = jax.jit(fn).lower(*shapes).compile()
            else:
                compiled = compile_kernel(fn, *shapes, topology=topology)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        reports = [_read_report(path) for path in sorted(Path(folder).glob("*.ptxas"))]
    kernels = set(_KERNEL_HASH.findall(compiled.as_text() or ""))
    before_this = [r for kernel in sorted(kernels) for r in _REPORTS.get(kernel, ())]
    if reports:  # which report is which kernel's is not written down, so each new kernel has all of them
        _REPORTS.update((kernel, reports) for kernel in kernels if kernel not in _REPORTS)
    return list(dict.fromkeys(reports + before_this))


_KERNEL_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')
_REPORTS: dict[str, list[Report]] = {}
"""Reports of the kernels that this process has compiled, by XLA's hash."""


def _read_report(path: Path) -> Report:
    text = path.read_text()
    ptx = path.with_suffix(".ptx")
    code = ptx.read_text() if ptx.exists() else ""
    registers = re.search(r"Used (\d+) registers", text)
    # The lowering writes the resources and the compiler the rest, and each numbers the kernels of a name by itself.
    # So files cannot be matched by number: take the maximum, which bounds each kernel.
    resources = path.parent.glob(f"{path.stem.rpartition('_')[0]}_*.resources.txt")
    shared = [int(n) for file in resources for n in re.findall(r"smem_scratch_bytes=(\d+)", file.read_text())]
    if not shared:
        raise KernelError(
            f"no shared memory is recorded for the kernel '{path.stem}'; this version of jax may have renamed its dumps"
        )
    return Report(
        name=path.stem,
        registers=int(registers[1]) if registers else 0,
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill", text)),
        wgmma_serialised="C7512" in text or "serialized" in text,
        shared_memory=max(shared),
        instructions=len(re.findall(r"^\s+[@a-z][^;{}]*;", code, re.M)),
    )
