"""Rules: where each logical axis lives on the mesh, for parameters, gradients, optimizer state and activations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

from jaxscale.config import register
from jaxscale.errors import LayoutError, near
from jaxscale.layout.axes import check_axis, check_mesh_axis
from jaxscale.other_names import fold

Kind = Literal["params", "grads", "opt_state", "activations"]
Target = str | tuple[str, ...] | None


class AxisMap(dict[str, tuple[str, ...]]):
    """Logical axis -> mesh axes, hashable because it is part of the key under which traces are cached."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    @classmethod
    def of(cls, mapping: Mapping[str, Target], where: str) -> AxisMap:
        out = cls()
        for axis, target in mapping.items():
            check_axis(axis, where)
            mesh_axes = () if target is None else (target,) if isinstance(target, str) else tuple(target)
            for m in mesh_axes:
                check_mesh_axis(m, f"{where}['{axis}']")
            if len(set(mesh_axes)) != len(mesh_axes):
                raise LayoutError(f"{where}['{axis}'] names a mesh axis twice in {mesh_axes}; give each once")
            out[axis] = mesh_axes
        return out


@register
@dataclasses.dataclass(frozen=True)
class Rules:
    """Four maps from logical axis to mesh axes; what a map does not name is replicated.

    A value is a mesh axis, a tuple of them (first is outermost), or `None`. A mesh axis of size 1 splits nothing, so
    one set of rules serves every mesh.

    Args:
      params: where parameters live.
      grads: where accumulated gradients live; `None` means as `params`.
      opt_state: where optimizer state of a parameter's shape lives; `None` means as `grads`.
      activations: where activations live, and weights while they are used.

    Raises:
      LayoutError: an unknown logical or mesh axis.
    """

    params: Mapping[str, Target] = dataclasses.field(default_factory=dict)
    grads: Mapping[str, Target] | None = None
    opt_state: Mapping[str, Target] | None = None
    activations: Mapping[str, Target] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        grads = self.params if self.grads is None else self.grads
        opt_state = grads if self.opt_state is None else self.opt_state
        for name, m in (("params", self.params), ("grads", grads), ("opt_state", opt_state),
                        ("activations", self.activations)):  # fmt: skip
            object.__setattr__(self, name, AxisMap.of(m, f"Rules.{name}"))

    def for_generation(self) -> Rules:
        """The same for steps of few tokens: what is cut along the sequence is the cache, not the step."""
        whole = dict.fromkeys(("seq", "residual_seq", "expert_seq"))
        return dataclasses.replace(self, activations={**self.activations, **whole})

    def target(self, kind: Kind, axis: str) -> tuple[str, ...]:
        """The mesh axes that `axis` is split over in the map `kind`."""
        return getattr(self, kind).get(axis, ())


# A batch is split over every axis that holds whole copies of a layer's arithmetic.
_BATCH: dict[str, Target] = {
    "batch": ("replica", "data", "fsdp", "expert"),
    "seq": "context",
    "residual_seq": "context",
    "expert_batch": ("replica", "data", "fsdp", "expert"),
    "expert_seq": "context",
    "cache_seq": "context",
    "pages": "context",
}
# Column- and row-parallel pairs of Megatron-LM (Shoeybi et al. 2019), and its vocabulary-parallel ends.
_TENSOR: dict[str, Target] = {
    **dict.fromkeys(("heads", "kv_heads", "mlp", "expert_mlp"), "tensor"),
    "vocab": ("pipeline", "tensor"),
}
_EXPERT: dict[str, Target] = {"experts": "expert", "layers": "pipeline"}
# The vocabulary's two ends are every stage's work, not the first's and the last's.
_ENDS: dict[str, Target] = {"vocab": "pipeline"}
# Partitioned over every replica of the batch; `embed` is in nearly every weight, `norm` is in the rest.
# (`expert` splits experts; it is no replica of those.)
_WIDTHS = ("embed", "norm", "expert_embed", "latent_in")
_ALL: dict[str, Target] = dict.fromkeys(_WIDTHS, ("data", "fsdp"))
_FSDP: dict[str, Target] = {"embed": "fsdp", "expert_embed": "fsdp", "latent_in": "fsdp"}
# Within FSDP's piece first, so that what crosses `data` is that piece only.
_NESTED: dict[str, Target] = dict.fromkeys(_WIDTHS, ("fsdp", "data"))
_USED: dict[str, Target] = {**_BATCH, **_TENSOR, "experts": "expert"}
# Experts over the devices that cut attention's heads and sequence, whole, with as many tokens on each (parallel
# folding, Liu et al. 2025).
_FOLDED: dict[str, Target] = {"experts": ("expert", "context", "tensor"), "expert_mlp": None}


