"""Choose the implementation of an op, by the platform that a program is lowered for.

`jax.devices()` returns "cpu" while a program is compiled for a pod, so the host's devices do not decide.
`lax.platform_dependent` selects the branch when the program is lowered. The kernel in that branch and its tiles are
chosen by the device kind of the mesh in scope, or of the default device where there is no mesh. A program that is
lowered for another platform runs the op's XLA implementation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from pallas_kernels import withdrawn
from pallas_kernels.arguments import checks_devices
from pallas_kernels.errors import KernelError, did_you_mean

__all__ = [
    "HOPPER",
    "JAX_VERSION",
    "NO_FLOAT16",
    "Choice",
    "Implementation",
    "KernelError",
    "Target",
    "best",
    "choosing",
    "chosen",
    "device",
    "dispatch",
    "forget",
    "hopper",
    "interpreted",
    "on_device",
]

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])

HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Names, one of which the device kind of each GPU of compute capability 9.0 contains."""

BLACKWELL = ("B100", "B200", "B300")
"""The same for compute capability 10, of which a GB200 is one, too."""

NO_FLOAT16 = "Mosaic loads no float16 on a TPU, which computes in bfloat16 and float32; XLA converts float16"
"""Why float16 has no kernel on TPUs: the compilers for v5e, v5p, v6e and tpu7x refuse loads and stores of it."""

_THREADS = 4  # at most three warpgroups, and the program around the kernel
_STAND_IN = {"tpu": "TPU v5 lite", "cuda": "NVIDIA H200"}  # device kind that an interpreted kernel is given
_INTERPRETED_CORES = 2  # multiprocessors of an interpreted GPU: enough that blocks share the work
_interpretation = jax.make_user_context(None)  # part of the key under which traces are cached
_chosen: dict[tuple[Any, ...], Choice] = {}
_logged: set[tuple[str, str, str]] = set()
_log = logging.getLogger("pallas_kernels")
_listening: list[dict[Any, Choice]] = []


@dataclasses.dataclass(frozen=True)
class Target:
    """The device that a program is compiled for.

    Args:
      kind: the device kind, such as "TPU v5 lite", "NVIDIA H200" or "cpu"; "" when only the platform is known.
      platform: "tpu", "cuda", "rocm" or "cpu".
      interpret: run the kernel in an interpreter on the CPU (tests).
      races: with `interpret`, detect data races.
      cores: multiprocessors of a GPU, which persistent kernels have so many blocks for; those of an H100 SXM or H200
        when the device does not tell.
    """

    kind: str
    platform: str
    interpret: bool = False
    races: bool = False
    cores: int = 132

    def tpu(self) -> Any:
        """Return the argument `interpret` of `pallas_call`."""
        if not self.interpret:
            return False
        from jax.experimental.pallas import tpu as pltpu

        return pltpu.InterpretParams(detect_races=self.races, uninitialized_memory="nan")

    def gpu(self) -> dict[str, Any]:
        """Return keyword arguments of `plgpu.kernel` for running in the interpreter, or none.

        Raises:
          KernelError: JAX's CPU client has too few threads to interpret a kernel.
        """
        if not self.interpret:
            return {}
        # Each interpreted warpgroup takes a thread of JAX's CPU client and waits for the others, and the calling
        # program holds one more thread: with fewer threads they deadlock.
        if max(os.cpu_count() or 1, jax.device_count("cpu")) < _THREADS:
            raise KernelError(
                f"interpreting a GPU kernel takes {_THREADS} threads, and JAX has one for each core or simulated "
                f"device; set jax.config.update('jax_num_cpu_devices', {_THREADS}) first"
            )
        from jax.experimental.pallas import mosaic_gpu

        plgpu: Any = mosaic_gpu  # jax 0.10 has no interpreter
        return {"interpret": plgpu.InterpretGPUParams(detect_races=self.races)}


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One implementation of an op.

    Args:
      name: such as "mosaic_tpu", "mosaic_gpu", "cudnn" or "xla".
      platforms: the platforms that it can be lowered for; `()` is any.
      supported: `(target, **case)` -> `None`, or a sentence why the case is not supported.
      run: `(target, *arrays, **case)` -> the op's outputs, the same tree for every implementation.
    """

    name: str
    platforms: tuple[str, ...]
    supported: Callable[..., str | None]
    run: Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that was chosen for one case of an op, and why preferred ones were not.

    Args:
      op: the op's name.
      platform: platform that was compiled for.
      kind: device kind that was compiled for; "" when no device was known.
      implementation: name of the chosen implementation.
      why_not: (name, reason) of each preferred implementation for that platform that could not be used; on an AMD GPU,
        of those for NVIDIA GPUs.
      case: the op's static arguments, as (name, value) pairs.
    """

    op: str
    platform: str
    kind: str
    implementation: str
    why_not: tuple[tuple[str, str], ...]
    case: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        because = "".join(f"; not {name}: {why}" for name, why in self.why_not)
        return f"{self.op} on {self.kind or self.platform}: {self.implementation}{because}"


