"""`Layout`: a mesh and the rules that lay named dimensions on it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxscale.config import register
from jaxscale.errors import LayoutError
from jaxscale.layout.axes import AXES, FILLED, MESH_AXES, REPLICABLE, check_axis, check_mesh_axis
from jaxscale.layout.mesh import make_mesh, parse_mesh, resolve_sizes
from jaxscale.layout.pipeline import Pipeline
from jaxscale.layout.rules import Kind, Rules, preset

log = logging.getLogger("jaxscale")

# The layout in force. A user context is part of the key under which JAX caches traces: in a global or a context
# variable, a second layout on the same mesh would silently reuse the first one's specs.
_active = jax.make_user_context(None)


class _Stacks(threading.local):
    """What each thread has entered, the innermost layout last."""

    def __init__(self) -> None:
        self.entered: list[contextlib.ExitStack] = []


_stacks = _Stacks()


def current() -> Layout | None:
    """The layout whose `with` block we are in, or `None`."""
    return _active.value


@register
@dataclasses.dataclass(frozen=True)
class Layout:
    """Lays named dimensions over devices.

    `with layout:` puts it in force: `constrain` reads it, and `jit` sees its mesh.

    Args:
      mesh: sizes by mesh axis, as `"data=2,fsdp=2,tensor=2"`; one may be -1 (the rest of the devices).
      rules: a preset's name (see `jaxscale.layout.PRESETS`) or a `Rules`.
      sequence_sharded: with a preset, split the residual stream's sequence over `tensor` too.
      pipeline: the schedule of a mesh with a `pipeline` axis, as "1f1b:8" or a `Pipeline`; `None` is `Pipeline()`.
      across: on several TPU slices, the mesh axis that goes over them, as "data": its size counts all slices
        ("data=2,fsdp=64" over two slices of 64). Without effect on one slice.

    Raises:
      LayoutError: an unknown mesh axis, rule preset, logical axis or schedule (when built); too few devices (when
        used).
    """

    mesh: str = "data=-1"
    rules: str | Rules = "fsdp_tensor"
    sequence_sharded: bool = False
    pipeline: str | Pipeline | None = None
    across: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, str):
            raise LayoutError(f"a mesh is written as text, such as 'data=2,tensor=4', not {self.mesh!r}")
        parse_mesh(self.mesh)
        Pipeline.of(self.pipeline)
        if self.across is not None:
            check_mesh_axis(self.across, "Layout.across")
        if isinstance(self.rules, str):
            preset(self.rules)
        elif self.sequence_sharded:
            raise LayoutError(
                "Layout.sequence_sharded goes with a preset; in your own Rules map 'residual_seq' to "
                "('context', 'tensor') instead"
            )

    @functools.cached_property
    def resolved_rules(self) -> Rules:
        """The `Rules` themselves, a preset's name looked up."""
        if isinstance(self.rules, Rules):
            return self.rules
        return preset(self.rules, sequence_sharded=self.sequence_sharded)

    @functools.cached_property
    def schedule(self) -> Pipeline:
        """The pipeline's schedule, a short form read."""
        return Pipeline.of(self.pipeline)

    @property
    def stages(self) -> int:
        """How many pipeline stages there are; 1 is none."""
        return self.sizes["pipeline"]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Every mesh axis and its size. Needs devices only to fill in a -1."""
        sizes = parse_mesh(self.mesh)
        devices = jax.device_count() if -1 in sizes.values() else math.prod(sizes.values())
        return resolve_sizes(sizes, devices, self.mesh)

    @functools.cached_property
    def device_mesh(self) -> Mesh:
        """The mesh of devices, made when first used."""
        return make_mesh(self.mesh, across=self.across)

    @property
    def specification(self) -> Layout:
        """The layout without the devices that it is placed on, if it is."""
        return self

    def on(self, devices: Sequence[Any]) -> PlacedLayout:
        """The same layout on these devices, which need not be this machine's (compiling for a pod).

        Raises:
          LayoutError: too few devices, or a -1 that they do not fill.
        """
        if math.prod(parse_mesh(self.mesh).values()) > len(devices):
            raise LayoutError(
                f"mesh '{self.mesh}' needs {math.prod(parse_mesh(self.mesh).values())} devices and was given "
                f"{len(devices)}; use a larger topology or a smaller mesh"
            )
        return self._placed(make_mesh(self.mesh, devices, across=self.across))

    def abstract(self, devices: int | None = None, *, kind: str | None = None) -> PlacedLayout:
        """The same layout on devices that do not exist: programs can be traced under it, and nothing can be placed.

        Args:
          devices: how many there would be, for a mesh with a -1; else the mesh says.
          kind: their device kind, as "TPU v5" or "NVIDIA H200", by which kernels are chosen.

        Raises:
          LayoutError: as `on`.
        """
        sizes = self.sizes if devices is None else resolve_sizes(parse_mesh(self.mesh), devices, self.mesh)
        device = None if kind is None else AbstractDevice(kind, None, "tpu" if kind.startswith("TPU") else "gpu")
        types = (AxisType.Auto,) * len(sizes)
        return self._placed(AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types, abstract_device=device))

    def _placed(self, mesh: Mesh | AbstractMesh) -> PlacedLayout:
        return PlacedLayout(**_fields(self), placement=mesh)

    @property
    def devices(self) -> int:
        """How many devices the layout spans."""
        return math.prod(self.sizes.values())

    def __enter__(self) -> Layout:
        with contextlib.ExitStack() as stack:  # what fails half-way leaves nothing in force
            mesh: Any = self.device_mesh
            abstract = isinstance(mesh, AbstractMesh)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh) if abstract else jax.set_mesh(mesh))
            stack.enter_context(_active(self))
            _stacks.entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc: Any) -> None:
        _stacks.entered.pop().close()

    def __reduce__(self) -> Any:
        # the specification alone: another process has other devices
        return functools.partial(Layout, **_fields(self)), ()

    def cut(
        self, axis: str, kind: Kind = "activations", *, size: int | None = None, manual: Collection[str] = ()
    ) -> tuple[str, ...]:
        """The mesh axes of several devices that cut a dimension of this name.

        Args:
          axis: a logical axis.
          kind: which of the four maps to read.
          size: the dimension's size, where it is known: key heads that do not divide are not cut (`REPLICABLE`).
          manual: mesh axes that a `shard_map` around us cuts already.

        Raises:
          LayoutError: no such logical axis.
        """
        check_axis(axis, "Layout.cut")
        over = tuple(m for m in self.resolved_rules.target(kind, axis) if self.sizes[m] > 1 and m not in manual)
        return () if axis in REPLICABLE and size is not None and size % self._pieces(over) else over

    def split(self, axis: str, kind: Kind = "activations", *, size: int | None = None) -> int:
        """Into how many pieces a dimension of this name, and of this size where it is known, is cut; see `cut`."""
        check_axis(axis, "Layout.split")
        return self._pieces(self.cut(axis, kind, size=size))

    def why_whole(
        self, axis: str | None, size: int, kind: Kind = "activations", *, manual: Collection[str] = ()
    ) -> str | None:
        """Why a dimension stays whole that the rules would cut, as "1 on tensor=2"; else `None`; arguments as `cut`."""
        if axis not in REPLICABLE:
            return None
        over = self.cut(axis, kind, manual=manual)
        if self.cut(axis, kind, size=size, manual=manual) == over:
            return None
        return f"{size} on {' x '.join(f'{m}={self.sizes[m]}' for m in over)}"

    def filled(self, axis: str | None, size: int, manual: Collection[str] = ()) -> int:
        """The size at which a dimension of this name and size is used: of a vocabulary, the next that devices divide.

        Args:
          axis, size: the dimension.
          manual: mesh axes that a `shard_map` around us cuts already.
        """
        if axis not in FILLED:
            return size
        pieces = self._pieces([m for m in self.resolved_rules.target("activations", axis) if m not in manual])
        return -(-size // pieces) * pieces

    def spec(
        self,
        axes: Sequence[str | None],
        shape: Sequence[int] | None = None,
        *,
        kind: Kind = "params",
        name: str = "",
        manual: Collection[str] = (),
    ) -> PartitionSpec:
        """The partition spec of a tensor from the names of its dimensions.

        A stack of layers that cannot lie on a pipeline stage after stage, because the stages do not divide it or hold
        several chunks each, is cut along its first other dimension that divides instead; each step then brings every
        layer to its stage. So is a parameter, its gradient or its state, whose vocabulary does not divide; a vector of
        a vocabulary is then left whole.
        Key heads (`kv_heads`) that their mesh axes do not divide are not cut.

        Args:
          axes: a logical axis (or `None`) per dimension.
          shape: the dimensions' sizes; when given, divisibility is checked.
          kind: which of the four maps to read.
          name: the tensor's name, for errors.
          manual: mesh axes that a `shard_map` around us cuts already; `shape` is of what it left.

        Raises:
          LayoutError: an unknown name, two dimensions on one mesh axis, or a dimension that does not divide.
        """
        what = f"{name or 'a tensor'} {tuple(axes)}" + (f" of shape {tuple(shape)}" if shape is not None else "")
        if shape is not None and len(axes) != len(shape):
            raise LayoutError(f"{what} has {len(shape)} dimensions and {len(axes)} names; give one name per dimension")
        parts: list[Any] = []
        used: dict[str, str | None] = {}
        for i, (axis, target) in enumerate(zip(axes, self._targets(axes, shape, kind, what, manual), strict=True)):
            for m in target:
                if m in used:
                    raise LayoutError(
                        f"{what}: the rules for {kind} put both '{used[m]}' and '{axis}' on the mesh axis '{m}'; "
                        f"map one of them to another axis or to None"
                    )
                used[m] = axis
            pieces = self._pieces(target)
            if shape is not None and axis is not None and shape[i] % pieces:
                raise LayoutError(f"{what}: {self._indivisible(axis, shape[i], target, pieces, kind)}")
            parts.append(target[0] if len(target) == 1 else target or None)
        return PartitionSpec(*parts)

    def _targets(
        self,
        axes: Sequence[str | None],
        shape: Sequence[int] | None,
        kind: Kind,
        what: str,
        manual: Collection[str],
    ) -> list[tuple[str, ...]]:
        """The mesh axes that cut each dimension."""
        targets: list[tuple[str, ...]] = []
        for i, axis in enumerate(axes):
            if axis is not None:
                check_axis(axis, what)
            size = None if shape is None else shape[i]
            targets.append(() if axis is None else self.cut(axis, kind, size=size, manual=manual))
        for at, axis in enumerate(axes):
            if shape is None or not self._moves(axis, shape[at], targets[at], kind):
                continue
            for i, size in enumerate(shape):
                if i != at and size % self._pieces((*targets[i], *targets[at])) == 0:
                    targets[i], targets[at] = (*targets[i], *targets[at]), ()
                    break
            if axis in FILLED and len(shape) == 1:
                targets[at] = ()
        return targets

    def _moves(self, axis: str | None, size: int, target: Sequence[str], kind: Kind) -> bool:
        """Whether what would cut a dimension cuts another one of its tensor instead."""
        divides = size % self._pieces(target) == 0
        if axis == "layers":
            return "pipeline" in target and not (divides and self.schedule.chunks_per_stage == 1)
        return axis in FILLED and kind != "activations" and not divides

    def _pieces(self, target: Sequence[str]) -> int:
        return math.prod(self.sizes[m] for m in target)

    def _indivisible(self, axis: str, size: int, target: tuple[str, ...], pieces: int, kind: Kind) -> str:
        below, above = size // pieces * pieces, -(-size // pieces) * pieces
        fitting = math.gcd(size, pieces)  # which also divides what these pieces divide
        mesh = " x ".join(f"{m}={self.sizes[m]}" for m in target)
        sizes = f"{below} or {above}" if below else f"{above}"
        return (
            f"the rule {kind}['{axis}'] = {target if len(target) > 1 else target[0]!r} cuts {size} into {pieces} "
            f"pieces ({mesh}), which does not divide; the nearest '{axis}' that does is {sizes}, "
            f"the nearest number of pieces is {fitting}"
        )

    def sharding(
        self, axes: Sequence[str | None], shape: Sequence[int] | None = None, *, kind: Kind = "params", name: str = ""
    ) -> NamedSharding:
        """`spec`, bound to the devices."""
        return NamedSharding(self.device_mesh, self.spec(axes, shape, kind=kind, name=name))

    @property
    def replicated(self) -> NamedSharding:
        """A whole copy on every device."""
        return NamedSharding(self.device_mesh, PartitionSpec())

    def __str__(self) -> str:
        named = ",".join(f"{a}={self.sizes[a]}" for a in MESH_AXES if self.sizes[a] > 1) or "one device"
        rules = self.rules if isinstance(self.rules, str) else "own rules"
        more = [", sequence-sharded"] if self.sequence_sharded else []
        more += [f", {self.schedule.name}"] if self.stages > 1 else []
        return f"{named} ({rules}{''.join(more)})"


@dataclasses.dataclass(frozen=True)
class PlacedLayout(Layout):
    """A layout on certain devices, as `Layout.on` and `Layout.abstract` make it.

    Equality and hash include the devices, so that nothing made for some devices (a compiled program, an engine, loaded
    parameters) is used on others. Pickled, it is the `Layout` without them.

    Args:
      placement: the mesh, whose sizes are those of `mesh`.
    """

    placement: Mesh | AbstractMesh | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        wanted = parse_mesh(self.mesh)
        sizes = {} if self.placement is None else dict(self.placement.shape)
        if tuple(sizes) != MESH_AXES or any(wanted.get(a, 1) not in (-1, n) for a, n in sizes.items()):
            raise LayoutError(f"the layout is placed on {sizes}, which is not '{self.mesh}'; place it with Layout.on")

    @property
    def specification(self) -> Layout:
        """The layout without its devices."""
        return Layout(**_fields(self))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Every mesh axis and its size."""
        return dict(self.device_mesh.shape)

    @functools.cached_property
    def device_mesh(self) -> Mesh:
        """The mesh of its devices."""
        return self.placement  # type: ignore[return-value]  # nothing can be put on an abstract one