def _replicated() -> Rules:
    return Rules(params={**_ENDS, "layers": "pipeline"}, activations={**_BATCH, **_ENDS})


def _zero1() -> Rules:
    rest = {**_TENSOR, **_EXPERT}
    return Rules(params=rest, grads={**rest, **_ALL}, activations=_USED)


def _hierarchical() -> Rules:
    rest = {**_TENSOR, **_EXPERT}
    return Rules(params={**rest, **_FSDP}, grads={**rest, **_NESTED}, activations=_USED)


def _fsdp() -> Rules:
    return Rules(params={**_FSDP, **_ENDS, **_EXPERT}, activations={**_BATCH, **_ENDS, "experts": "expert"})


def _tensor() -> Rules:
    return Rules(params={**_TENSOR, **_EXPERT}, activations=_USED)


def _fsdp_tensor() -> Rules:
    return Rules(params={**_FSDP, **_TENSOR, **_EXPERT}, activations=_USED)


def _folded() -> Rules:
    rules = _fsdp_tensor()
    params = {**rules.params, **_FOLDED}
    return Rules(params=params, activations={**rules.activations, **_FOLDED, "expert_seq": ("context", "tensor")})


PRESETS: dict[str, Callable[[], Rules]] = {
    "replicated": _replicated,
    "zero1": _zero1,
    "zero2": _zero1,
    "hierarchical": _hierarchical,
    "fsdp": _fsdp,
    "tensor": _tensor,
    "fsdp_tensor": _fsdp_tensor,
    "folded": _folded,
}
"""Rules by name. `replicated`: data parallelism. `zero1`, `zero2`: optimizer state and gradients split over all
replicas (Rajbhandari et al. 2020); one set of rules, since each gradient is reduce-scattered as it is made, and stage
1's whole ones would take more memory and half as many bytes again; over pipeline stages replicas keep whole ones, and
reduce-scatter them once a step. They go along with `tensor`, `expert` and `pipeline`. `hierarchical`: parameters over
`fsdp`, the fast axis, gradients and optimizer state over `fsdp` and `data`, so that only the update crosses the slow
one (Xu et al. 2025, low-bandwidth partitioning). `fsdp`: parameters as well, over the `fsdp` axis (ZeRO-3; hybrid when
`data` > 1). `tensor`: Megatron-LM. `fsdp_tensor`: both, and the default, since an axis of size 1 changes nothing.
`folded`: that, with experts over `expert`, `context` and `tensor` together, where attention has its sequence and
heads."""


def preset(name: str, *, sequence_sharded: bool = False) -> Rules:
    """The rules called `name`.

    Args:
      name: a key of `PRESETS`.
      sequence_sharded: also split the residual stream between blocks along its sequence over `tensor`
        (Korthikanti et al. 2022), which turns each all-reduce into a reduce-scatter and an all-gather.

    Raises:
      LayoutError: no such preset.
    """
    if name not in PRESETS:
        if fold(name) in ("sp", "sequence"):
            raise LayoutError(
                f"there is no rule preset '{name}'; set Layout.sequence_sharded = True beside another one"
            )
        raise LayoutError(f"there is no rule preset '{name}'{near(name, PRESETS)}")
    rules = PRESETS[name]()
    maps: dict[str, Mapping[str, Target]] = {f.name: getattr(rules, f.name) for f in dataclasses.fields(rules)}
    rules = Rules(**{kind: {**targets, "replicas": "replica"} for kind, targets in maps.items()})
    if sequence_sharded:
        rules = dataclasses.replace(rules, activations={**rules.activations, "residual_seq": ("context", "tensor")})
    return rules