def chosen(op: str | None = None) -> tuple[Choice, ...]:
    """Return the choices that this process has made so far, in order.

    A cached trace makes no new choice.

    Args:
      op: return only choices of this op; `None` returns those of all ops.
    """
    return tuple(c for c in _chosen.values() if op in (None, c.op))


@contextlib.contextmanager
def choosing() -> Iterator[dict[Any, Choice]]:
    """Collect the choices made within the context, also those made before.

    The context's value is a dict, whose values are the choices.
    """
    mine: dict[Any, Choice] = {}
    _listening.append(mine)
    try:
        yield mine
    finally:
        _listening.remove(mine)


def forget() -> None:
    """Clear the record that `chosen` returns."""
    _chosen.clear()
    _logged.clear()


def device() -> Target:
    """Return the target of compilation: a device of the mesh in scope, else the default device."""
    current = jax.sharding.get_abstract_mesh().abstract_device
    if current is None:
        default = jax.config.values["jax_default_device"]
        current = jax.devices(default)[0] if isinstance(default, str) else default or jax.devices()[0]
    platform = current.platform
    if platform in ("gpu", "cuda"):
        amd = any(maker in current.device_kind for maker in ("AMD", "Radeon", "gfx"))
        platform = "rocm" if amd else "cuda"  # "Tesla T4" does not name its maker
    # An H100 PCIe has 114 and an H20 78. An abstract device (of a mesh) and a real one name the number differently.
    cores = getattr(current, "num_cores", None) or getattr(current, "core_count", None) if platform == "cuda" else None
    return Target(current.device_kind, platform, cores=cores or Target.cores)


def dispatch(
    op: str,
    implementations: Sequence[Implementation],
    arrays: tuple[Any, ...],
    case: dict[str, Any],
    implementation: str | None = None,
    *,
    large: bool = False,
) -> Any:
    """Run an op with the named implementation, or with the best one for the device in scope.

    Args:
      op: name of the op.
      implementations: best first; the last one is supported everywhere.
      arrays: arguments of the implementation's `run`.
      case: hashable static arguments, for `supported` and `run`.
      implementation: name of an implementation, or `None` for the best.
      large: log why a kernel is not used on a TPU, too, because the case is too large for another implementation to be
        of use; on a GPU it is always logged.

    Returns:
      what the implementation's `run` returns.

    Raises:
      KernelError: the named implementation does not exist, is not supported here, or is withdrawn (`withdrawn.py`).
    """
    here = device()
    if implementation is not None:
        return _run_named(op, implementations, arrays, case, implementation, here)
    fallback, (one, _) = implementations[-1], _best(op, implementations, here, case, large, checks_devices(arrays))
    default = _bind(fallback, here, case)
    if one is fallback:
        return default(*arrays)
    # Lowered for another platform than that of the device in scope, the program runs the last implementation.
    kernel = _differentiated_once(op, _bind(one, here, case))
    return lax.platform_dependent(*arrays, default=default, **{here.platform: kernel})


def best(op: str, implementations: Sequence[Implementation], case: dict[str, Any]) -> Choice:
    """Return and record what `dispatch` chooses for the device in scope, without running it.

    Args:
      op: see `dispatch`.
      implementations: likewise.
      case: likewise.
    """
    return _best(op, implementations, device(), case, False)[1]


def _bind(chosen: Implementation, target: Target, case: dict[str, Any]) -> Callable[..., Any]:
    return lambda *arrays: chosen.run(target, *arrays, **case)