def _fields(layout: Layout) -> dict[str, Any]:
    return {f.name: getattr(layout, f.name) for f in dataclasses.fields(Layout)}


_NOUN = {"activations": "the activation", "params": "the parameter", "grads": "the gradient", "opt_state": "the state"}


def constrain(x: jax.Array, *axes: str | None, kind: Kind = "activations") -> jax.Array:
    """Names an activation's dimensions, so that the layout in force says where it lives.

    A no-op outside of a layout.

    Args:
      x: an array, traced or not.
      *axes: a logical axis or `None` per dimension of `x`.
      kind: which of the rules' four maps to read.

    Raises:
      LayoutError: an unknown name (with or without a layout), a collision, or a dimension that does not divide.
    """
    layout = current()
    if layout is None:
        for a in axes:
            if a is not None and a not in AXES:
                check_axis(a, f"constrain(..., {', '.join(map(repr, axes))})")
        return x
    manual = jax.sharding.get_abstract_mesh().manual_axes  # of a shard_map around us, which has cut those
    spec = layout.spec(axes, x.shape, kind=kind, name=_NOUN[kind], manual=manual)
    for a, size in zip(axes, x.shape, strict=True):
        if (why := layout.why_whole(a, size, kind, manual=manual)) is not None:
            say_once(f"key and value heads: {why} do not divide, so every device there holds all of them")
    return jax.lax.with_sharding_constraint(x, spec)  # of the mesh in scope, which need not be of real devices


