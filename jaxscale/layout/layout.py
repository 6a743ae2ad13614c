"""`Layout`: a device mesh and the rules that shard named dimensions over it."""

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
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxscale.config import register
from jaxscale.errors import LayoutError, count
from jaxscale.layout.axes import AXES, FILLED, MESH_AXES, REPLICABLE, SETTINGS, check_axis, check_mesh_axis
from jaxscale.layout.mesh import make_mesh, parse_mesh, resolve_sizes
from jaxscale.layout.pipeline import Pipeline
from jaxscale.layout.rules import Kind, Rules, preset
from jaxscale.layout.sums import Sums
from jaxscale.signatures import check_call

log = logging.getLogger("jaxscale")

# The layout in force. A user context is part of the key of JAX's trace cache; with a global or a context variable, a
# second layout on the same mesh would silently reuse the first one's specs.
_active = jax.make_user_context(None)


class _Stacks(threading.local):
    """The `with layout:` blocks that each thread has entered, the innermost last."""

    def __init__(self) -> None:
        self.entered: list[contextlib.ExitStack] = []


_stacks = _Stacks()


def current() -> Layout | None:
    """Return the layout whose `with` block the caller is in, or `None`."""
    return _active.value


@register
@dataclasses.dataclass(frozen=True)
class Layout:
    """A device mesh and the rules that shard named dimensions over it.

    Inside `with layout:`, `constrain` applies its rules and `jit` uses its mesh.

    Args:
      mesh: sizes by mesh axis, such as `"data=2,fsdp=2,tensor=2"`; one may be -1 (the rest of the devices).
      rules: a preset's name (see `jaxscale.layout.PRESETS`) or a `Rules`.
      sequence_sharded: with a preset, also shard the residual stream's sequence over `tensor`.
      pipeline: the schedule of a mesh with a `pipeline` axis, such as "1f1b:8" or a `Pipeline`; `None` is `Pipeline()`.
      across: on several TPU slices, the mesh axis that spans them, such as "data"; its size counts all slices
        ("data=2,fsdp=64" over two slices of 64). Ignored with one slice.
      sums: how devices sum their terms after attention's output projection and the feed-forward's second product,
        such as `jaxscale.parallel.StarSum()`; `None` is an all-reduce.

    Raises:
      LayoutError: an unknown mesh axis, rule preset, logical axis or schedule (when built); too few devices (when
        used).
      ConfigError: `sums` does not take the arguments of `jaxscale.layout.sums.Sums`.
    """

    mesh: str = "data=-1"
    rules: str | Rules = "fsdp_tensor"
    sequence_sharded: bool = False
    pipeline: str | Pipeline | None = None
    across: str | None = None
    sums: Sums | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, str):
            raise LayoutError(f"a mesh is a string, such as 'data=2,tensor=4', not {self.mesh!r}")
        parse_mesh(self.mesh)
        Pipeline.of(self.pipeline)
        if self.across is not None:
            check_mesh_axis(self.across, "Layout.across")
        if self.sums is not None:
            check_call("Layout.sums", self.sums, ("term", "tokens", "over", "dim"), ())
        if self.sums is not None and self.sequence_sharded:
            raise LayoutError(
                "Layout.sums replaces all-reduces, and with Layout.sequence_sharded products end in reduce-scatters; "
                "set one of the two, or use Transformer.overlap with sequence_sharded"
            )
        if isinstance(self.rules, str):
            preset(self.rules)
        elif self.sequence_sharded:
            raise LayoutError(
                "Layout.sequence_sharded works with a preset only; in your own Rules map 'residual_seq' to "
                "('context', 'tensor') instead"
            )

    @functools.cached_property
    def resolved_rules(self) -> Rules:
        """The `Rules`, also where `rules` is the name of a preset, as `Pipeline.vocabulary` changes them."""
        rules = self.rules
        if not isinstance(rules, Rules):
            rules = preset(rules, sequence_sharded=self.sequence_sharded)
        return rules if self.schedule.vocabulary == "sharded" else rules.with_whole_vocabulary()

    @functools.cached_property
    def schedule(self) -> Pipeline:
        """The pipeline schedule, also where `pipeline` is a string or `None`."""
        return Pipeline.of(self.pipeline)

    @property
    def stages(self) -> int:
        """The number of pipeline stages; 1 is no pipeline."""
        return self.sizes["pipeline"]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every mesh axis. Needs devices only to replace a -1."""
        sizes = parse_mesh(self.mesh)
        devices = jax.device_count() if -1 in sizes.values() else math.prod(sizes.values())
        return resolve_sizes(sizes, devices, self.mesh)

    @functools.cached_property
    def device_mesh(self) -> Mesh:
        """The device mesh, made at first use."""
        return make_mesh(self.mesh, across=self.across)

    @property
    def specification(self) -> Layout:
        """The layout without devices."""
        return self

    def on(self, devices: Sequence[jax.Device]) -> PlacedLayout:
        """Return this layout placed on some devices.

        Args:
          devices: the devices, which need not be this machine's (when compiling for a pod).

        Raises:
          LayoutError: too few devices, or a number that cannot replace a -1.
        """
        if math.prod(parse_mesh(self.mesh).values()) > len(devices):
            raise LayoutError(
                f"mesh '{self.mesh}' needs {math.prod(parse_mesh(self.mesh).values())} devices and there are "
                f"{len(devices)}; use a larger topology or a smaller mesh"
            )
        return self._placed(make_mesh(self.mesh, devices, across=self.across))

    def abstract(self, devices: int | None = None, *, kind: str | None = None) -> PlacedLayout:
        """Return this layout on an abstract mesh: programs can be traced under it, and no array can be placed.

        Args:
          devices: the number of devices, for a mesh with a -1; by default from the mesh.
          kind: the device kind, such as "TPU v5" or "NVIDIA H200", which decides which kernels are chosen.

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
        """The number of devices of the mesh."""
        return math.prod(self.sizes.values())

    def __enter__(self) -> Layout:
        with contextlib.ExitStack() as stack:  # if one context fails, the others are left
            mesh: Any = self.device_mesh
            abstract = isinstance(mesh, AbstractMesh)
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh) if abstract else jax.set_mesh(mesh))
            stack.enter_context(_active(self))
            _stacks.entered.append(stack.pop_all())
        return self

    def __exit__(self, *exc: object) -> None:
        _stacks.entered.pop().close()

    def __reduce__(self) -> tuple[Any, ...]:
        # without the devices, because another process has other devices
        return functools.partial(Layout, **_fields(self)), ()

    def cut(
        self, axis: str, kind: Kind = "activations", *, size: int | None = None, manual: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Return the mesh axes, of more than one device, that a logical axis is sharded over.

        Args:
          axis: a logical axis.
          kind: which of the rules' four maps to read.
          size: the dimension's size, if known: key heads that the mesh axes do not divide are replicated
            (`jaxscale.layout.axes.REPLICABLE`).
          manual: mesh axes of an enclosing `shard_map`, which are left out.

        Raises:
          LayoutError: no such logical axis.
        """
        check_axis(axis, "Layout.cut")
        over = tuple(m for m in self.resolved_rules.target(kind, axis) if self.sizes[m] > 1 and m not in manual)
        return () if axis in REPLICABLE and size is not None and size % self._pieces(over) else over

    def split(self, axis: str, kind: Kind = "activations", *, size: int | None = None) -> int:
        """Return the number of shards along a logical axis.

        Args:
          axis: a logical axis.
          kind: which of the rules' four maps to read.
          size: the dimension's size, if known; see `cut`.

        Raises:
          LayoutError: no such logical axis.
        """
        check_axis(axis, "Layout.split")
        return self._pieces(self.cut(axis, kind, size=size))

    def why_whole(
        self, axis: str | None, size: int, kind: Kind = "activations", *, manual: Collection[str] = ()
    ) -> str | None:
        """Return why a dimension is replicated that the rules shard, such as "1 on tensor=2", else `None`.

        Args:
          axis: a logical axis or `None`.
          size: the dimension's size.
          kind: which of the rules' four maps to read.
          manual: mesh axes of an enclosing `shard_map`, which are left out.
        """
        if axis not in REPLICABLE:
            return None
        over = self.cut(axis, kind, manual=manual)
        if self.cut(axis, kind, size=size, manual=manual) == over:
            return None
        return f"{size} on {' x '.join(f'{m}={self.sizes[m]}' for m in over)}"

    def filled(self, axis: str | None, size: int, manual: Collection[str] = ()) -> int:
        """Return a dimension's size while layers use it: a vocabulary is padded until the mesh divides it.

        Args:
          axis: the dimension's logical axis or `None`.
          size: the dimension's size.
          manual: mesh axes of an enclosing `shard_map`, which are left out.
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
        """Return the partition spec of a tensor from its logical axes.

        Exceptions to the rules: a stack of layers that the stages, or their chunks, do not divide is sharded along its
        first other dimension that divides, and each step moves every layer to its stage; one number of each layer is
        replicated. The same holds for a parameter, its gradient and its optimizer state whose vocabulary does not
        divide; a vector over the vocabulary is then replicated. Key heads (`kv_heads`) that their mesh axes do not
        divide are replicated.

        Args:
          axes: a logical axis or `None` per dimension.
          shape: the dimensions' sizes; if set, divisibility is checked.
          kind: which of the rules' four maps to read.
          name: the tensor's name, for errors.
          manual: mesh axes of an enclosing `shard_map`, which are left out; `shape` is then the shape inside it.

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
        """Return the mesh axes that each dimension is sharded over."""
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
            if (axis in FILLED and len(shape) == 1) or (axis == "layers" and math.prod(shape) == shape[at]):
                targets[at] = ()  # a number for each id or layer: no other dimension can be sharded
        return targets

    def _moves(self, axis: str | None, size: int, target: Sequence[str], kind: Kind) -> bool:
        """Return whether the mesh axes of this dimension shard another dimension of the tensor instead."""
        if axis == "layers":
            return "pipeline" in target and size % (self._pieces(target) * self.schedule.chunks_per_stage) != 0
        return axis in FILLED and kind != "activations" and size % self._pieces(target) != 0

    def _pieces(self, target: Sequence[str]) -> int:
        return math.prod(self.sizes[m] for m in target)

    def _indivisible(self, axis: str, size: int, target: tuple[str, ...], pieces: int, kind: Kind) -> str:
        below, above = size // pieces * pieces, -(-size // pieces) * pieces
        # A common divisor also divides the other dimensions on these mesh axes.
        fitting = math.gcd(size, pieces)
        if fitting == 1:
            fitting = max(n for n in range(1, pieces) if size % n == 0)
        mesh = " x ".join(f"{m}={self.sizes[m]}" for m in target)
        sizes = f"{below} or {above}" if below else f"{above}"
        if axis in SETTINGS:
            sizes += f" ({SETTINGS[axis]} if the model is a Transformer)"
        return (
            f"the rule {kind}['{axis}'] = {target if len(target) > 1 else target[0]!r} shards {size} over {pieces} "
            f"devices ({mesh}), and {pieces} does not divide {size}; the nearest '{axis}' that it divides is {sizes}, "
            f"or shard it over {count(fitting, 'device')}"
        )

    def sharding(
        self, axes: Sequence[str | None], shape: Sequence[int] | None = None, *, kind: Kind = "params", name: str = ""
    ) -> NamedSharding:
        """Return `spec` on the device mesh.

        Args:
          axes: a logical axis or `None` per dimension.
          shape: the dimensions' sizes; if set, divisibility is checked.
          kind: which of the rules' four maps to read.
          name: the tensor's name, for errors.

        Raises:
          LayoutError: see `spec`.
        """
        return NamedSharding(self.device_mesh, self.spec(axes, shape, kind=kind, name=name))

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.device_mesh, PartitionSpec())

    def __str__(self) -> str:
        named = ",".join(f"{a}={self.sizes[a]}" for a in MESH_AXES if self.sizes[a] > 1) or "one device"
        rules = self.rules if isinstance(self.rules, str) else "own rules"
        more = [", sequence-sharded"] if self.sequence_sharded else []
        more += [f", {self.schedule.name}"] if self.stages > 1 else []
        more += [f", {self.sums}"] if self.sums is not None else []
        return f"{named} ({rules}{''.join(more)})"


@dataclasses.dataclass(frozen=True)
class PlacedLayout(Layout):
    """A layout on certain devices, made by `Layout.on` and `Layout.abstract`.

    Equality and hash include the devices, so that a compiled program, an engine or loaded parameters are never used on
    other devices. Pickling drops the devices.

    Args:
      placement: the device mesh, which has the sizes of `mesh`.
    """

    placement: Mesh | AbstractMesh | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        specified = parse_mesh(self.mesh)
        sizes = {} if self.placement is None else dict(self.placement.shape)
        if tuple(sizes) != MESH_AXES or any(specified.get(a, 1) not in (-1, n) for a, n in sizes.items()):
            raise LayoutError(f"the layout is placed on {sizes}, which is not '{self.mesh}'; place it with Layout.on")

    @property
    def specification(self) -> Layout:
        """The layout without its devices."""
        return Layout(**_fields(self))

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every mesh axis."""
        return dict(self.device_mesh.shape)

    @functools.cached_property
    def device_mesh(self) -> Mesh:
        """The device mesh, which may be abstract."""
        return self.placement  # type: ignore[return-value]  # typed Mesh: an AbstractMesh cannot hold arrays


def _fields(layout: Layout) -> dict[str, Any]:
    return {f.name: getattr(layout, f.name) for f in dataclasses.fields(Layout)}


_NOUN = {"activations": "the activation", "params": "the parameter", "grads": "the gradient", "opt_state": "the state"}


def constrain(x: jax.Array, *axes: str | None, kind: Kind = "activations") -> jax.Array:
    """Constrain the sharding of an array by the logical axes of its dimensions; a no-op outside of a layout.

    Args:
      x: an array, traced or not.
      *axes: a logical axis or `None` per dimension of `x`.
      kind: which of the rules' four maps to read.

    Raises:
      LayoutError: an unknown name (with or without a layout), two dimensions on one mesh axis, or a dimension that
        does not divide.
    """
    layout = current()
    if layout is None:
        for a in axes:
            if a is not None and a not in AXES:
                check_axis(a, f"constrain(..., {', '.join(map(repr, axes))})")
        return x
    manual = jax.sharding.get_abstract_mesh().manual_axes  # of an enclosing shard_map, over which x is a shard already
    spec = layout.spec(axes, x.shape, kind=kind, name=_NOUN[kind], manual=manual)
    for a, size in zip(axes, x.shape, strict=True):
        if (why := layout.why_whole(a, size, kind, manual=manual)) is not None:
            say_once(f"key and value heads: {why} do not divide, so every device along that axis holds all of them")
    return jax.lax.with_sharding_constraint(x, spec)  # the mesh in scope may be abstract


@functools.cache
def say_once(sentence: str) -> None:
    """Log a warning, the first time this function is called with it.

    Args:
      sentence: the warning.
    """
    log.warning(sentence)