def _differentiated_once(op: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse derivatives of a kernel, which has those of its op's rule only: Pallas would fail without a word."""

    @jax.custom_jvp
    def guarded(arrays: Any) -> Any:
        return arrays

    @guarded.defjvp
    def _refuse(primals: Any, tangents: Any) -> Any:
        raise KernelError(
            f"{op}: this kernel has no forward mode and no second derivative; set implementation='xla', which has both"
        )

    return lambda *arrays: kernel(*guarded(arrays))


def _best(
    op: str,
    implementations: Sequence[Implementation],
    target: Target,
    case: dict[str, Any],
    large: bool,
    checked: bool = False,
) -> tuple[Implementation, Choice]:
    why_not: list[tuple[str, str]] = []
    for one in implementations:
        if one.platforms and target.platform not in one.platforms:
            if target.platform == "rocm" and "cuda" in one.platforms:
                why_not.append((one.name, "it is for NVIDIA GPUs"))
            continue
        why = _why_not(op, one, target, case, checked)
        if why is None:
            return one, _record(op, target, one, tuple(why_not), case, large)
        why_not.append((one.name, why))
    raise KernelError(f"{op} cannot run on {target.kind or target.platform}: {'; '.join(w for _, w in why_not)}")


def _run_named(
    op: str,
    implementations: Sequence[Implementation],
    arrays: tuple[Any, ...],
    case: dict[str, Any],
    name: str,
    target: Target,
) -> Any:
    by_name = {i.name: i for i in implementations}
    if name not in by_name:
        hint = did_you_mean(name, by_name)
        raise KernelError(f"{op} has no implementation '{name}'; it has {', '.join(map(repr, by_name))}{hint}")
    one = by_name[name]
    mode = _interpretation.value
    if mode is not None and one.platforms:
        platform = one.platforms[0]
        target = Target(_STAND_IN[platform], platform, True, mode == "races", _INTERPRETED_CORES)
    why = _why_not(op, one, target, case, checks_devices(arrays))
    if why is not None:
        raise KernelError(f"{op}: implementation='{name}' is not supported here: {why}")
    _record(op, target, one, (), case)
    run = _bind(one, target, case)
    return (_differentiated_once(op, run) if one.platforms else run)(*arrays)


def _why_not(op: str, one: Implementation, target: Target, case: dict[str, Any], checked: bool = False) -> str | None:
    if one.platforms and target.platform not in one.platforms:
        return (
            f"it is for {' and '.join(one.platforms)}, and this is {target.kind or target.platform}; "
            "leave implementation=None for the best one here"
        )
    if one.platforms and not target.interpret and (why := _unguarded()):
        return why
    if checked and not target.interpret and one.name.startswith("mosaic"):
        return "a shard_map that checks what differs between devices has no kernels; give it check_vma=False"
    if why := one.supported(target, **case):
        return why
    # A withdrawn kernel may be debugged in an interpreter. XLA is never withdrawn: it is the last choice.
    if not one.platforms or target.interpret or withdrawn.is_allowed():
        return None
    return withdrawn.why(op, one.name, target.kind, case)


def _unguarded() -> str | None:
    """Why the partitioner might meet a kernel, which it cannot partition and a TPU refuses; `None` when it will not."""
    mesh = jax.sharding.get_abstract_mesh()
    through = "call the op through jaxscale.parallel.sharded_op, or inside a shard_map"
    left = [f"{a}={n}" for a, n in mesh.shape.items() if n > 1 and a not in mesh.manual_axes]
    if left:
        return f"the mesh in scope leaves {', '.join(left)} to the partitioner, which cannot shard a kernel; {through}"
    if mesh.empty and jax.device_count() > 1:
        return (
            f"there are {jax.device_count()} devices and no mesh in scope, so the partitioner might have to "
            f"shard a kernel, which it cannot; {through}"
        )
    return None


def _record(
    op: str,
    target: Target,
    one: Implementation,
    why_not: tuple[tuple[str, str], ...],
    case: dict[str, Any],
    large: bool = False,
) -> Choice:
    choice = Choice(op, target.platform, target.kind, one.name, why_not, tuple(case.items()))
    line = op, target.kind, one.name
    if (large or target.platform in ("cuda", "rocm")) and why_not and line not in _logged:
        _logged.add(line)
        _log.warning("%s", choice)
    for record in (_chosen, *_listening):
        record[choice.op, choice.platform, choice.kind, choice.implementation, choice.case] = choice
    return choice


def hopper(target: Target, blackwell: bool = False) -> str | None:
    """Return why a Hopper kernel cannot run on `target`, or `None`. `supported` of each `gpu.py` calls this first.

    Args:
      target: the device to compile for.
      blackwell: whether the kernel runs on Blackwell in data centres, too, as one does that multiplies no matrices.
    """
    if target.kind and not any(name in target.kind for name in (*HOPPER, *(BLACKWELL if blackwell else ()))):
        written = f"Hopper ({', '.join(HOPPER[:2])})" + (f" and Blackwell ({BLACKWELL[1]})" if blackwell else "")
        return f"it is written for {written}, and this is {target.kind}"
    if JAX_VERSION < (0, 11):
        return f"kernels for GPUs need jax 0.11 or newer (Python 3.12), and this is jax {jax.__version__}"
    if not target.kind:
        return "no device is known to compile for; put a mesh of GPUs in scope (jax.set_mesh)"
    return None


@contextlib.contextmanager
def interpreted(races: bool = False) -> Iterator[None]:
    """Run Mosaic implementations that are chosen by name in their interpreter on the CPU (tests).

    Args:
      races: also detect data races, which is slower.
    """
    with _interpretation("races" if races else "plain"):
        yield


@contextlib.contextmanager
def on_device(kind: str, platform: str | None = None, cores: int | None = None) -> Iterator[None]:
    """Lower as for a device of this kind, which need not exist: `jit(f).trace(x).lower(lowering_platforms=...)`.

    Args:
      kind: such as "NVIDIA H200" or "TPU v6 lite".
      platform: "gpu" or "tpu"; read off the kind by default.
      cores: multiprocessors of a GPU; `Target.cores` by default.
    """
    platform = platform or ("tpu" if kind.startswith("TPU") else "gpu")
    cores = cores or (Target.cores if platform == "gpu" else 1)
    abstract = jax.sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    axis_type = jax.sharding.AxisType.Explicit  # Mosaic GPU reads the device of explicit meshes only
    mesh = jax.sharding.AbstractMesh((1,), ("_device",), (axis_type,), abstract_device=abstract)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