@functools.cache
def say_once(sentence: str) -> None:
    """Warns, the first time it is called with this sentence."""
    log.warning(sentence)


def in_use(param: jax.Array, axes: Sequence[str], dtype: Any) -> jax.Array:
    """A parameter as arithmetic wants it: in the compute dtype, and laid out as an activation.

    Activation rules leave `embed` whole, so this is where FSDP gathers: each weight is whole along `embed` while its
    layer runs, and only then. Said twice, since XLA would otherwise gather before a scan takes its slice, and copy the
    whole stack. A vocabulary that devices do not divide has zeros behind it (`fill`).
    """
    return constrain(fill(constrain(param.astype(dtype), *axes, kind="params"), *axes), *axes)


def fill(x: jax.Array, *axes: str | None) -> jax.Array:
    """A parameter with zeros behind a vocabulary that the layout in force does not divide; else as it is.

    Args:
      x: the parameter.
      *axes: its names.
    """
    more = [(0, n - size) for n, size in zip(filled_shape(axes, x.shape), x.shape, strict=True)]
    return constrain(jnp.pad(x, more), *axes, kind="params") if any(n for _, n in more) else x


def filled_shape(axes: Sequence[str | None], shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of `fill(x, *axes)`."""
    layout, manual = current(), jax.sharding.get_abstract_mesh().manual_axes
    if layout is None:
        return tuple(shape)
    return tuple(layout.filled(a, n, manual) for a, n in zip(axes, shape, strict=True))


def unfill(gradient: jax.Array, shape: Sequence[int], *axes: str) -> jax.Array:
    """The gradient of a parameter of this shape and these names, from that of what `fill` made of it."""
    if gradient.shape == tuple(shape):
        return gradient
    return constrain(gradient[tuple(slice(n) for n in shape)], *axes, kind="grads")
